"""Whether the calls of a compiled model are right, each judged by what the device itself gives it.

A quantised model rounds between its operators. What lies next to a boundary falls to either side by the last
bit of a sum, and all that follows differs by whole quanta, so that a difference of the whole says little. So
each call is compared on its own: the values between calls become outputs of the compiled model, whose kernels
stay what they are, and the reference evaluates the normalised model cut there, from the device's own values.

A call may round several times. How far it may then be off is read off the reference, which is evaluated again
with noise of a hundredth of a quantum before each rounding: no more than twice as many elements may differ as
by this noise, and none by more than twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from honed.protocol.dataclass import dataclass
from honed.tuner.frontend import Normalised, TensorSpec
from honed.tuner.lower.module import LoweredModel
from honed.tuner.lower.program import FunctionCall, constant_values
from honed.tuner.prove import discontinuities, evaluator, graphs
from honed.tuner.prove.graphs import TypedValue
from honed.tuner.prove.tolerance import work

Arrays = Mapping[str, np.ndarray]
# Runs a program on the sets of inputs; its outputs are those of the normalised model.
Run = Callable[[LoweredModel, Normalised], Sequence[Arrays]]

_MOVES = 2  # times that noise is added, for the first set of inputs
_NOISE = "noise, in quanta"
_FACTOR = 2  # that a call may be off by more than noise moves the reference


@dataclass(frozen=True, slots=True)
class _Tap:
    """A value between calls: its number in the program, and what it is in the normalised model."""

    value: int
    typed: TypedValue

    def seen(self, held: np.ndarray) -> np.ndarray:
        """Return what memory holds in the order of the model's axes; channels may lie in blocks."""
        return (held if held.ndim == len(self.typed.shape) else np.moveaxis(held, -1, 2)).reshape(
            self.typed.shape
        )


def are_right(lowered: LoweredModel, normalised: Normalised, inputs: Sequence[Arrays], run: Run) -> bool:
    """Run a model on sets of inputs and return whether each of its calls is right.

    Also returns False where this cannot be found out, as the reference does not take the normalised model.
    """
    taps = _taps(lowered, normalised)
    nbytes = sum(lowered.program.values[tap.value].nbytes for tap in taps)
    if nbytes > discontinuities.MOST_BYTES:
        return False
    found = _between(lowered, normalised, taps, run)
    model = _opened(normalised.model, taps)
    feeds = [
        {
            _NOISE: np.float32(noise),
            **_converted(normalised, given),
            **{_given(tap.typed.name): made[tap.typed.name] for tap in taps},
        }
        for noise, given, made in [
            *((0.0, *one) for one in zip(inputs, found, strict=True)),
            *[(discontinuities.OF_A_QUANTUM, inputs[0], found[0])] * _MOVES,
        ]
    ]
    reference = evaluator.evaluate(model, feeds)
    if isinstance(reference, evaluator.ReferenceFailure):
        return False
    calm, moved = reference.outputs[: len(inputs)], reference.outputs[len(inputs) :]
    effort = work(model, graphs.infer(model))
    return all(
        _agree(
            [one[name] for one in found],
            [one[name] for one in calm],
            [one[name] for one in moved],
            effort.allowed(calm[0][name].dtype.name, normalised.precision),
        )
        for name in graphs.outputs(model)
    )


