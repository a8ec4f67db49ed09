"""How much of each output a comparison says anything about.

An element says nothing where the reference has NaN or an infinity. Neither do elements that all have one
value, or lie at the ends of their range, in nearly all of an output: a saturating function hides what a wrong
kernel computes before it. Such outputs can still be verified by what comes before the choosing or saturating
operators that they come from, where the model is opened (`opened`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from . import graphs
from .opened import HIDING, OpenedModel
from .ranges import MOVING

Arrays = Mapping[str, np.ndarray]

ENOUGH = 0.5  # the share of an output that a verification has to cover
_MOST = 0.9  # of an output's elements that have one value, or one of two at the ends, where it is saturated
# Operators whose results depend on shapes alone.
_OF_SHAPES = {"ConstantOfShape", "EyeLike", "Shape", "Size"}


@dataclass(frozen=True, slots=True)
class Covered:
    """Shares of an output over all probes: elements that are finite, and that say something."""

    finite: float
    told: float

    def why_not(self, name: str) -> str:
        """Say why output `name` is not covered, as part of a sentence."""
        if self.finite < ENOUGH:
            return f"the reference gives NaN or infinity for {1 - self.finite:.0%} of output {name!r}"
        return (
            f"{1 - self.told:.0%} of output {name!r} has one value whatever the inputs are, or is saturated"
        )


def of_values(values: Sequence[np.ndarray]) -> Covered:
    """How much one value, as the reference has it for several probes, says."""
    flat = np.concatenate([np.asarray(each).reshape(-1) for each in values])
    if not flat.size:
        return Covered(1.0, 1.0)
    known = flat[np.isfinite(flat)] if flat.dtype.kind == "f" else flat
    finite = known.size / flat.size
    if not known.size:
        return Covered(0.0, 0.0)
    if known.size == 1:
        return Covered(finite, finite)
    usual = np.partition(known, known.size // 2)[known.size // 2]  # what most have, where most have one value
    alike = np.count_nonzero(known == usual) / known.size
    if known.dtype.kind == "f" and alike < 1:
        ends = [np.count_nonzero(known == end) for end in (known.min(), known.max())]
        if min(ends) > 1:
            alike = max(alike, sum(ends) / known.size)
    return Covered(finite, finite * (1 - alike) if alike > _MOST else finite)


def of_outputs(model: onnx.ModelProto, outputs: Sequence[Arrays]) -> dict[str, Covered]:
    """By output: how much the reference's values say. Outputs that no input decides are covered whole."""
    decided = _decided(model)
    return {
        name: of_values([each[name] for each in outputs]) if name in decided else Covered(1.0, 1.0)
        for name in graphs.outputs(model)
    }


def behind(apart: OpenedModel, model: onnx.ModelProto, reference: Sequence[Arrays], name: str) -> Covered:
    """How much a verification at the steps of `apart` says about output `name`.

    `reference` has the values at the steps for each probe. Looks behind operators that choose, saturate or
    move only, as far as values that say enough or that the inputs hold; the least of them counts.
    """
    maker = {output: node for node in model.graph.node for output in node.output}
    decided, compared = _decided(model), {*apart.before, *apart.after}
    found, seen, waiting = [], {name}, [name]
    while waiting:
        node = maker.get(waiting.pop())
        if node is None:
            continue  # the inputs hold it
        if node.op_type not in HIDING | MOVING.keys():
            return Covered(1.0, 0.0)
        for each in {name for name in node.input if name in decided} - seen:
            seen.add(each)
            share = of_values([values[each] for values in reference]) if each in compared else None
            if share is None or (share.finite >= ENOUGH and share.told < ENOUGH):
                waiting.append(each)
            else:
                found.append(share)
    return min(found, key=lambda each: each.told, default=Covered(1.0, 1.0))


def _decided(model: onnx.ModelProto) -> set[str]:
    """The values that the numbers of inputs decide."""
    fixed = {tensor.name for tensor in model.graph.initializer}
    found = {value.name for value in model.graph.input} - fixed
    for node in model.graph.node:
        if node.op_type in _OF_SHAPES:
            continue
        if found & {name for inner in graphs.within(node) for name in inner.input}:
            found.update(name for name in node.output if name)
    return found
