"""Requests to the services of two checkouts, in turns: `python -m benchmarks.latency BEFORE [NOW]`.

Each checkout has a service of its own, on the first OpenCL device, with the same small model compiled for it,
and a client in a process of its own. Blocks of requests alternate, and who begins is left to chance. For
each block there is the median latency of its requests, and the processor time that client, service and
worker took for one of them; printed are medians over blocks, and of the ratios of neighbours. The
model's own run is in the worker's time, and is the same for both. At the end stands what is resident at rest.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

_HERE = Path(__file__).resolve()
_FOLDERS = ("", "daemon", "runtime", "tuner")
_MODEL = "small"
_CONFIG = "[tuner]\nspawn = false\n"
_READY_SECONDS = 120.0
_REST_SECONDS = 3.0
_PROCESSES = ("client", "service", "worker")


def model(path: Path, tensors: int, floats: int) -> None:
    """Write a model of so many inputs and outputs of so many floats each, a sum and a rectifier each."""
    import onnx
    from onnx import TensorProto, helper

    inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [floats]) for i in range(tensors)]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [floats]) for i in range(tensors)]
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    nodes = []
    for i in range(tensors):
        nodes.append(helper.make_node("Add", [f"x{i}", "one"], [f"s{i}"]))
        nodes.append(helper.make_node("Relu", [f"s{i}"], [f"y{i}"]))
    graph = helper.make_graph(nodes, _MODEL, inputs, outputs, [one])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def serve_blocks(socket: str, path: str) -> None:
    """The client's process: adds the model, then makes as many requests as each line of input says."""
    from honed.runtime import Client

    with Client(socket) as client:
        end = time.monotonic() + _READY_SECONDS
        while not _is_ready(client):
            if time.monotonic() > end:
                raise SystemExit("the service does not become ready; its log says why")
            time.sleep(0.1)
        # A checkout that has no choice of engines has compiled forms only.
        chosen: dict[str, Any] = (
            {"engine": "gpu"} if "engine" in inspect.signature(client.add).parameters else {}
        )
        client.add(path, name=_MODEL, **chosen)
        given = {t["name"]: np.ones(t["shape"], np.float32) for t in client.metadata(_MODEL)["inputs"]}
        status = client.status()
        print(json.dumps([os.getpid(), status["pid"], status["worker"]["pid"]]), flush=True)
        for line in sys.stdin:
            taken = []
            for _ in range(int(line)):
                began = time.perf_counter()
                client.infer(_MODEL, given)
                taken.append(time.perf_counter() - began)
            print(json.dumps(median(taken)), flush=True)


def _is_ready(client: object) -> bool:
    from honed.runtime.errors import HonedError

    try:
        return bool(client.ready())  # type: ignore[attr-defined]
    except HonedError:
        return False


@dataclass(slots=True)
class Side:
    """One checkout at work, and microseconds of its blocks: latency, and processor time by process."""

    client: subprocess.Popen[str]
    pids: dict[str, int]
    blocks: list[dict[str, float]] = field(default_factory=list)

    def block(self, requests: int) -> dict[str, float]:
        """What one request takes, of so many."""
        assert self.client.stdin is not None
        before = {name: _processor_seconds(pid) for name, pid in self.pids.items()}
        self.client.stdin.write(f"{requests}\n")
        self.client.stdin.flush()
        latency = json.loads(_line(self.client))
        spent = {n: (_processor_seconds(pid) - before[n]) * 1e6 / requests for n, pid in self.pids.items()}
        return {"latency": latency * 1e6, **spent, "all processes": sum(spent.values())}

    def resident(self) -> dict[str, float]:
        """Proportional MiB of service and worker."""
        return {f"{name} at rest": _proportional_mib(self.pids[name]) for name in ("service", "worker")}


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a client ended; see above")
    return line


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process, by its clock (clock_getcpuclockid(3)), finer than /proc."""
    return time.clock_gettime((~pid << 3) | 2)


def _proportional_mib(pid: int) -> float:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) / 1024


@contextlib.contextmanager
def running(root: Path, folder: Path, onnx_file: Path) -> Iterator[Side]:
    """The service and the client of a checkout, ended at the end."""
    folder.mkdir()
    config, socket = folder / "honed.toml", folder / "s"
    config.write_text(_CONFIG)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HONED_", "XDG_"))}
    environment = kept | {"PYTHONPATH": os.pathsep.join(str(root / part) for part in _FOLDERS)}
    service = [sys.executable, "-m", "honed.daemon.service", f"--socket={socket}", f"--config={config}"]
    service += [f"--state-dir={folder / 'state'}", f"--cache-dir={folder / 'cache'}"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        daemon = subprocess.Popen(service, env=environment, stdin=subprocess.DEVNULL, stderr=log, cwd=folder)
        stack.callback(daemon.wait)
        stack.callback(daemon.terminate)
        command = [sys.executable, str(_HERE), "--client", str(socket), str(onnx_file)]
        client = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )
        stack.callback(client.wait)
        stack.callback(client.terminate)
        yield Side(client, dict(zip(_PROCESSES, json.loads(_line(client)), strict=True)))


def compare(roots: dict[str, Path], tensors: int, floats: int, requests: int, blocks: int) -> None:
    """Print a row for each figure: of each checkout, and the ratio."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lat-")))
        model(folder / "small.onnx", tensors, floats)
        sides = {
            name: stack.enter_context(running(root, folder / name, folder / "small.onnx"))
            for name, root in roots.items()
        }
        order = random.Random(0)
        for side in sides.values():
            side.block(requests)  # does not count
        for _ in range(blocks):
            for side in order.sample(list(sides.values()), len(sides)):
                side.blocks.append(side.block(requests))
        time.sleep(_REST_SECONDS)
        before, now = sides["before"], sides["now"]
        print(f"{tensors} tensors in and out of {floats} floats; {blocks} blocks of {requests}; each request")
        print(f"| {'':15} |  before |     now | now / before (quartiles) |\n|---|---:|---:|---:|")
        for name in before.blocks[0]:
            one, other = ([block[name] for block in side.blocks] for side in (before, now))
            low, middle, high = np.percentile([b / a for a, b in zip(one, other, strict=True)], (25, 50, 75))
            figures = f"{median(one):4.0f} us | {median(other):4.0f} us"
            print(f"| {name:15} | {figures} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
        after = now.resident()
        for name, mib in before.resident().items():
            print(f"| {name:15} | {mib:.1f} MiB | {after[name]:.1f} MiB | {after[name] / mib:.2f} |")


def main() -> None:
    """Compare two checkouts, or be a client of one."""
    if sys.argv[1:2] == ["--client"]:
        serve_blocks(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("now", type=Path, nargs="?", default=_HERE.parents[1])
    parser.add_argument("--tensors", type=int, default=1, help="inputs and outputs of the model")
    parser.add_argument("--floats", type=int, default=8, help="in each of them")
    parser.add_argument("--requests", type=int, default=200, help="in a block")
    parser.add_argument("--blocks", type=int, default=30, help="of each checkout")
    given = parser.parse_args()
    roots = {"before": given.before.resolve(), "now": given.now.resolve()}
    compare(roots, given.tensors, given.floats, given.requests, given.blocks)


if __name__ == "__main__":
    main()
