"""Injects everything that can go wrong around the service, while a soak runs (`soak --faults`)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from tests.daemon.running import Service, wait_for

from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel, Launch, Step
from honed.runtime.errors import HonedError

EVERY_SECONDS = (15.0, 30.0)
MARK = 12345.0  # First element of an input on which a successor crashes
WILD = "{ ((volatile __global int*)0)[get_global_id(0) + (1L << 40)] = 1; }"
FOREIGN = f"""
import sys
import pyopencl as cl
from honed.machine import devices, opencl
device = devices.select(sys.argv[1])
program = cl.Program(opencl.context(device.cl), "__kernel void wild() {WILD}").build()
queue = cl.CommandQueue(opencl.context(device.cl))
program.wild(queue, (64,), None)
queue.finish()
"""
TMPFS_MIB = 400
CLOCK = Path(__file__).parents[2] / "tests/daemon/clock.c"


class Holder:
    """A small tmpfs for the service's state, so that it can be filled; needs root."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "tmpfs"
        self.clock = folder / "clock"
        self._shim = folder / "clock.so"

    def open(self) -> dict[str, str]:
        """Mount the state folder; return environment variables for a service whose wall clock can be set."""
        self.state.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "soak", str(self.state)], check=True
        )
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-o", str(self._shim), str(CLOCK), "-ldl"], check=True
        )
        self.set_clock(0)
        return {"LD_PRELOAD": str(self._shim), "HONED_TEST_CLOCK": str(self.clock)}

    def set_clock(self, ahead: int) -> None:
        """Set the seconds that the service's wall clock is ahead; its processes have the file mapped."""
        with self.clock.open("r+b" if self.clock.exists() else "wb", buffering=0) as file:
            file.write(ahead.to_bytes(8, sys.byteorder, signed=True))

    def close(self) -> None:
        """Unmount the state folder, if it is mounted."""
        subprocess.run(["umount", "-l", str(self.state)], check=False, capture_output=True)


