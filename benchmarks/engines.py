"""Models as a user meets them: `python -m benchmarks.engines MODEL.onnx[:INPUT=1,3,48,320][:INPUT@1]...`.

With = an input gets a shape, with @ one value in all places.

A service of its own, on the best OpenCL device, adds one model after the other. Prints the seconds from the
request to add it until its first answer, and medians of whole requests in turns with ONNX Runtime in this
process (as many threads as the service uses, which do not spin between runs): as soon as it is served, and
again once it is compiled or cannot be. "Socket" is the median of a request of as many
bytes, less the run's time as the service measures it. Every answer is compared with ONNX Runtime's.
"Compiled" is the share of nodes and operations that are compiled.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime

from benchmarks.serving import service
from honed.jobs.commands import shape
from honed.protocol.errors import HonedError, NotFound, Unavailable
from honed.protocol.strict import Map
from honed.runtime.client import Client

_TOLERANCE = 1e-3  # Share of the largest value of an output
_LEAST = 1e-3
_CONFIG = """
[serve]
engine = "{engine}"
[cpu]
threads = {threads}
[tuner]
spawn = false
"""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Turns:
    """Medians of some requests in milliseconds, and the largest error as a share of the largest value."""

    honed: float
    onnxruntime: float
    socket: float
    engine: str
    error: float

    def cells(self) -> str:
        """Return two columns of the table."""
        over = (self.honed - self.socket) / self.onnxruntime
        return f"{self.honed:.2f} ({self.engine}) | {over:.2f}"


def main() -> int:
    """Run the command line; 1 where an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL[:INPUT=SIZES]...")
    parser.add_argument("--engine", choices=("fastest", "gpu", "cpu"), default="fastest")
    parser.add_argument("--threads", type=int, default=2, help="of ONNX Runtime, here and there (2)")
    parser.add_argument("--turns", type=int, default=30, help="of each (30)")
    options = parser.parse_args()
    print(
        "| model | first answer, s | ms at first | over ORT | ms compiled | over ORT | ORT, ms | socket, ms "
        "| compiled |"
    )
    print("|" + "---|" * 9, flush=True)
    with tempfile.TemporaryDirectory(prefix="honed-engines-") as folder:
        config = _CONFIG.format(engine=options.engine, threads=options.threads)
        with service(Path(folder), config) as client:
            wrong = [_report(client, each, options.threads, options.turns) for each in options.models]
    return int(any(wrong))


def _report(client: Client, model: str, threads: int, turns: int) -> bool:
    """Print a row of the table; return whether an answer was wrong."""
    path, *given = model.split(":")
    shapes = [each for each in given if "@" not in each]
    values = {name: float(value) for name, _, value in (each.partition("@") for each in given if "@" in each)}
    file, name = Path(path), Path(path).stem
    session = _session(file, threads)
    inputs = made_inputs(session, dict(map(shape, shapes)), values)
    begun = time.monotonic()
    try:
        with ThreadPoolExecutor(1) as adding:
            added = adding.submit(
                _add, client.socket, file, {n: v.shape for n, v in inputs.items() if v.shape}
            )
            first = _first_answer(client, name, inputs, added)
            answered = time.monotonic() - begun
            soon = _in_turns(client, name, session, inputs, turns)
            added.result()
        later = _in_turns(client, name, session, inputs, turns)
        shown = client.show(name)
        why = str(shown["placement"]["why"])
        client.remove(name)
    except HonedError as error:
        print(f"| {file.name} | {error} |" + " |" * 7, flush=True)
        return False
    wrong = max(soon.error, later.error) > _TOLERANCE
    assert set(first) == {output.name for output in session.get_outputs()}
    row = f"{file.name}{', WRONG' if wrong else ''}{f' ({why[:80]})' if later.engine == 'cpu' else ''}"
    print(
        f"| {row} | {answered:.1f} | {soon.cells()} | {later.cells()} | {later.onnxruntime:.2f} | "
        f"{later.socket:.2f} | {_compiled(shown)} |",
        flush=True,
    )
    return wrong


def _compiled(shown: Map) -> str:
    """Return the share of nodes and of operations that is compiled, as text."""
    parts = shown.get("parts") or []
    if not parts:
        return "all" if shown["kernels"] else "none"
    nodes, flops = (
        sum(part[what] for part in parts if part["engine"] == "gpu")
        / max(1, sum(part[what] for part in parts))
        for what in ("nodes", "flops")
    )
    return f"{nodes:.0%} of nodes, {flops:.1%} of operations"


def _add(socket: str, file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Add the model, and return when it is compiled or cannot be."""
    with Client(socket, timeout=1800.0) as client:
        client.add(file, shapes=shapes)


def _first_answer(client: Client, name: str, inputs: Arrays, added: Future[None]) -> Arrays:
    while True:
        try:
            return client.infer(name, inputs)
        except (NotFound, Unavailable):
            if added.done():
                added.result()
                raise
        time.sleep(0.02)


def _session(file: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def made_inputs(
    session: onnxruntime.InferenceSession, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, float]
) -> Arrays:
    """Return small normal values, zeros for other integers; sizes that are neither given nor fixed are 1."""
    rng = np.random.default_rng(0)
    made: Arrays = {}
    for value in session.get_inputs():
        kinds = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}
        shape = shapes.get(value.name) or tuple(d if isinstance(d, int) else 1 for d in value.shape)
        if value.type in kinds and value.name not in values:
            made[value.name] = (0.1 * rng.standard_normal(shape)).astype(kinds[value.type])
        else:
            kind = kinds.get(value.type) or value.type.removeprefix("tensor(").removesuffix(")")
            made[value.name] = np.full(shape, values.get(value.name, 0), kind)
    return made


def _in_turns(
    client: Client, name: str, session: onnxruntime.InferenceSession, inputs: Arrays, turns: int
) -> Turns:
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(None, inputs), strict=True))
    asked: list[float] = []
    computed: list[float] = []
    own: list[float] = []
    errors: list[float] = []
    engine = ""

    def ask() -> None:
        nonlocal engine
        begun = time.perf_counter()
        answer = client.infer_response(name, inputs)
        asked.append((time.perf_counter() - begun) * 1e3)
        computed.append(answer.compute_us / 1e3)
        engine = answer.engine
        errors.append(max(_error(answer.outputs[n], v) for n, v in expected.items()))

    def run() -> None:
        begun = time.perf_counter()
        session.run(None, inputs)
        own.append((time.perf_counter() - begun) * 1e3)

    order: list[Callable[[], None]] = [ask, run]
    shuffled = random.Random(0)
    for _ in range(turns):
        shuffled.shuffle(order)
        for each in order:
            each()
    return Turns(median(asked), median(own), median(asked) - median(computed), engine, max(errors))


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    if found.shape != expected.shape:
        return float("inf")
    # Below that the last bits of a sigmoid are all there is, and ONNX Runtime optimised differs from itself.
    largest = max(float(np.abs(expected.astype(np.float64)).max(initial=0.0)), _LEAST)
    difference = found.astype(np.float64) - expected.astype(np.float64)
    return float(np.abs(difference).max(initial=0.0)) / largest


if __name__ == "__main__":
    sys.exit(main())
