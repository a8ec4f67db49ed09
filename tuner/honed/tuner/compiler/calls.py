"""Verifies the calls of a compiled model, each on the inputs that the device itself computed for it.

A quantised model rounds between its operators. The last bit of a sum decides to which side a value next to a
boundary is rounded, and all later values then differ by whole quanta, so that a difference of the outputs
says little. So each call is compared on its own: the values between calls become outputs of the compiled
model, whose kernels stay unchanged, and the reference evaluates the normalised model, cut at these values,
from the device's own values.

A call may round several times. The reference gives the allowed error of each element: it computes the call
again with noise before each rounding, a hundredth of a quantum, whose signs are drawn for each rounding.
Noise is added and subtracted, so that a value next to a boundary crosses it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from honed.tuner.frontend import Normalised, StaticTensorSpec
from honed.tuner.lower.module import LoweredModel
from honed.tuner.lower.program import FunctionCall, constant_values
from honed.tuner.verify import discontinuities, evaluator, graphs
from honed.tuner.verify.graphs import TypedValue
from honed.tuner.verify.tolerance import work

Arrays = Mapping[str, np.ndarray]
# Runs a program on the sets of inputs; its outputs are those of the normalised model.
Run = Callable[[LoweredModel, Normalised], Sequence[Arrays]]

_RUNS = (1, -1)  # Signs of the noise: it is added and subtracted
# Signs of noise drawn at most; the images of a larger value share them
_SIGNS = 1 << 16
_FACTOR = 2  # Allowed error of a call, as a multiple of how far noise moves the reference
# Types that ONNX Runtime compares, and one that has all values of the others.
_EQUAL = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT32, onnx.TensorProto.INT64}
_EXACT = onnx.TensorProto.DOUBLE
_FLAT = "one row, of places"  # The shape of a value as one row
_MOST_ROUNDINGS = 4  # Consecutive roundings in a call: the noise of more would hide errors
_ONLY = ("onnxruntime",)  # Other evaluators take longer than compiling the partitions


@dataclass(frozen=True, slots=True)
class _Tap:
    """A value between calls: its number in the program, and its counterpart in the normalised model."""

    value: int
    typed: TypedValue

    def in_model_order(self, held: np.ndarray) -> np.ndarray:
        """Return the contents of memory in the order of the model's axes; channels may lie in blocks."""
        if held.shape == self.typed.shape:
            return held
        images, channels, *rest = self.typed.shape
        return np.moveaxis(held, -1, 2).reshape(images, -1, *rest)[:, :channels]


def are_right(lowered: LoweredModel, normalised: Normalised, inputs: Sequence[Arrays], run: Run) -> bool:
    """Run a model on sets of inputs and return whether each of its calls is right.

    Also returns False where this cannot be decided: ONNX Runtime rejects the normalised model, the values
    between calls are too large, or so few of them have counterparts that more than _MOST_ROUNDINGS follow
    each other between two.
    """
    taps = _taps(lowered, normalised)
    nbytes = sum(lowered.program.values[tap.value].nbytes for tap in taps)
    opened = _open_between_calls(normalised.model, taps)
    known = graphs.infer(opened)
    model, moving = _with_noise(opened, known)
    judged = graphs.outputs(opened)
    if nbytes > discontinuities.MOST_BYTES or max(moving.values(), default=0) > _MOST_ROUNDINGS:
        return False
    found = _between(lowered, normalised, taps, run)
    feeds = [
        _convert(normalised, given) | {_device_name(name): made[name] for name in judged}
        for given, made in zip(inputs, found, strict=True)
    ]
    reference = evaluator.evaluate(model, feeds, evaluators=_ONLY)
    if isinstance(reference, evaluator.ReferenceFailure):
        return False
    effort = work(opened, known)
    return all(
        _agree(
            made[name],
            calm[_places(name)],
            calm[_there(name)],
            [calm[_there(_name_moved(name, run))] for run in _RUNS if name in moving],
            effort.tolerance_of(made[name].dtype.name, normalised.precision),
        )
        for made, calm in zip(found, reference.outputs, strict=True)
        for name in judged
    )


