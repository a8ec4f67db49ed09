"""Everything that can go wrong around the service, on purpose, while a soak runs (`soak --faults`)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from honed.runtime import modelfile
from honed.runtime.errors import HonedError
from honed.runtime.model import CompiledModel

from .running import Service, wait_for

EVERY_SECONDS = (20.0, 40.0)
TMPFS_MIB = 400
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")  # Debian's package faketime


class Holder:
    """A small tmpfs for the service's state, so that it can be filled; needs root."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "tmpfs"
        self.clock = folder / "clock"

    def open(self) -> dict[str, str]:
        """Mount it; gives the environment for the service, with a clock that can be set if there is one."""
        self.state.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "soak", str(self.state)], check=True
        )
        if not FAKETIME.exists():
            return {}
        self.set_clock(0)
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set_clock(self, offset: int) -> None:
        """Seconds that the service's wall clock is ahead."""
        made = self.clock.with_suffix(".new")
        made.write_text(f"{offset:+d}s")
        made.rename(self.clock)

    def close(self) -> None:
        """Unmount it, if it was mounted."""
        subprocess.run(["umount", "-l", str(self.state)], check=False, capture_output=True)


class Faults:
    """Injects one fault after the other; `story` has a line for each."""

    def __init__(self, service: Service, holder: Holder, folder: Path) -> None:
        self.story: list[str] = []
        self._service = service
        self._holder = holder
        self._folder = folder
        self._kinds: list[tuple[str, Callable[[], str]]] = [
            ("kill -9 of the worker", lambda: self._kill("honed.daemon.worker")),
            ("the worker hangs (SIGSTOP)", self._hang),
            ("kill -9 of the tuner", lambda: self._kill("honed.tuner.service")),
            ("kill -9 of the measuring child", lambda: self._kill("honed.tuner.measure.child")),
            ("kill -9 of the searching child", lambda: self._kill("honed.tuner.tune.searcher")),
            ("kill -9 of the service", self._kill_service),
            ("a wrong successor is published", self._wrong),
            ("a successor that crashes is published", self._crashing),
            ("the disk is full for 10 s", self._full_disk),
            ("a GPU fault of another process in the kernel log (written)", self._record),
        ]
        if FAKETIME.exists():
            self._kinds.append(("the clock jumps ahead by a day", lambda: self._jump(86_400)))
            self._kinds.append(("the clock is set back", lambda: self._jump(-3600)))

    def run(self, seconds: float) -> None:
        """For so long, every kind in turn."""
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
        found = self._find("honed.daemon.worker")
        if found is None:
            return "there was none just then"
        os.kill(found.pid, signal.SIGSTOP)
        begun = time.monotonic()
        wait_for(
            lambda: (f := self._find("honed.daemon.worker")) and f.pid != found.pid,
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
        """Weights changed, and its own probes with them: only the version before can tell."""

        def spoil(model: CompiledModel, constants: dict[int, np.ndarray]) -> CompiledModel:
            assert model.proof is not None
            outputs = {index for probe in model.proof.probes for index in probe.outputs}
            inputs = {index for probe in model.proof.probes for index in probe.inputs}
            for index, value in constants.items():
                if index in outputs:
                    constants[index] = value + np.asarray(1, value.dtype)
                elif index not in inputs and value.dtype.kind == "f":
                    constants[index] = value * np.asarray(1.01, value.dtype)
            return model

        return self._offer(spoil)

    def _crashing(self) -> str:
        def spoil(model: CompiledModel, constants: dict[int, np.ndarray]) -> CompiledModel:
            first = model.sources[0]
            brace = first.index("{", first.index("__kernel")) + 1
            wild = " ((volatile __global int*)0)[get_global_id(0) + (1 << 28)] = 1;"
            return dataclasses.replace(
                model, sources=(first[:brace] + wild + first[brace:], *model.sources[1:])
            )

        return self._offer(spoil)

    def _offer(self, spoil: Callable[[CompiledModel, dict[int, np.ndarray]], CompiledModel]) -> str:
        path = self._folder / "offered.honed"
        with self._service.client() as client:
            name = random.choice([model["name"] for model in client.models()])
            with client.export(name) as given:
                (self._folder / "given.honed").write_bytes(given.compiled.read())
                expected = given.sha256
            with contextlib.closing(modelfile.read(self._folder / "given.honed")) as file:
                constants = {
                    i: np.array(file.constant(i))
                    for i, buffer in enumerate(file.model.buffers)
                    if buffer.place == "constant"
                }
                modelfile.write(path, spoil(file.model, constants), constants)
            told = client.publish(name, path, expected=expected, why="made wrong on purpose")
        return f"{'PUBLISHED' if told['published'] else 'refused'}: {told['sentence'][:160]}"

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
                    if module in command and "honed.daemon.launch" not in command:
                        return child
        return None
