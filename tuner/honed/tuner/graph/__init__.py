"""Runs passes over a normalised model: fewer and larger operators that give equal answers.

A pass is a function of a `Graph` that returns another one and how often it applied. None is specific to a
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import onnx

from .folding import fold_chains, fold_factors, fold_pads
from .graph import Graph
from .lengths import pad_lengths
from .moves import join_moves, join_norms
from .pairs import join_pairs
from .products import combine_parallel_matmuls, permute_columns, slice_first, split_parts
from .twins import fuse_horizontally

__all__ = ["PASSES", "Applied", "Pass", "improve", "origins_of", "passes_behind"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass by its name."""

    name: str
    run: Callable[[Graph], tuple[Graph, int]]


@dataclass(frozen=True, slots=True)
class Applied:
    """The number of applications of a pass to a model, and the values whose operators it made or changed."""

    name: str
    times: int
    values: frozenset[str] = frozenset()


PASSES = (  # Passes in the order in which they run
    Pass("moves", join_moves),
    Pass("norms", join_norms),
    Pass("pads", fold_pads),
    Pass("twins", fuse_horizontally),
    Pass("factors", fold_factors),
    Pass("chains", fold_chains),
    Pass("slices", slice_first),
    Pass("columns", permute_columns),
    Pass("parts", split_parts),
    Pass("siblings", combine_parallel_matmuls),
    Pass("pairs", join_pairs),
    Pass("lengths", pad_lengths),
)


def improve(
    proto: onnx.GraphProto, passes: Sequence[Pass] = PASSES
) -> tuple[onnx.GraphProto, tuple[Applied, ...]]:
    """Return a normalised graph after the passes, and those that applied; `graph` itself where none did."""
    graph, applied = Graph.read(proto), []
    for one in passes:
        made, times = one.run(graph)
        if not times:
            applied.append(Applied(one.name, 0))
            continue
        before = {id(node) for node in graph.nodes}
        changed = frozenset(node.output[0] for node in made.nodes if id(node) not in before)
        applied.append(Applied(one.name, times, changed))
        graph = made
    return (graph.proto() if any(a.times for a in applied) else proto), tuple(applied)


def origins_of(value: str) -> tuple[str, ...]:
    """Return the names of the values that a value may have been made from, and its own.

    Passes name a value after the one it replaces: `a/twins/columns` was made from `a/twins`.
    """
    return tuple(accumulate(value.split("/"), lambda before, part: f"{before}/{part}"))


def passes_behind(applied: Sequence[Applied], value: str) -> tuple[str, ...]:
    """Return the passes that made or changed a value's operator, or what it was made from."""
    names = origins_of(value)
    return tuple(one.name for one in applied if not one.values.isdisjoint(names))