def evaluated(normalised: Normalised, sets: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
    """Return what the reference makes of a normalised model; raise ModelRefused where it does not take it."""
    found = evaluator.evaluate(normalised.model, [_converted(normalised, given) for given in sets])
    if isinstance(found, evaluator.ReferenceFailure):
        raise found.refusal()
    names = graphs.outputs(normalised.model)
    return [
        {
            spec.name: made[name].astype(spec.numpy, copy=False)
            for name, spec in zip(names, normalised.outputs, strict=True)
        }
        for made in found.outputs
    ]


def _taps(lowered: LoweredModel, normalised: Normalised) -> list[_Tap]:
    """Return the values between calls that have memory of their own and are known in the normalised model."""
    program = lowered.program
    typed = {v.name: graphs.of_info(v) for v in normalised.model.graph.value_info}
    placed = {value for block in program.blocks for value, _ in block.places}
    taken = {*program.inputs, *program.outputs, *placed, *constant_values(program)}
    found = []
    for call in program.calls:
        if isinstance(call, FunctionCall) and len(call.outputs) == 1 and call.operators:
            (value,) = call.outputs
            memory, known = program.values[value], typed.get(call.operators[-1])
            if value not in taken and known is not None and memory.dtype == known.dtype:
                blocked = _in_blocks(known.shape, memory.shape[-1] if memory.shape else 1)
                if memory.shape in (known.shape, blocked):
                    found.append(_Tap(value, known))
    return found


def _in_blocks(shape: tuple[int, ...], lanes: int) -> tuple[int, ...] | None:
    """Return the shape of an image whose channels lie in blocks of so many."""
    if len(shape) < 2 or shape[1] % lanes:
        return None
    return shape[0], shape[1] // lanes, *shape[2:], lanes


def _between(
    lowered: LoweredModel, normalised: Normalised, taps: Sequence[_Tap], run: Run
) -> list[dict[str, np.ndarray]]:
    """Return the values between calls, and the outputs, for each set, as the normalised model has them."""
    program, values = lowered.program, [lowered.program.values[tap.value] for tap in taps]
    more = [
        TensorSpec(name=_given(tap.typed.name), dtype=v.dtype, shape=v.shape)
        for tap, v in zip(taps, values, strict=True)
    ]
    tapped = replace(
        program,
        outputs=(*program.outputs, *(tap.value for tap in taps)),
        output_shapes=(*program.output_shapes, *(v.shape for v in values)),
    )
    shown = replace(normalised, outputs=(*normalised.outputs, *more))
    return [
        {
            **{
                value.name: made[spec.name].astype(_dtype(value), copy=False)
                for value, spec in zip(normalised.model.graph.output, normalised.outputs, strict=True)
            },
            **{tap.typed.name: tap.seen(made[_given(tap.typed.name)]) for tap in taps},
        }
        for made in run(replace(lowered, program=tapped), shown)
    ]


def _converted(normalised: Normalised, given: Arrays) -> dict[str, np.ndarray]:
    """Return a set of inputs in the types of the arithmetic."""
    return {v.name: given[v.name].astype(_dtype(v)) for v in normalised.model.graph.input}


def _dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    return helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _given(name: str) -> str:
    return f"{name}, of the device"


def _opened(model: onnx.ModelProto, taps: Sequence[_Tap]) -> onnx.ModelProto:
    """Return a model that reads what the device gives between calls, with noise before each rounding."""
    other = {tap.typed.name: _given(tap.typed.name) for tap in taps}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        read = [other.get(name, name) for name in node.input]
        if node.op_type == "Round":
            drawn, size, moved = (f"{node.output[0]}, {what}" for what in ("drawn", "noise", "moved"))
            nodes += [
                helper.make_node(
                    "RandomUniformLike", read, [drawn], low=-1.0, high=1.0, seed=float(len(nodes))
                ),
                helper.make_node("Mul", [drawn, _NOISE], [size]),
                helper.make_node("Add", [*read, size], [moved]),
            ]
            read = [moved]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = read
        nodes.append(copy)
    noise = TypedValue(name=_NOISE, dtype="float32", shape=())
    return graphs.remade(
        model,
        nodes,
        [
            *model.graph.input,
            *(graphs.info(t.typed, _given(t.typed.name)) for t in taps),
            graphs.info(noise, _NOISE),
        ],
        [*model.graph.output, *(graphs.info(t.typed, t.typed.name) for t in taps)],
    )


def _agree(
    found: Sequence[np.ndarray], calm: Sequence[np.ndarray], moved: Sequence[np.ndarray], allowed: float
) -> bool:
    """Return whether a value differs from the reference no further than noise moves that.

    `moved` is the first of `calm` with noise; differences within `allowed` of the range do not count.
    """
    least = allowed * max(float(np.max(np.abs(one), initial=0.0)) for one in calm)
    by_noise = [_far(calm[0], one) for one in moved]
    many = _FACTOR * max(np.count_nonzero(far > least) for far in by_noise)
    most = max(least, _FACTOR * max(float(np.max(far, initial=0.0)) for far in by_noise))
    far = [_far(one, other) for one, other in zip(calm, found, strict=True)]
    return all(np.count_nonzero(~(one <= least)) <= many and bool(np.all(one <= most)) for one in far)


def _far(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return how far two arrays are apart, element by element; NaN where one is not finite."""
    return np.abs(one.astype(np.float64) - other.astype(np.float64))
