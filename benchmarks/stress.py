"""Models that harm only themselves: python -m benchmarks.stress [--minutes 10] [--seed N] [--json F].

A service of its own has eight innocent models, five whose requests end ONNX Runtime's process, and one that
hangs. Clients send requests to all of them at once, and some close their connection or are killed in the
middle of a request. Each answer of an innocent model is compared with NumPy's; a single one that is wrong,
refused or late fails the program. Prints the errors of each model, the times of its requests, and the memory
of processes at the start and the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.crashers import Array, Integers, adding, dividend, dividing, looped, looping, rounds
from tests.daemon.running import NO_TUNER, Service, descriptors, memory, start, wait_for

from honed.runtime import Client
from honed.runtime.errors import HonedError

CONFIG = '[serve]\nengine = "cpu"\n' + NO_TUNER
PATIENCE_SECONDS = 60.0  # Timeout of a client of an innocent model, the library's default
HANGS = 10_000_000  # Rounds, minutes
PAUSE_SECONDS = 0.5  # Mean pause of a client between two requests
# A client that is killed by SIGKILL: it asks a model that hangs, or sends half of a request.
DOOMED = "import socket,sys,time; s=socket.socket(1); s.connect(sys.argv[1]); "
DOOMED += "s.sendall(sys.stdin.buffer.read()); print(flush=True); time.sleep(600)"


@dataclass(slots=True)
class Outcome:
    """The requests for one model: milliseconds, errors, and in `failed` what must not be."""

    ms: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Innocent:
    """A model, its inputs for a number, and its right outputs."""

    file: bytes
    inputs: Callable[[int], dict[str, Array]]
    right: Callable[[dict[str, Array]], Array]


def innocents() -> dict[str, Innocent]:
    """Return six models that add a number, and two that loop for a moment."""

    def vector(seed: int) -> dict[str, Array]:
        return {"x": np.random.default_rng(seed).standard_normal(1 + seed % 1000).astype(np.float32)}

    def added(number: int) -> Callable[[dict[str, Array]], Array]:
        return lambda inputs: inputs["x"] + np.float32(number)

    found = {f"adding-{n}": Innocent(adding(n), vector, added(n)) for n in range(6)}
    loop = Innocent(looping(), lambda seed: rounds(1 + seed % 200, seed), looped)
    return found | {"looping-1": loop, "looping-2": loop}


def crashing() -> dict[str, tuple[bytes, Integers]]:
    """Return models that crash, and the integers that they take."""
    kinds: list[tuple[str, Integers]] = [("Div", np.int64), ("Mod", np.int32), ("Mod", np.int64)]
    return {f"crashing-{n}": (dividing(kinds[n % 3][1], kinds[n % 3][0]), kinds[n % 3][1]) for n in range(5)}


class Stress:
    """Clients of one service, until `stop`."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.outcomes: dict[str, Outcome] = {}
        self._seed = seed
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Start the threads of all clients."""
        for name, innocent in innocents().items():
            self._start(name, partial(self._ask, name, innocent))
        for name, (_, kind) in crashing().items():
            self._start(name, partial(self._crash, name, kind))
        for n in range(2):
            self._start(f"hanging, client {n}", self._hang)
        self._start("dying clients", self._die)

    def end(self) -> None:
        """Have all clients end after their requests under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def failures(self) -> list[str]:
        """Return the failures of innocent models, and unexpected errors of others."""
        return [f"{name}: {failed}" for name, each in self.outcomes.items() for failed in each.failed]

    def _start(self, name: str, ask: Callable[[Client, random.Random, Outcome], None]) -> None:
        outcome = self.outcomes[name] = Outcome()
        rng = random.Random(f"{self._seed}/{name}")

        def run() -> None:
            with self.service.client(timeout=2 * PATIENCE_SECONDS) as client:
                while not self._stop.wait(rng.expovariate(1 / PAUSE_SECONDS)):
                    try:
                        ask(client, rng, outcome)
                    except Exception as error:  # noqa: BLE001 - whatever it is, it must not be
                        outcome.failed.append(f"{type(error).__name__}: {error}"[:500])

        self._threads.append(threading.Thread(target=run, name=name))
        self._threads[-1].start()

    def _ask(self, name: str, model: Innocent, client: Client, rng: random.Random, outcome: Outcome) -> None:
        inputs = model.inputs(rng.randrange(1 << 20))
        begun = time.monotonic()
        y = client.infer(name, inputs, timeout=PATIENCE_SECONDS)["y"]
        outcome.ms.append((time.monotonic() - begun) * 1e3)
        np.testing.assert_allclose(y, model.right(inputs), atol=1e-5)

    def _crash(self, name: str, kind: Integers, client: Client, rng: random.Random, outcome: Outcome) -> None:
        """Ask for what ends the process, and at times for what does not; any error is an answer."""
        deadly = rng.random() < 0.7
        begun = time.monotonic()
        with _counted(outcome):
            client.infer(name, dividend(kind, deadly=deadly), timeout=PATIENCE_SECONDS)
            outcome.errors["answered"] += 1
        outcome.ms.append((time.monotonic() - begun) * 1e3)

    def _hang(self, client: Client, rng: random.Random, outcome: Outcome) -> None:
        begun = time.monotonic()
        with _counted(outcome):
            client.infer("hanging", rounds(HANGS), timeout=rng.uniform(0.5, 20))
        outcome.ms.append((time.monotonic() - begun) * 1e3)

    def _die(self, client: Client, rng: random.Random, outcome: Outcome) -> None:
        """Kill a client in the middle of a request, or of its run."""
        whole = _request(*rng.choice([("hanging", rounds(HANGS)), ("looping-1", rounds(100_000))]))
        sent = whole if rng.random() < 0.7 else whole[: rng.randrange(1, len(whole))]
        command = [sys.executable, "-I", "-S", "-c", DOOMED, str(self.service.socket)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as doomed:
            assert doomed.stdin is not None
            assert doomed.stdout is not None
            doomed.stdin.write(sent)
            doomed.stdin.close()
            doomed.stdout.readline()
            self._stop.wait(rng.expovariate(1 / PAUSE_SECONDS))
            doomed.kill()
        outcome.errors["killed in a run" if sent is whole else "killed in half of a request"] += 1


@contextlib.contextmanager
def _counted(outcome: Outcome) -> Any:
    try:
        yield
    except HonedError as error:
        outcome.errors[type(error).__name__] += 1


def _request(name: str, inputs: Mapping[str, Array]) -> bytes:
    """Return the bytes of a ModelInfer."""
    import msgpack

    kinds = {"float32": "FP32", "int64": "INT64"}
    params = {
        "model_name": name,
        "inputs": [
            {"name": key, "datatype": kinds[value.dtype.name], "shape": list(value.shape)}
            for key, value in inputs.items()
        ],
        "raw_input_contents": [value.tobytes() for value in inputs.values()],
    }
    data: bytes = msgpack.packb([0, 1, "ModelInfer", [params]])
    return data


def held(service: Service) -> dict[str, dict[str, int]]:
    """Return descriptors, threads and MiB of own memory of the service and its CPU engines."""
    with service.client() as client:
        engines = {each["name"]: each["worker"]["pid"] for each in client.status()["devices"]}
    pids = {"service": service.process.pid, **{name: pid for name, pid in engines.items() if name and pid}}
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(psutil.Error, OSError):
            found[name] = {
                "descriptors": descriptors(pid),
                "threads": psutil.Process(pid).num_threads(),
                "MiB": memory(pid) >> 20,
            }
    return found


def run(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Run all clients against a service for `seconds`, and return the results."""
    service = start(folder / "state", folder / "cache", config=CONFIG)
    try:
        files = {name: each.file for name, each in innocents().items()}
        files |= {name: file for name, (file, _) in crashing().items()} | {"hanging": looping()}
        with service.client() as client:
            for name, file in files.items():
                (folder / f"{name}.onnx").write_bytes(file)
                client.add(folder / f"{name}.onnx", name=name)
        before = held(service)
        stress = Stress(service, seed)
        stress.begin()
        time.sleep(seconds)
        stress.end()
        with service.client() as client:
            wait_for(lambda: not any(client.status()["queue"].values()), "nothing to be left", service)
            models = {each["name"]: (each["state"], each["reason"]) for each in client.models()}
            devices = client.status()["devices"]
        failures = stress.failures()
        failures += [
            f"{name} is {models[name][0]}: {models[name][1]}"
            for name in innocents()
            if models[name] != ("READY", "")
        ]
        return {
            "seconds": seconds,
            "seed": seed,
            "failures": failures,
            "requests": {name: _row(each) for name, each in stress.outcomes.items()},
            "restarts": {each["name"] or "device": each["worker"]["restarts"] for each in devices},
            "held": {"before": before, "after": held(service)},
            "models": models,
        }
    finally:
        service.stop()


def _row(outcome: Outcome) -> dict[str, Any]:
    ms = sorted(outcome.ms) or [0.0]
    return {
        "requests": len(outcome.ms) + len(outcome.failed),
        "p50_ms": round(statistics.median(ms), 1),
        "p99_ms": round(ms[int(0.99 * (len(ms) - 1))], 1),
        "max_ms": round(ms[-1], 1),
        "errors": dict(outcome.errors),
    }


def main() -> int:
    """Stress a service; return the exit status: 1 if an innocent model failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stress", description=(__doc__ or "")[:80])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="honed-stress-") as folder:
        found = run(options.minutes * 60, options.seed, Path(folder))
    for name, row in found["requests"].items():
        print(f"{name:20s} {row}")
    for name in ("restarts", "held"):
        print(f"{name}: {json.dumps(found[name])}")
    for name, (state, reason) in found["models"].items():
        if reason:
            print(f"{name}: {state}, {reason}")
    print(*found["failures"], sep="\n")
    print(f"seed {found['seed']}: {len(found['failures'])} failures")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
