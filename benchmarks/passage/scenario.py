"""Does what `benchmarks.passage` records, with the packages in PYTHONPATH: python scenario.py FOLDER."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from honed.runtime import Client
from honed.runtime.errors import HonedError

REQUESTS = 8  # Windows of one request each: the first of a client is the cold one
REQUEST, FILE, CANDIDATE, REST = 1, 50, 100, 150  # Numbers of windows
IDLE = """
[idle]
quiet_seconds = 0.2
settle_seconds = 0
max_pressure_percent = 100
max_load_per_core = 1000
[tuner]
spawn = true
"""
_WAITING = IDLE.replace("[idle]", "[idle]\nenabled = false")
_ASLEEP = _WAITING.replace("spawn = true", "spawn = false")
_SECONDS = 900.0


def write_model(path: Path, image: tuple[int, ...] = (1, 9, 241, 243)) -> None:
    """Write a small network with windows, a product and a softmax, whose first schedules are slow."""
    window = {"kernel_shape": [7, 7], "strides": [1, 1], "pads": [3, 3, 3, 3]}
    nodes = [
        helper.make_node("MaxPool", ["x"], ["highest"], **window),
        helper.make_node("AveragePool", ["x"], ["mean"], count_include_pad=1, **window),
        helper.make_node("MatMul", ["a", "b"], ["ab"]),
        helper.make_node("Softmax", ["ab"], ["y"], axis=0),
    ]
    product = (97, 83)
    inputs = [
        helper.make_tensor_value_info(name, 1, shape)
        for name, shape in {"x": image, "a": (97, 131), "b": (131, 83)}.items()
    ]
    outputs = [helper.make_tensor_value_info(name, 1, image) for name in ("highest", "mean")]
    outputs.append(helper.make_tensor_value_info("y", 1, product))
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


class Scenario:
    """A service, a client of it, and the windows in which files are noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._window = os.open(folder / "window", os.O_WRONLY)

    @contextlib.contextmanager
    def window(self, number: int) -> Iterator[None]:
        """Record files under this number during the block."""
        os.pwrite(self._window, bytes([number]), 0)
        try:
            yield
        finally:
            os.pwrite(self._window, b"\0", 0)

    @contextlib.contextmanager
    def service(self, config: str) -> Iterator[Client]:
        """Yield a client of a service whose state stays in the folder."""
        file, socket = self._folder / "honed.toml", self._folder / "s"
        file.write_text(config)
        command = [sys.executable, "-m", "honed.daemon.service", f"--socket={socket}", f"--config={file}"]
        command += [f"--state-dir={self._folder / 'state'}", f"--cache-dir={self._folder / 'cache'}"]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stderr=log)
        try:
            with Client(socket, timeout=_SECONDS) as client:
                wait_for(client.ready, "the service to be ready")
                yield client
        finally:
            process.terminate()
            process.wait()

    def run(self) -> None:
        """Run all parts of the scenario, in order."""
        path = self._folder / "m.onnx"
        write_model(path)
        with self.service(_ASLEEP) as client:
            self._rest()
            # A checkout that has no choice of engines has compiled forms only.
            known = inspect.signature(client.add).parameters
            chosen: dict[str, Any] = {"engine": "gpu"} if "engine" in known else {}
            with self.window(FILE):
                client.add(path, name="m", **chosen)
                wait_for(client.ready, "the model to be ready")
            given = {t["name"]: np.ones(t["shape"], np.float32) for t in client.metadata("m")["inputs"]}
            for n in range(REQUESTS):
                with self.window(REQUEST + n):
                    client.infer("m", given)
                time.sleep(0.2)
        with self.service(_WAITING) as client:
            wait_for(lambda: client.status()["tuner"]["pid"], "the tuner")
            with self.window(CANDIDATE):
                (self._folder / "honed.toml").write_text(IDLE)
                client.reload_config()
                wait_for(lambda: _awake(client) and client.history("m")["version"] > 1, "a tuned version")

    def _rest(self) -> None:
        """Record what runs without requests."""
        time.sleep(2.0)
        with self.window(REST):
            time.sleep(10.0)


def wait_for(what: Callable[[], object], name: str) -> None:
    """Wait until `what` returns true; raise SystemExit after a long time."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(HonedError):
            if what():
                return
        time.sleep(0.2)
    raise SystemExit(f"{name} does not come; the service's log says why")


def _awake(client: Client) -> bool:
    """Let tuners run though others use the processors, which they would leave to these."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"honed.tuner" in (process / "cmdline").read_bytes() and process.stat().st_uid == os.getuid():
                os.sched_setscheduler(int(process.name), os.SCHED_OTHER, os.sched_param(0))
    return client.live()


if __name__ == "__main__":
    Scenario(Path(sys.argv[1])).run()
