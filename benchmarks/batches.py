"""Requests run together: `python -m benchmarks.batches [MODEL.onnx:INPUT=1,3,64,64 ...]`.

Several clients, each a process, repeatedly request one row of a service, in turns with and without batching
(`hone set`), and with ONNX Runtime in each client instead. Prints requests a second of all clients together,
medians over turns, and the median latency. The default model has dense layers, in which rows share the
reading of the weights.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO

import numpy as np

from benchmarks.serving import service
from honed.jobs.commands import shape
from honed.runtime.client import Client

_CONFIG = "[tuner]\nspawn = false\n[serve]\nengine = '{engine}'\n"
_WIDTH, _LAYERS = 1024, 4


def dense(path: Path) -> str:
    """Write a model of dense layers; return the argument that names it."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for n in range(_LAYERS):
        values = rng.normal(0, _WIDTH**-0.5, (_WIDTH, _WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{n}"))
        nodes += [
            helper.make_node("MatMul", [last, f"w{n}"], [f"p{n}"]),
            helper.make_node("Relu", [f"p{n}"], [f"r{n}"]),
        ]
        last = f"r{n}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", _WIDTH]) for n in ("x", last)]
    graph = helper.make_graph(nodes, "dense", ends[:1], ends[1:], initializer=weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return f"{path}:x=1,{_WIDTH}"


def ask(socket: str, file: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Run a client's process: for each line of input (engine, seconds), print a line of latencies."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng()
    given = {
        each.name: rng.standard_normal(shapes[each.name]).astype(np.float32) for each in session.get_inputs()
    }
    name = Path(file).stem
    with Client(socket) as client:
        print("ready", flush=True)
        for line in sys.stdin:
            how, seconds = line.split()
            end, took = time.monotonic() + float(seconds), []
            while (begun := time.monotonic()) < end:
                if how == "honed":
                    client.infer(name, given)
                else:
                    session.run(None, given)
                took.append(time.monotonic() - begun)
            print(json.dumps(took), flush=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL[:INPUT=SIZES]...")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn (3)")
    parser.add_argument("--delay", type=int, default=2000, help="microseconds (2000)")
    parser.add_argument("--engine", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        socket, file, shapes = options.ask
        ask(socket, file, json.loads(shapes))
        return 0
    print("| model | one by one, requests/s, ms | together | together / one by one | ONNX Runtime in each |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="honed-batches-") as folder:
        for number, model in enumerate(options.models or [dense(Path(folder) / "dense.onnx")]):
            (place := Path(folder) / str(number)).mkdir()
            _report(place, model, options)
    return 0


def _report(folder: Path, model: str, options: argparse.Namespace) -> None:
    file, *given = model.split(":")
    shapes, name = dict(map(shape, given)), Path(file).stem
    with service(folder, _CONFIG.format(engine="cpu")) as client, ExitStack() as running:
        client.add(file, engine="cpu" if options.engine == "cpu" else "fastest")
        if options.engine == "gpu":
            rows = {n: (options.clients, *s[1:]) for n, s in shapes.items()}
            client.add(file, replace=True, shapes=rows, engine="fastest")
            client.pin(name, engine="gpu")
        clients = [_client(running, client.socket, file, shapes) for _ in range(options.clients)]
        found: dict[str, list[tuple[float, float]]] = {"one": [], "together": [], "onnxruntime": []}
        for _ in range(options.turns):
            for how in random.sample(list(found), len(found)):
                most = options.clients if how == "together" else 0
                client.set(name, max_batch=most, batch_delay_us=options.delay)
                found[how].append(
                    _turn(clients, "onnxruntime" if how == "onnxruntime" else "honed", options.seconds)
                )
    rates = {how: median(rate for rate, _ in turns) for how, turns in found.items()}
    cells = [f"{rates[how]:.0f}, {median(ms for _, ms in found[how]):.2f}" for how in found]
    print(
        f"| {name} | {cells[0]} | {cells[1]} | {rates['together'] / rates['one']:.2f} | {cells[2]} |",
        flush=True,
    )


def _client(
    running: ExitStack, socket: str, file: str, shapes: Mapping[str, Sequence[int]]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.batches", "--ask", socket, file, json.dumps(shapes)]
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    running.callback(made.wait)
    running.callback(_pipe(made.stdin).close)
    _pipe(made.stdout).readline()
    return made


def _turn(clients: Sequence[subprocess.Popen[str]], how: str, seconds: float) -> tuple[float, float]:
    """Return requests a second of all clients together, and the median latency in milliseconds."""
    for each in clients:
        _pipe(each.stdin).write(f"{how} {seconds}\n")
        _pipe(each.stdin).flush()
    took = [second for each in clients for second in json.loads(_pipe(each.stdout).readline())]
    return len(took) / seconds, median(took) * 1e3


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


if __name__ == "__main__":
    sys.exit(main())
