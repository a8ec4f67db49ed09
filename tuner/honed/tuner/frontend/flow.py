"""Compiles control flow: unrolls loops of known length, and chooses a branch or computes both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx

from .builder import Builder
from .rules.layout import join, pick, reshape, with_axis
from .values import Item, NodeCall, NodeRefused, Unknown, Value, normal_axis

MAX_TRIPS = 64  # Trips of a loop; longer ones make more kernels than their launches are worth
MAX_BODIES = 2048  # Graphs within nodes that a model may become altogether, loops in loops multiplied
MAX_UNROLLED = 8192  # Nodes that a loop may become
MAX_BOTH = 2048  # Nodes of two branches that are both computed
FLOW = ("If", "Loop", "Scan")
# Returns the outputs of a graph within the node, from its inputs by name; raises NodeRefused where it cannot.
Body = Callable[[onnx.GraphProto, dict[str, Item]], list[Item]]


def flow(b: Builder, c: NodeCall, body: Body) -> Sequence[Item]:
    """Return the outputs of an If, Loop or Scan.

    Raises NodeRefused where they depend on a run of the model.
    """
    if c.op == "If":
        return _both(b, c, body)
    return _loop(b, c, body) if c.op == "Loop" else _scan(b, c, body)


def graph_of(c: NodeCall, name: str) -> onnx.GraphProto:
    """Return a graph within the node, by the name of its attribute."""
    for attribute in c.node.attribute:
        if attribute.name == name:
            return attribute.g
    raise NodeRefused(f"its {name} is missing")


def _both(b: Builder, c: NodeCall, body: Body) -> Sequence[Item]:
    """Compute both branches and select the elements of one; their outputs must agree in types and shapes."""
    condition = c.x(0)
    if condition.size != 1:
        raise NodeRefused(f"its condition has {condition.size} elements, not one")
    before = len(b.nodes)
    sides = [body(graph_of(c, name), {}) for name in ("then_branch", "else_branch")]
    if len(b.nodes) - before > MAX_BOTH:
        raise NodeRefused(
            f"its condition is computed at run time, and both branches have over {MAX_BOTH} nodes"
        )
    chosen = reshape(b, condition, [])
    found: list[Item] = []
    for yes, no in zip(*sides, strict=True):
        if not isinstance(yes, Value) or not isinstance(no, Value):
            raise NodeRefused("its condition is computed at run time, and a branch gives no tensor")
        if (yes.dtype, yes.shape) != (no.dtype, no.shape):
            raise NodeRefused(
                f"its condition is computed at run time, and its branches differ: {yes.dtype}"
                f"{list(yes.shape)} and {no.dtype}{list(no.shape)}"
            )
        found.append(yes if yes is no else b("Where", chosen, yes, no))
    return found


def _trip(b: Builder, body: Body, graph: onnx.GraphProto, inputs: Sequence[Item], before: int) -> list[Item]:
    """Return the outputs of one trip of a loop, which began with `before` nodes in the graph being built."""
    outputs = body(graph, dict(zip((i.name for i in graph.input), inputs, strict=True)))
    if len(b.nodes) - before > MAX_UNROLLED:
        raise NodeRefused(f"it becomes more than {MAX_UNROLLED} nodes when it is unrolled")
    return outputs


def _going(condition: Item | None) -> bool:
    """Return whether a loop continues, as it does without a condition."""
    if not isinstance(condition, Value):
        return True
    if condition.data is None:
        raise NodeRefused("its condition is computed at run time; loops are unrolled where it is known")
    return bool(condition.data.reshape(-1)[0])


def _loop(b: Builder, c: NodeCall, body: Body) -> Sequence[Item]:
    graph = graph_of(c, "body")
    trips = c.opt_numbers(0, "trip count")
    most = None if trips is None else trips[0]
    going = _going(c.opt(1))
    carried: list[Item] = [Unknown() if item is None else item for item in c.inputs[2:]]
    gathered: list[list[Item]] = [[] for _ in graph.output[1 + len(carried) :]]
    before, trip = len(b.nodes), 0
    while going and (most is None or trip < most):
        if trip == MAX_TRIPS:
            raise NodeRefused(f"it is not unrolled: it runs more than {MAX_TRIPS} times")
        inner: list[Item] = [b.constant(np.array(trip, np.int64)), b.constant(np.array(True)), *carried]
        outputs = _trip(b, body, graph, inner, before)
        going = _going(outputs[0])
        carried = outputs[1 : 1 + len(carried)]
        for row, item in zip(gathered, outputs[1 + len(carried) :], strict=True):
            row.append(item)
        trip += 1
    return [*carried, *(_stack(b, row, 0) for row in gathered)]


def _scan(b: Builder, c: NodeCall, body: Body) -> Sequence[Item]:
    if c.opset < 9:
        raise NodeRefused("its form before opset 9 is not compiled; export the model with a newer opset")
    graph = graph_of(c, "body")
    count = c.integer("num_scan_inputs")
    items = c.tensors()
    carried: list[Item] = list(items[: len(items) - count])
    scanned = items[len(items) - count :]
    axes = [normal_axis(a, v.rank) for a, v in zip(_each(c, "scan_input_axes", count), scanned, strict=True)]
    lengths = {v.shape[a] for v, a in zip(scanned, axes, strict=True)}
    if len(lengths) != 1:
        raise NodeRefused(f"its inputs are of different lengths: {sorted(lengths)}")
    length = lengths.pop()
    if not 0 < length <= MAX_TRIPS:
        raise NodeRefused(f"it is not unrolled: it runs {length} times; at most {MAX_TRIPS} are")
    backwards = _each(c, "scan_input_directions", count)
    gathered: list[list[Item]] = [[] for _ in graph.output[len(carried) :]]
    before = len(b.nodes)
    for trip in range(length):
        slices = [
            pick(b, v, axis, length - 1 - trip if back else trip)
            for v, axis, back in zip(scanned, axes, backwards, strict=True)
        ]
        outputs = _trip(b, body, graph, [*carried, *slices], before)
        carried = outputs[: len(carried)]
        for row, item in zip(gathered, outputs[len(carried) :], strict=True):
            row.append(item)
    out_axes = _each(c, "scan_output_axes", len(gathered))
    out_backwards = _each(c, "scan_output_directions", len(gathered))
    stacked = [
        _stack(b, row[::-1] if back else row, axis)
        for row, axis, back in zip(gathered, out_axes, out_backwards, strict=True)
    ]
    return [*carried, *stacked]


def _each(c: NodeCall, name: str, count: int) -> list[int]:
    found = c.ints(name) or [0] * count
    if len(found) != count:
        raise NodeRefused(f"its {name} has {len(found)} numbers, not {count}")
    return found


def _stack(b: Builder, row: Sequence[Item], axis: int) -> Value:
    """Return tensors of one shape stacked along a new axis."""
    parts = [item for item in row if isinstance(item, Value)]
    if not parts or len(parts) < len(row) or len({(p.dtype, p.shape) for p in parts}) != 1:
        raise NodeRefused("what it gathers over its steps is empty, or not of one shape")
    place = normal_axis(axis, parts[0].rank + 1)
    return join(b, [with_axis(b, p, place) for p in parts], place)
