"""What a small request costs, beside another checkout: `python -m benchmarks.latency [--against TREE]`.

Each checkout has a service of its own, on the first OpenCL device, with the same small model for each engine,
and a client in a process of its own. Blocks of requests alternate, and who begins is left to chance. For
each block there is the median latency of its requests, the processor time that client, service and worker
took for one of them, and the worker's without what a run itself took, by the fastest tenth of the runs.
Printed are of each checkout the figure that a tenth of the blocks do not exceed, which other processes
hardly raise, and the ratio of the two; then medians over blocks of the ratios of neighbours. At the end
stands what is resident at rest.
"""

from __future__ import annotations

import argparse
import contextlib
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

import numpy as np

_HERE = Path(__file__).resolve()
_FOLDERS = ("", "daemon", "runtime", "tuner")
_ENGINES = ("gpu", "cpu")
_CONFIG = "[tuner]\nspawn = false\n"
_READY_SECONDS = 120.0
_REST_SECONDS = 3.0
_TENTH = 10  # percent
_PARTS = ("client", "service")
_PROCESSES = (*_PARTS, *_ENGINES)


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
    graph = helper.make_graph(nodes, "small", inputs, outputs, [one])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def serve_blocks(socket: str, path: str) -> None:
    """The client's process: adds the models, then makes as many requests as each line of input says."""
    from honed.runtime import Client

    with Client(socket) as client:
        end = time.monotonic() + _READY_SECONDS
        while not _is_ready(client):
            if time.monotonic() > end:
                raise SystemExit("the service does not become ready; its log says why")
            time.sleep(0.1)
        for engine in _ENGINES:
            client.add(path, name=engine, engine=engine)
        given = {t["name"]: np.ones(t["shape"], np.float32) for t in client.metadata(_ENGINES[0])["inputs"]}
        status = client.status()
        workers = {each["engine"]: each["worker"]["pid"] for each in status["devices"]}
        print(json.dumps([os.getpid(), status["pid"], *map(workers.get, _ENGINES)]), flush=True)
        for line in sys.stdin:
            engine, requests = line.split()
            taken, ran = [], []
            for _ in range(int(requests)):
                began = time.perf_counter()
                answer = client.answer(engine, given)
                taken.append(time.perf_counter() - began)
                ran.append(answer.compute_us)
            print(json.dumps([median(taken) * 1e6, float(np.percentile(ran, _TENTH))]), flush=True)


def _is_ready(client: object) -> bool:
    from honed.runtime.errors import HonedError

    try:
        return bool(client.ready())  # type: ignore[attr-defined]
    except HonedError:
        return False


@dataclass(slots=True)
class Side:
    """One checkout at work, and microseconds of its blocks by engine: latency, and processor time."""

    client: subprocess.Popen[str]
    pids: dict[str, int]
    blocks: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {e: [] for e in _ENGINES})

    def block(self, engine: str, requests: int) -> dict[str, float]:
        """What one request takes, of so many."""
        assert self.client.stdin is not None
        pids = {name: self.pids[of] for name, of in (*zip(_PARTS, _PARTS, strict=True), ("worker", engine))}
        before = {name: _processor_seconds(pid) for name, pid in pids.items()}
        self.client.stdin.write(f"{engine} {requests}\n")
        self.client.stdin.flush()
        latency, ran = json.loads(_line(self.client))
        spent = {n: (_processor_seconds(pid) - before[n]) * 1e6 / requests for n, pid in pids.items()}
        beside = {"worker beside the run": spent["worker"] - ran}
        return {"latency": latency, **spent, **beside, "all processes": sum(spent.values())}

    def resident(self) -> dict[str, float]:
        """Proportional MiB of service and workers."""
        return {f"{name} at rest": _proportional_mib(self.pids[name]) for name in _PROCESSES[1:]}


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
    """Print a row for each figure: of each checkout, and the ratio of the last to the first."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lat-")))
        model(folder / "small.onnx", tensors, floats)
        sides = [
            stack.enter_context(running(root, folder / name, folder / "small.onnx"))
            for name, root in roots.items()
        ]
        order = random.Random(0)
        turns = [(side, engine) for side in sides for engine in _ENGINES]
        for side, engine in turns:
            side.block(engine, requests)  # does not count
        for _ in range(blocks):
            for side, engine in order.sample(turns, len(turns)):
                side.blocks[engine].append(side.block(engine, requests))
        time.sleep(_REST_SECONDS)
        print(f"{tensors} tensors in and out of {floats} floats; {blocks} blocks of {requests}; each request")
        print(f"| engine, figure | {' | '.join(roots)} | now / before | median of ratios (quartiles) |")
        print(f"|---|{'---:|' * (len(roots) + 2)}")
        for engine in _ENGINES:
            for name in sides[0].blocks[engine][0]:
                figures = [[block[name] for block in side.blocks[engine]] for side in sides]
                low, middle, high = np.percentile(np.divide(figures[-1], figures[0]), (25, 50, 75))
                least = [float(np.percentile(each, _TENTH)) for each in figures]
                shown = " | ".join(f"{each:4.0f} us" for each in least)
                ratios = f"{least[-1] / least[0]:.2f} | {middle:.2f} ({low:.2f} to {high:.2f})"
                print(f"| {engine}: {name} | {shown} | {ratios} |")
        for name in sides[0].resident():
            mib = [side.resident()[name] for side in sides]
            shown = " | ".join(f"{each:.1f} MiB" for each in mib)
            print(f"| {name} | {shown} | {mib[-1] / mib[0]:.2f} | |")


def main() -> None:
    """Measure this checkout, beside another one where asked, or be a client of one."""
    if sys.argv[1:2] == ["--client"]:
        serve_blocks(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="TREE", help="another checkout")
    parser.add_argument("--tensors", type=int, default=1, help="inputs and outputs of the model")
    parser.add_argument("--floats", type=int, default=8, help="in each of them")
    parser.add_argument("--requests", type=int, default=100, help="in a block")
    parser.add_argument("--blocks", type=int, default=30, help="of each checkout and engine")
    given = parser.parse_args()
    before = {"before": given.against.resolve()} if given.against is not None else {}
    compare(before | {"now": _HERE.parents[1]}, given.tensors, given.floats, given.requests, given.blocks)


if __name__ == "__main__":
    main()
