"""Measures a request's cost, beside another checkout: `python -m benchmarks.latency [--against TREE]`.

Each checkout has a service of its own, on the first OpenCL device, with the same models for each engine, and
a client in a process of its own. The models of `--cases` compute next to nothing: `tiny`, `1MB` and `4MB`
have one input and one output, a `detector` has an input of 1.2 MB and twelve outputs of 120 KB in all, and a
`step` is that of a decoder's sequence, by the CPU engine. Blocks of requests alternate, in random order. Each
block has the median latency of its requests, the processor time of client, service and worker for one of
them, the worker's without the run itself, by the fastest tenth of the runs, and how often processes waited
(switches) and touched pages for the first time (faults). Prints for each checkout the figure that a tenth of
the blocks do not exceed, which other processes hardly raise, and the ratio of the two; then medians over
blocks of the ratios of neighbours; and at the end the resident memory at rest.
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
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

if __package__:  # Else this is a client of any checkout
    from tests.decoders import decoder

_HERE = Path(__file__).resolve()
_FOLDERS = ("", "daemon", "runtime", "tuner")
_ENGINES = ("gpu", "cpu")
# Numbers of floats of each case's inputs and outputs; a decoder's step has none.
_CASES: dict[str, tuple[list[int], list[int]]] = {
    "tiny": ([8], [8]),
    "1MB": ([1 << 18], [1 << 18]),
    "4MB": ([1 << 20], [1 << 20]),
    "detector": ([3 * 320 * 320], [2560] * 12),
    "step": ([], []),
}
_STEPS = 200  # Steps of a sequence
_CONFIG = "[tuner]\nspawn = false\n"
_READY_SECONDS = 120.0
_REST_SECONDS = 3.0
_TENTH = 10  # percent
_PARTS = ("client", "service")
_PROCESSES = (*_PARTS, *_ENGINES)


def model(path: Path, inputs: list[int], outputs: list[int]) -> None:
    """Write a model whose outputs are the first elements of its input, rectified after a sum."""
    import onnx
    from onnx import TensorProto, helper

    def infos(sizes: list[int], name: str) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(f"{name}{i}", TensorProto.FLOAT, [n]) for i, n in enumerate(sizes)
        ]

    constants = [helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])]
    nodes = []
    for i, size in enumerate(outputs):
        source = f"x{i % len(inputs)}"
        if size < inputs[i % len(inputs)]:
            constants.append(helper.make_tensor(f"from{i}", TensorProto.INT64, [1], [i * size]))
            constants.append(helper.make_tensor(f"to{i}", TensorProto.INT64, [1], [i * size + size]))
            nodes.append(helper.make_node("Slice", [source, f"from{i}", f"to{i}"], [f"c{i}"]))
            source = f"c{i}"
        nodes.append(helper.make_node("Add", [source, "one"], [f"s{i}"]))
        nodes.append(helper.make_node("Relu", [f"s{i}"], [f"y{i}"]))
    graph = helper.make_graph(nodes, "small", infos(inputs, "x"), infos(outputs, "y"), constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def serve_blocks(socket: str, folder: str) -> None:
    """Run the client's process: add the models, then make the number of requests in each line of input."""
    from honed.runtime import Client

    with Client(socket) as client:
        vars(client)["_in_app"] = None  # Another checkout's client may run small models itself
        end = time.monotonic() + _READY_SECONDS
        while not _is_ready(client):
            if time.monotonic() > end:
                raise SystemExit("the service does not become ready; its log says why")
            time.sleep(0.1)
        given = {}
        for path in sorted(Path(folder).glob("*.onnx")):
            engines = _ENGINES if path.stem != "step" else ("cpu",)
            for engine in engines:
                client.add(path, name=f"{path.stem}-{engine}", engine=engine)
            given[path.stem] = {
                t["name"]: np.ones([max(1, n) for n in t["shape"]], np.float32)
                for t in client.metadata(f"{path.stem}-{engines[0]}")["inputs"]
            }
        status = client.status()
        workers = {each["engine"]: each["worker"]["pid"] for each in status["devices"]}
        print(json.dumps([os.getpid(), status["pid"], *map(workers.get, _ENGINES)]), flush=True)
        for line in sys.stdin:
            case, engine, requests = line.split()
            taken, ran = [], []
            for infer in _requests(client, case, engine, given[case], int(requests)):
                began = time.perf_counter()
                answer = infer()
                taken.append(time.perf_counter() - began)
                ran.append(answer.compute_us)
            print(json.dumps([median(taken) * 1e6, float(np.percentile(ran, _TENTH))]), flush=True)


def _requests(
    client: Any, case: str, engine: str, given: dict[str, np.ndarray], count: int
) -> Iterator[Callable[[], Any]]:
    """Yield what makes each request; for a step those of sequences."""
    from honed.runtime.calling.calls import InSequence  # As checkouts before the new name have it

    if case != "step":
        yield from [lambda: client.answer(f"{case}-{engine}", given)] * count
        return
    ids = {"input_ids": np.ones((1, 1), np.int64)}
    for number in range(count):
        sequence = InSequence(f"bench{os.getpid()}", start=number % _STEPS == 0, last_token=True)
        yield lambda: client.answer(f"{case}-{engine}", ids, sequence=sequence)  # noqa: B023


