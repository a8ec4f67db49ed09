"""Finds the outputs whose rows a TopK orders, by having it order them otherwise.

Where scores nearly tie, two right computations order rows differently. The model is evaluated once more with
the rows that a TopK selects in another order: an output that comes out in that order along one axis, however
it was computed from the selection, is compared as a set of rows (`honed.runtime.execution.proof`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from honed.runtime.compiled.model import Selection
from honed.runtime.execution.proof import compare

from . import graphs
from .confined import EvaluationLimits
from .reference import ReferenceFailure, evaluate

Arrays = Mapping[str, np.ndarray]

_MOST = 8  # selections that are looked at


def selections(
    model: onnx.ModelProto,
    inputs: Sequence[Arrays],
    reference: Sequence[Arrays],
    tolerance: Sequence[float],
    limits: EvaluationLimits,
) -> tuple[Selection, ...]:
    """Return which outputs of a model with static shapes follow the order of a selection.

    `reference` has its outputs for `inputs`, `tolerance` how far each may be off. No output is in two.
    """
    if model.functions:
        model = inliner.inline_local_functions(model)
    found: list[Selection] = []
    known, names = graphs.infer(model), graphs.outputs(model)
    for node in [n for n in model.graph.node if n.op_type == "TopK"][:_MOST]:
        made = next((known[name] for name in node.output if name in known), None)
        if made is None or not made.shape:
            continue
        axis = graphs.attribute(node, "axis", -1) % len(made.shape)
        order = np.random.default_rng(0).permutation(made.shape[axis])
        moved = evaluate(_reordered(model, node, axis, order), list(inputs[:1]), limits)
        if isinstance(moved, ReferenceFailure) or order.size < 2:
            continue
        taken = {n for each in found for n in each.outputs}
        follow = [
            (n, along)
            for n, name in enumerate(names)
            if n not in taken
            and (along := _along(reference[0][name], moved.outputs[0][name], order, tolerance[n])) is not None
        ]
        if follow:
            outputs, axes = zip(*follow, strict=True)
            score = next(_scores(follow, names, reference), None)
            found.append(Selection(outputs=outputs, axes=axes, score=score))
    return tuple(found)


def _along(calm: np.ndarray, moved: np.ndarray, order: np.ndarray, tolerance: float) -> int | None:
    """The axis along which an output came out in the other order, where it did."""
    if calm.shape != moved.shape or np.array_equal(calm, moved, equal_nan=calm.dtype.kind == "f"):
        return None
    for axis, extent in enumerate(calm.shape):
        if extent == order.size and compare(np.take(calm, order, axis), moved, tolerance).right:
            return axis
    return None


def _scores(
    follow: Sequence[tuple[int, int]], names: Sequence[str], reference: Sequence[Arrays]
) -> Iterator[int]:
    """The outputs of one float for each row that never rise: what the rows are ordered by."""
    for number, axis in follow:
        values = [np.moveaxis(each[names[number]], axis, 0) for each in reference]
        single = all(value.size == value.shape[0] and value.dtype.kind == "f" for value in values)
        if single and all(np.all(np.diff(value.reshape(-1)) <= 0) for value in values):
            yield number


def _reordered(
    model: onnx.ModelProto, selection: onnx.NodeProto, axis: int, order: np.ndarray
) -> onnx.ModelProto:
    """The model with what a node selects in another order."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    indices = f"{selection.output[0] or selection.output[1]}, order"
    made.graph.initializer.append(numpy_helper.from_array(order.astype(np.int64), indices))
    for node in model.graph.node:
        made.graph.node.append(node)
        if node.output == selection.output:
            plain = [f"{name}, in order" if name else "" for name in node.output]
            made.graph.node[-1].output[:] = plain
            made.graph.node.extend(
                helper.make_node("Gather", [before, indices], [name], axis=axis)
                for before, name in zip(plain, node.output, strict=True)
                if name
            )
    return made