def evaluate_reference(normalised: Normalised, sets: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
    """Return the reference's values of a normalised model.

    Raise ModelRefused where it cannot evaluate the model.
    """
    feeds = [_convert(normalised, given) for given in sets]
    found = evaluator.evaluate(normalised.model, feeds, evaluators=_ONLY)
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
    """Return the values between calls that have their own memory and a counterpart in the normal model."""
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
    """Return the shape of an image whose channels lie in blocks of `lanes`, the last perhaps not full."""
    return None if len(shape) < 2 else (shape[0], -(-shape[1] // lanes), *shape[2:], lanes)


def _between(
    lowered: LoweredModel, normalised: Normalised, taps: Sequence[_Tap], run: Run
) -> list[dict[str, np.ndarray]]:
    """Return the values between calls, and the outputs, for each set, as the normalised model has them."""
    program, values = lowered.program, [lowered.program.values[tap.value] for tap in taps]
    more = [
        StaticTensorSpec(name=_device_name(tap.typed.name), dtype=v.dtype, shape=v.shape)
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
            **{tap.typed.name: tap.in_model_order(made[_device_name(tap.typed.name)]) for tap in taps},
        }
        for made in run(replace(lowered, program=tapped), shown)
    ]


def _convert(normalised: Normalised, inputs: Arrays) -> dict[str, np.ndarray]:
    """Return a set of inputs in the types of the arithmetic."""
    return {v.name: inputs[v.name].astype(_dtype(v), copy=False) for v in normalised.model.graph.input}


def _dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    found: np.dtype[Any] = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return found


def _device_name(name: str) -> str:
    return f"{name}, of the device"


def _name_moved(name: str, run: int) -> str:
    return f"{name}, moved {run}"


def _places(name: str) -> str:
    return f"{name}, differs at"


def _there(name: str) -> str:
    return f"{name}, where it differs"


def _open_between_calls(model: onnx.ModelProto, taps: Sequence[_Tap]) -> onnx.ModelProto:
    """Return a model that reads the device's values between calls, and also computes them."""
    given = {tap.typed.name: _device_name(tap.typed.name) for tap in taps}
    return graphs.rebuild_model(
        model,
        [
            _rename(node, [given.get(name, name) for name in node.input], node.output)
            for node in model.graph.node
        ],
        [*model.graph.input, *(graphs.info(tap.typed, given[tap.typed.name]) for tap in taps)],
        [*model.graph.output, *(graphs.info(tap.typed, tap.typed.name) for tap in taps)],
    )


def _with_noise(
    model: onnx.ModelProto, types: Mapping[str, TypedValue]
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return a model that says where its outputs differ from the device's, and its values there.

    It also gives those values after noise before its roundings has moved them; other values would be much to
    write and to read. Also return the values that noise moves, each with the largest number of consecutive
    roundings before it. Values before all roundings are computed once.
    """
    nodes: list[onnx.NodeProto] = []
    moving: dict[str, int] = {}

    def name_moved(name: str, run: int) -> str:
        return _name_moved(name, run) if name in moving else name

    for node in model.graph.node:
        nodes.append(node)
        behind = max((moving.get(name, 0) for name in node.input), default=0) + (node.op_type == "Round")
        if not behind:
            continue
        read = {run: [name_moved(name, run) for name in node.input] for run in _RUNS}
        if node.op_type == "Round":
            made = node.output[0]
            drawn = numpy_helper.from_array(_noise(types[node.input[0]], len(nodes)))
            nodes.append(helper.make_node("Constant", [], [f"{made}, drawn"], value=drawn))
            for run in _RUNS:
                noisy, op = f"{made}, noisy {run}", "Add" if run > 0 else "Sub"
                nodes.append(helper.make_node(op, [*read[run], f"{made}, drawn"], [noisy]))
                read[run] = [noisy]
        moving.update(dict.fromkeys(node.output, behind))
        nodes += [_rename(node, read[run], [name_moved(name, run) for name in node.output]) for run in _RUNS]
    flat = numpy_helper.from_array(np.array([-1]))
    nodes.append(helper.make_node("Constant", [], [_FLAT], value=flat))
    given, shown = list(model.graph.input), list[onnx.ValueInfoProto]()
    for value in model.graph.output:
        name, typed = value.name, value.type.tensor_type.elem_type
        if _device_name(name) not in {each.name for each in given}:
            given.append(graphs.info(types[name], _device_name(name)))
        pair = [name, _device_name(name)]
        if typed not in _EQUAL:
            nodes += [helper.make_node("Cast", [each], [f"{each}, exact"], to=_EXACT) for each in pair]
            pair = [f"{each}, exact" for each in pair]
        nodes += [
            helper.make_node("Equal", pair, [f"{name}, equal"]),
            helper.make_node("Not", [f"{name}, equal"], [f"{name}, differs"]),
            helper.make_node("Reshape", [f"{name}, differs", _FLAT], [f"{name}, differs, flat"]),
            helper.make_node("NonZero", [f"{name}, differs, flat"], [_places(name)]),
        ]
        shown.append(helper.make_tensor_value_info(_places(name), onnx.TensorProto.INT64, None))
        for each in [name, *(_name_moved(name, run) for run in _RUNS if name in moving)]:
            nodes += [
                helper.make_node("Reshape", [each, _FLAT], [f"{each}, flat"]),
                helper.make_node("Gather", [f"{each}, flat", _places(name)], [_there(each)]),
            ]
            shown.append(helper.make_tensor_value_info(_there(each), typed, None))
    return graphs.rebuild_model(model, nodes, given, shown), moving


def _noise(value: TypedValue, seed: int) -> np.ndarray:
    """Return noise of a hundredth of a quantum for a value: for its last axes, as many as _SIGNS allows."""
    axes = sum(count <= _SIGNS for count in accumulate(reversed(value.shape), mul))
    shape = value.shape[len(value.shape) - axes :]
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], shape)
    return (discontinuities.OF_A_QUANTUM * signs).astype(value.dtype)


def _rename(node: onnx.NodeProto, read: Sequence[str], written: Sequence[str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = ""  # ONNX Runtime refuses two nodes of one name
    copy.input[:], copy.output[:] = read, written
    return copy


def _agree(
    actual: np.ndarray, places: np.ndarray, calm: np.ndarray, moved: Sequence[np.ndarray], allowed: float
) -> bool:
    """Return whether each element is off by at most twice as much as noise moves the reference there.

    `places` are the elements of `actual`, counted in one row, that differ from the reference; `calm` has its
    values there, `moved` those with noise. Differences up to `allowed` of the range agree as well; values
    that are not finite never do.
    """
    if not np.isfinite(actual).all() or not np.isfinite(calm).all():
        return False
    if not places.size:
        return True
    exact = np.result_type(actual, np.float32)  # A difference of nearly equal numbers is exact
    reference = actual.astype(exact).reshape(-1)
    there, expected = reference[places], calm.astype(exact)
    reference[places] = expected
    least = allowed * float(np.max(np.abs(reference)))
    by_noise = np.max([np.abs(each.astype(exact) - expected) for each in (calm, *moved)], axis=0)
    return bool(np.all(np.abs(there - expected) <= np.maximum(_FACTOR * by_noise, least)))