def _is_ready(client: object) -> bool:
    from honed.runtime.errors import HonedError

    try:
        return bool(client.ready())  # type: ignore[attr-defined]
    except HonedError:
        return False


@dataclass(slots=True)
class Side:
    """A running checkout, and figures of its blocks by case and engine."""

    client: subprocess.Popen[str]
    pids: dict[str, int]
    blocks: dict[tuple[str, str], list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))

    def block(self, case: str, engine: str, requests: int) -> dict[str, float]:
        """Make `requests` requests, and return the mean cost of one, in microseconds or counts."""
        assert self.client.stdin is not None
        pids = {name: self.pids[of] for name, of in (*zip(_PARTS, _PARTS, strict=True), ("worker", engine))}
        before = {name: _spent(pid) for name, pid in pids.items()}
        self.client.stdin.write(f"{case} {engine} {requests}\n")
        self.client.stdin.flush()
        latency, ran = json.loads(_line(self.client))
        spent = {name: (_spent(pid) - before[name]) / requests for name, pid in pids.items()}
        times = {name: float(each[0]) * 1e6 for name, each in spent.items()}
        figures = {"latency": latency, **times, "worker beside the run": times["worker"] - ran}
        figures["all processes"] = sum(times.values())
        figures["switches"], figures["faults"] = (float(sum(e[at] for e in spent.values())) for at in (1, 2))
        return figures

    def resident(self) -> dict[str, float]:
        """Return the proportional MiB of service and workers."""
        return {f"{name} at rest": _proportional_mib(self.pids[name]) for name in _PROCESSES[1:]}


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a client ended; see above")
    return line


def processor_seconds(pid: int) -> float:
    """Return the time of a process's threads, by its clock (clock_getcpuclockid(3)), finer than /proc."""
    return time.clock_gettime((~pid << 3) | 2)


def _spent(pid: int) -> np.ndarray:
    """Return seconds of the processor, switches between threads, and pages touched for the first time."""
    switches = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        found = [line.split()[1] for line in status.read_text().splitlines() if "_ctxt_switches" in line]
        switches += sum(map(int, found))
    faults = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])
    return np.array([processor_seconds(pid), switches, faults])


def _proportional_mib(pid: int) -> float:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) / 1024


@contextlib.contextmanager
def running(root: Path, folder: Path, models: Path) -> Iterator[Side]:
    """Run the service and the client of a checkout during the block."""
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
        command = [sys.executable, "-P", str(_HERE), "--client", str(socket), str(models)]
        client = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )
        stack.callback(client.wait)
        stack.callback(client.terminate)
        yield Side(client, dict(zip(_PROCESSES, json.loads(_line(client)), strict=True)))


def compare(roots: dict[str, Path], cases: list[str], requests: int, blocks: int) -> None:
    """Print a row for each figure: of each checkout, and the ratio of the last to the first."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lat-")))
        models = folder / "models"
        models.mkdir()
        for case in cases:
            if case == "step":
                decoder(models / "step.onnx")
            else:
                model(models / f"{case}.onnx", *_CASES[case])
        sides = [stack.enter_context(running(root, folder / name, models)) for name, root in roots.items()]
        order = random.Random(0)
        kinds = [(case, engine) for case in cases for engine in (_ENGINES if case != "step" else ("cpu",))]
        turns = [(side, *kind) for side in sides for kind in kinds]
        for side, case, engine in turns:
            side.block(case, engine, requests)  # Does not count
        for _ in range(blocks):
            for side, case, engine in order.sample(turns, len(turns)):
                side.blocks[case, engine].append(side.block(case, engine, requests))
        time.sleep(_REST_SECONDS)
        print(f"{blocks} blocks of {requests}; each request")
        print(f"| case, engine, figure | {' | '.join(roots)} | now / before | median of ratios (quartiles) |")
        print(f"|---|{'---:|' * (len(roots) + 2)}")
        for kind in kinds:
            for name in sides[0].blocks[kind][0]:
                figures = [np.array([block[name] for block in side.blocks[kind]]) for side in sides]
                ratios = figures[-1] / np.maximum(figures[0], 1e-3)
                low, middle, high = np.percentile(ratios, (25, 50, 75))
                least = [float(np.percentile(each, _TENTH)) for each in figures]
                unit = ".1f" if name in ("switches", "faults") else ".0f"
                shown = " | ".join(f"{each:{unit}}{'' if unit == '.1f' else ' us'}" for each in least)
                over = least[-1] / max(least[0], 1e-3)
                row = f"{shown} | {over:.2f} | {middle:.2f} ({low:.2f} to {high:.2f})"
                print(f"| {' '.join(kind)}: {name} | {row} |")
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
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=[*_CASES], help="which models")
    parser.add_argument("--requests", type=int, default=100, help="in a block")
    parser.add_argument("--blocks", type=int, default=30, help="of each checkout and engine")
    given = parser.parse_args()
    before = {"before": given.against.resolve()} if given.against is not None else {}
    compare(before | {"now": _HERE.parents[1]}, given.cases, given.requests, given.blocks)


if __name__ == "__main__":
    main()
