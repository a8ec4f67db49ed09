"""Passes over a normalised model: fewer and larger operators that give the same answers.

Each is a function of a `Graph` that gives another and how often it applied. None knows of any one model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

from .chains import fold_chains
from .columns import permute_columns, slice_first
from .factors import fold_factors
from .graph import Graph
from .parts import split_parts
from .siblings import combine_siblings
from .twins import merge_twins

__all__ = ["PASSES", "Applied", "Pass", "improve"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass by its name."""

    name: str
    run: Callable[[Graph], tuple[Graph, int]]


@dataclass(frozen=True, slots=True)
class Applied:
    """How often a pass applied to a model."""

    name: str
    times: int


PASSES = (  # in the order in which they run
    Pass("twins", merge_twins),
    Pass("factors", fold_factors),
    Pass("chains", fold_chains),
    Pass("slices", slice_first),
    Pass("columns", permute_columns),
    Pass("parts", split_parts),
    Pass("siblings", combine_siblings),
)


def improve(
    proto: onnx.GraphProto, passes: Sequence[Pass] = PASSES
) -> tuple[onnx.GraphProto, tuple[Applied, ...]]:
    """A normalised graph after the passes; itself where none applied."""
    graph, applied = Graph.read(proto), []
    for one in passes:
        graph, times = one.run(graph)
        applied.append(Applied(one.name, times))
    return (graph.proto() if any(a.times for a in applied) else proto), tuple(applied)