class Faults:
    """Injects one fault after the other; `story` has a line for each."""

    def __init__(
        self, service: Service, holder: Holder, folder: Path, inputs: dict[str, dict[str, np.ndarray]]
    ) -> None:
        """Set up the faults; `inputs` are valid ones of each model."""
        self.story: list[str] = []
        self._inputs = inputs
        self._service = service
        self._holder = holder
        self._folder = folder
        self._kinds: list[tuple[str, Callable[[], str]]] = [
            ("kill -9 of the worker", lambda: self._kill("honed.daemon.worker.worker")),
            ("the worker hangs (SIGSTOP)", self._hang),
            ("kill -9 of the tuner", lambda: self._kill("honed.tuner.service")),
            ("kill -9 of the measuring child", lambda: self._kill("honed.tuner.measure.child")),
            ("kill -9 of the searching child", lambda: self._kill("honed.tuner.tune.searcher")),
            ("kill -9 of the service", self._kill_service),
            ("a wrong successor is published", self._wrong),
            ("a successor that crashes is published", self._crashing),
            ("a successor that crashes for one input is published", self._crashing_later),
            ("the disk is full for 10 s", self._full_disk),
            ("a kernel of another process writes out of all memory", self._foreign),
            ("a GPU fault of another process in the kernel log (written)", self._record),
            ("the clock jumps ahead by a day", lambda: self._jump(86_400)),
            ("the clock is set back by an hour", lambda: self._jump(-3600)),
        ]

    def run(self, seconds: float) -> None:
        """Inject faults for `seconds`, every kind in turn."""
        end = time.monotonic() + seconds
        begun, number = time.monotonic(), 0
        while time.monotonic() < end:
            time.sleep(random.uniform(*EVERY_SECONDS))
            name, inject = self._kinds[number % len(self._kinds)]
            number += 1
            at = time.monotonic() - begun
            try:
                became = inject()
            except (HonedError, OSError, psutil.Error, AssertionError) as error:
                became = f"UNEXPECTED {type(error).__name__}: {error}"
            self.story.append(f"{at:5.0f} s  {name}: {became}")

    def _kill(self, module: str) -> str:
        found = self._find(module)
        if found is None:
            return "there was none just then"
        found.kill()
        begun = time.monotonic()
        wait_for(lambda: (f := self._find(module)) and f.pid != found.pid, f"another {module}", seconds=400)
        return f"another one after {time.monotonic() - begun:.1f} s"

    def _hang(self) -> str:
        found = self._find("honed.daemon.worker.worker")
        if found is None:
            return "there was none just then"
        os.kill(found.pid, signal.SIGSTOP)
        begun = time.monotonic()
        wait_for(
            lambda: (f := self._find("honed.daemon.worker.worker")) and f.pid != found.pid,
            "another worker",
            seconds=120,
        )
        return f"replaced after {time.monotonic() - begun:.1f} s"

    def _kill_service(self) -> str:
        self._service.kill()
        begun = time.monotonic()
        self._service.restart()
        wait_for(self._service.answers, "the service to answer")
        answered = time.monotonic() - begun
        self._service.wait_ready()
        return f"answers after {answered:.1f} s, every model ready after {time.monotonic() - begun:.1f} s"

    def _wrong(self) -> str:
        """Offer changed weights, with valid sources and without probes: only the old version can tell."""

        def spoil(model: CompiledModel, constants: dict[int, np.ndarray]) -> CompiledModel:
            assert model.proof is not None
            probed = {i for probe in model.proof.probes for i in (*probe.inputs, *probe.outputs)}
            for index, value in constants.items():
                if index not in probed and value.dtype.kind == "f":
                    constants[index] = value * np.asarray(1.01, value.dtype)
            sources = tuple(f"{source}\n/* {time.time_ns()} */\n" for source in model.sources)
            proof = dataclasses.replace(model.proof, probes=())
            return dataclasses.replace(model, sources=sources, proof=proof)

        return self._offer(spoil)

    def _crashing(self) -> str:
        def spoil(model: CompiledModel, constants: dict[int, np.ndarray]) -> CompiledModel:
            return _with_statement(model, next(s for s in model.steps if isinstance(s, Launch)), WILD)

        return self._offer(spoil)

    def _crashing_later(self) -> str:
        """Offer a right and fast version that crashes on an input of no probe: one retry, and a rollback."""
        with self._service.client() as client:
            histories = {model["name"]: client.history(model["name"]) for model in client.models()}
        for name, history in histories.items():
            slower = [v["number"] for v in history["versions"] if v["kept"] and not v["quarantine"]]
            if slower and min(slower) < history["version"]:
                return self._crash_for(name, history["version"], min(slower))
        return "no model has an earlier version yet that this one would be faster than"

    def _crash_for(self, name: str, present: int, slower: int) -> str:
        def spoil(model: CompiledModel, constants: dict[int, np.ndarray]) -> CompiledModel:
            reader = next(s for s in model.steps if isinstance(s, Launch) and given(model) in s.buffers)
            argument = reader.buffers.index(given(model))
            return _with_statement(model, reader, f"if (ARG{argument}[0] == {MARK}f) {WILD}")

        def given(model: CompiledModel) -> int:
            return model.inputs[0].buffer

        def made(path: Path) -> Path:
            return self._spoilt(path, spoil)

        with self._service.client() as client:
            marked = {key: value.copy() for key, value in self._inputs[name].items()}
            first = client.metadata(name)["inputs"][0]["name"]
            marked[first].flat[0] = MARK
            with client.export(name) as held:
                (self._folder / "given.honed").write_bytes(held.compiled.read())
            expected = client.infer(name, marked)
            client.pin(name, slower)  # A rollback would put the present version aside
            client.pin(name, 0)
            result = client.publish(
                name, made(self._folder / "given.honed"), expected=client.show(name)["sha256"], why="a soak"
            )
            if not result["published"]:
                client.pin(name, present)
                client.pin(name, 0)
                return f"not published: {result['sentence'][:160]}"
            answer = client.infer(name, marked)
            right = all(np.allclose(answer[key], expected[key], rtol=1e-3, atol=1e-3) for key in expected)
            after = client.history(name)
            came_back = after["version"] == slower
            story = next(v["quarantine"] for v in after["versions"] if v["number"] == result["version"])
            client.pin(name, present)
            client.pin(name, 0)
        return (
            f"answered {'right' if right else 'WRONG'}; the version before is "
            f"{'served again' if came_back else 'NOT served'}; quarantine: {story[:120]}"
        )

    def _offer(self, spoil: Callable[[CompiledModel, dict[int, np.ndarray]], CompiledModel]) -> str:
        with self._service.client() as client:
            name = random.choice(sorted(self._inputs))
            with client.export(name) as given:
                (self._folder / "given.honed").write_bytes(given.compiled.read())
                expected = given.sha256
            path = self._spoilt(self._folder / "given.honed", spoil)
            result = client.publish(name, path, expected=expected, why="made wrong on purpose")
        return f"{'PUBLISHED' if result['published'] else 'refused'}: {result['sentence'][:160]}"

    def _spoilt(
        self, path: Path, spoil: Callable[[CompiledModel, dict[int, np.ndarray]], CompiledModel]
    ) -> Path:
        made = self._folder / "offered.honed"
        with contextlib.closing(modelfile.read(path)) as file:
            constants = {
                i: np.array(file.constant(i))
                for i, buffer in enumerate(file.model.buffers)
                if buffer.place == "constant"
            }
            modelfile.write(made, spoil(file.model, constants), constants)
        return made

    def _full_disk(self) -> str:
        filler = self._holder.state / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        try:
            time.sleep(10.0)
            with self._service.client() as client:
                serving = client.ready()
        finally:
            filler.unlink()
        return "every model was served meanwhile" if serving else "not every model was served meanwhile"

    def _foreign(self) -> str:
        """Make another process fault: on a GPU with a real record; on a processor only that process ends."""
        command = [sys.executable, "-c", FOREIGN, self._service_device()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        with self._service.client() as client:
            ready = client.ready()
        how = f"ended with {done.returncode}"
        return f"it {how}; every model is {'served' if ready else 'NOT served'}"

    def _service_device(self) -> str:
        with self._service.client() as client:
            return str(client.status()["devices"][0]["spec"])

    def _record(self) -> str:
        with open("/dev/kmsg", "wb", buffering=0) as kmsg:
            kmsg.write(b"<3>mali fb000000.gpu: Unhandled Page fault in AS1 at VA 0x00000000DEADB000\n")
        with self._service.client() as client:
            return f"worker {client.status()['worker']['state']}"

    def _jump(self, offset: int) -> str:
        self._holder.set_clock(offset)
        time.sleep(5.0)
        with self._service.client() as client:
            ready = client.ready()
        self._holder.set_clock(0)
        return "every model was served meanwhile" if ready else "not every model was served meanwhile"

    def _find(self, module: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._service.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    command = child.cmdline()
                    if module in command and "honed.process.limits" not in command:
                        return child
        return None


def _with_statement(model: CompiledModel, step: Step, statement: str) -> CompiledModel:
    """Return the model with a statement at the start of a launch's kernel; ARGn is its argument n."""
    assert isinstance(step, Launch)
    kernel = model.kernels[step.kernel]
    source = model.sources[kernel.source]
    found = re.search(rf"\b{kernel.entry}\s*\(([^)]*)\)\s*\{{", source)
    assert found is not None, source[:400]
    names = [re.findall(r"\w+", argument)[-1] for argument in found[1].split(",")]
    statement = re.sub(r"ARG(\d+)", lambda m: names[int(m[1])], statement)
    # Never the same twice: those that were tried are in quarantine.
    changed = f"{source[: found.end()]} {statement} {source[found.end() :]}\n/* {time.time_ns()} */\n"
    sources = (*model.sources[: kernel.source], changed, *model.sources[kernel.source + 1 :])
    return dataclasses.replace(model, sources=sources)
