"""A chain in one request, and its steps one after the other: `python -m benchmarks.chains`.

A service of its own, with the CPU engine alone, has models of one operator, so that what is between steps
counts most. An app asks in turns: for the chain, for each step with arrays as they come, and for each step
with tensors in one shared-memory region of its own, as a careful app would. All answers are compared. Times
are of whole requests in this process, medians; the ratios are of a step-by-step over the chain, by turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.serving import service
from honed.protocol.params import ChainStep
from honed.runtime.client import Client

_CONFIG = '[serve]\nengine = "cpu"\n[tuner]\nspawn = false\n'
_SMALL = 16
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """Steps that each take what the one before gives, and how many elements the tensors have."""

    what: str
    models: tuple[str, ...]
    sizes: tuple[int, ...]


def cases(large: int) -> list[Case]:
    """`large` elements are a large tensor."""
    return [
        Case("all tensors small", ("half",) * 3, (_SMALL,) * 4),
        Case("large between, small in and out", ("spread", "half", "gather"), (_SMALL, large, large, _SMALL)),
        Case("all tensors large", ("half",) * 3, (large,) * 4),
    ]


def main() -> int:
    """Run the command line; 1 where answers differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chains", description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--mib", type=float, nargs="+", default=[1.0, 16.0], help="of a large tensor")
    arguments = parser.parse_args()
    right = True
    print(f"{'':40}{'chain ms':>10}{'steps ms':>10}{'ratio':>7}{'careful ms':>12}{'ratio':>7}")
    with tempfile.TemporaryDirectory(prefix="honed-") as folder, service(Path(folder), _CONFIG) as client:
        for mib in arguments.mib:
            large = round(mib * (1 << 20) / 4)
            _add(client, Path(folder), large)
            for case in cases(large):
                right &= _run(client, case, f"{case.what}, {mib:g} MiB", arguments.turns)
    return 0 if right else 1


def _add(client: Client, folder: Path, large: int) -> None:
    """The models, with `large` elements for those that make or take them."""
    node = helper.make_node
    half, times, rows = np.array([0.5], np.float32), np.array([large // _SMALL]), np.array([-1, _SMALL])
    _save(folder / "half.onnx", "n", "n", [node("Mul", ["x", "k"], ["y"])], half)
    _save(folder / "spread.onnx", _SMALL, large, [node("Tile", ["x", "k"], ["y"])], times)
    greatest = node("ReduceMax", ["rows"], ["y"], axes=[0], keepdims=0)
    _save(folder / "gather.onnx", large, _SMALL, [node("Reshape", ["x", "k"], ["rows"]), greatest], rows)
    for name in ("half", "spread", "gather"):
        client.add(folder / f"{name}.onnx", replace=True)


def _save(
    path: Path, takes: int | str, gives: int | str, nodes: Sequence[onnx.NodeProto], k: NDArray[Any]
) -> None:
    """A model of x and a constant k to y, with so many elements."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [takes])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [gives])],
        initializer=[numpy_helper.from_array(k, "k")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def _run(client: Client, case: Case, what: str, turns: int) -> bool:
    """Print a row; False where answers differ."""
    steps = [
        ChainStep(model=model, name=f"s{i}", inputs={"x": f"s{i - 1}:y" if i else "in"})
        for i, model in enumerate(case.models)
    ]
    client.add_chain("chain", steps, {"y": f"s{len(steps) - 1}:y"}, replace=True)
    given = np.random.default_rng(0).normal(size=case.sizes[0]).astype(np.float32)
    with client.region(sum(-(-4 * size // 64) * 64 for size in case.sizes)) as region:
        places: list[Array] = []
        for size in case.sizes:
            start = sum(-(-place.nbytes // 64) * 64 for place in places)
            places.append(region.array("float32", (size,), start))

        def chain() -> Array:
            return client.infer("chain", {"in": given})["y"]

        def one_by_one() -> Array:
            array = given
            for model in case.models:
                array = client.infer(model, {"x": array})["y"]
            return array

        def careful() -> Array:
            places[0][...] = given
            for model, x, y in zip(case.models, places[:-1], places[1:], strict=True):
                client.infer(model, {"x": x}, outputs={"y": y})
            return places[-1].copy()

        ways = (chain, one_by_one, careful)
        answers = [way() for way in ways for _ in range(3)]
        taken = [[_ms(way) for way in ways] for _ in range(turns)]
    ms = [median(times) for times in zip(*taken, strict=True)]
    by_arrays, by_region = (median(times[i] / times[0] for times in taken) for i in (1, 2))
    print(f"{what:40}{ms[0]:10.2f}{ms[1]:10.2f}{by_arrays:7.2f}{ms[2]:12.2f}{by_region:7.2f}", flush=True)
    return all(np.array_equal(answers[0], answer) for answer in answers)


def _ms(way: Callable[[], Array]) -> float:
    begun = time.perf_counter()
    way()
    return (time.perf_counter() - begun) * 1e3


if __name__ == "__main__":
    sys.exit(main())
