"""Models opened at their steps: operators whose result jumps where what they are given moves a little.

A function into [-1, 1] that an output comes from is a step, too: it hides what it is given where that is
large, so that 1e-7 in place of 2e-7 says nothing of the model, and what it was given does.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, inliner

from . import graphs
from .graphs import info
from .ranges import MOVING

Arrays = Mapping[str, np.ndarray]

_QUANTISING = {
    "DynamicQuantizeLinear", "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv",
    "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMatMul", "QLinearMul", "QLinearSigmoid",
    "QLinearSoftmax", "QuantizeLinear",
}  # fmt: skip
# Operators that round what they compute inside, step by step, where nothing can be opened.
_ROUNDING_INSIDE = {"DynamicQuantizeLSTM"}
_CHOOSING = {
    "ArgMax", "ArgMin", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Hardmax", "IsInf", "IsNaN",
    "Less", "LessOrEqual", "Mod", "Round", "Sign", "TopK",
}  # fmt: skip
BOUNDED = {"Erf", "Sigmoid", "Softmax", "Tanh"}  # functions into [-1, 1]
_CLIPPING = {"Clip", "HardSigmoid", "Relu", "ThresholdedRelu"}  # hide what they are given beyond a bound
# What may give one value for many others, so that it says little of what it is given.
HIDING = {
    *_QUANTISING, *_CHOOSING, *BOUNDED, *_CLIPPING, "And", "DequantizeLinear", "Not", "Or", "Where", "Xor",
}  # fmt: skip

MOST_BYTES = 1 << 29  # of values at the steps, for one probe


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model whose steps stand apart: `model` reads what `feeds` gives, besides its own inputs.

    `before` are the values that steps read and other nodes make, `after` those that steps make; both as the
    original names them. In `model` a step reads `given[x]` in place of x and makes `made[q]` in place of q.
    `bounded` are the outputs that a function into [-1, 1] gives.
    """

    model: onnx.ModelProto
    before: tuple[str, ...]
    after: tuple[str, ...]
    given: Mapping[str, str]
    made: Mapping[str, str]
    quantising: frozenset[str]  # those of `after` that may be off by one
    quanta: Mapping[str, float]  # of those of `before` that constant scales round
    bounded: frozenset[str]
    inside: frozenset[str]  # the outputs of `model` that operators make which round inside
    steps: int

    def feeds(self, inputs: Arrays, reference: Arrays) -> dict[str, np.ndarray]:
        """The inputs of `model`, where `reference` has the values of `before` and `after`."""
        return {
            **inputs,
            **{self.given[name]: reference[name] for name in self.before},
            **{name: reference[name] for name in self.after},
        }


def opened(model: onnx.ModelProto) -> OpenedModel | None:
    """A model with static shapes, opened at its steps; None where it has none that can be opened."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    known, varying, nodes = graphs.infer(model), _varying(model), model.graph.node
    ends = _ends(model)
    numbered = {
        i: node
        for i, node in enumerate(nodes)
        if _is_step(node, known, varying, ends) and all(name in known for name in node.output if name)
    }
    steps = list(numbered.values())
    if not steps:
        return None
    after = tuple(name for step in steps for name in step.output if name)
    own = {value.name for value in model.graph.input}
    read = dict.fromkeys(name for step in steps for name in step.input)
    before = tuple(name for name in read if name in varying and name not in own and name not in after)
    taken = own | {name for node in nodes for name in (*node.input, *node.output)}
    given = {name: _unused(f"{name}, given", taken) for name in before}
    made = {name: _unused(f"{name}, made", taken) for name in after}
    return OpenedModel(
        model=_apart(model, numbered, known, given, made),
        before=before,
        after=after,
        given=given,
        made=made,
        quantising=frozenset(
            name for step in steps if step.op_type in _QUANTISING for name in step.output if name
        ),
        quanta=_quanta(steps, graphs.constants(model)),
        bounded=frozenset(end for step in steps if step.op_type in BOUNDED for end in ends[step.output[0]]),
        inside=frozenset(
            made[name] for step in steps if step.op_type in _ROUNDING_INSIDE for name in step.output if name
        ),
        steps=len(steps),
    )


def _apart(
    model: onnx.ModelProto,
    steps: Collection[int],
    known: Mapping[str, graphs.TypedValue],
    given: Mapping[str, str],
    made: Mapping[str, str],
) -> onnx.ModelProto:
    """The model whose steps, by number, read and make what `given` and `made` call so."""
    outputs = [value for value in model.graph.output if value.name not in made]
    there = {value.name for value in outputs}
    return _remade(
        model,
        [_renamed(n, given, made) if i in steps else n for i, n in enumerate(model.graph.node)],
        [
            *model.graph.input,
            *(info(known[name], other) for name, other in given.items()),
            *(info(known[name], name) for name in made),
        ],
        [
            *outputs,
            *(info(known[name], name) for name in given if name not in there),
            *(info(known[name], other) for name, other in made.items()),
        ],
    )


def _remade(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """A model of other nodes with the same constants."""
    graph = helper.make_graph(nodes, model.graph.name, inputs, outputs, list(model.graph.initializer))
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    return helper.make_model(graph, ir_version=model.ir_version, opset_imports=list(model.opset_import))


def moving(model: onnx.ModelProto, apart: OpenedModel, sizes: Mapping[str, float]) -> onnx.ModelProto:
    """Return the model with noise added to what its steps read.

    `sizes` says by value how large the noise is at most. Each run of the model adds other noise.
    """
    if model.functions:
        model = inliner.inline_local_functions(model)
    taken = set(apart.given.values()) | set(apart.made.values())
    taken |= {name for node in model.graph.node for name in (*node.input, *node.output)}
    moved = {name: _unused(f"{name}, moved", taken) for name in sizes}
    types = {value.name: value.type.tensor_type.elem_type for value in apart.model.graph.input}
    nodes: list[onnx.NodeProto] = []
    for node, other in zip(model.graph.node, apart.model.graph.node, strict=True):
        is_step = list(node.output) != list(other.output)
        nodes.append(_renamed(node, moved, {}) if is_step else node)
        for name in node.output:
            if name in moved:
                typed = types[apart.given[name]]
                nodes += _noise(name, moved[name], _unused(f"{name}, added", taken), sizes[name], typed)
    return _remade(model, nodes, list(model.graph.input), list(model.graph.output))


def _noise(name: str, moved: str, added: str, size: float, typed: int) -> list[onnx.NodeProto]:
    drawn, seed = f"{added}, drawn", float(zlib.crc32(name.encode()) % 10_000)
    ends = {"low": -size, "high": size, "seed": seed, "dtype": onnx.TensorProto.FLOAT}
    return [
        helper.make_node("RandomUniformLike", [name], [drawn], **ends),
        helper.make_node("Cast", [drawn], [added], to=typed),
        helper.make_node("Add", [name, added], [moved]),
    ]


def only(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return the model with one of its outputs."""
    outputs = [value for value in model.graph.output if value.name == name]
    return _remade(model, list(model.graph.node), list(model.graph.input), outputs)


def exposing(model: onnx.ModelProto, apart: OpenedModel) -> onnx.ModelProto:
    """The model with the values at its steps among its outputs."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(inliner.inline_local_functions(model) if model.functions else model)
    there = {value.name for value in exposed.graph.output}
    typed = {value.name: value for value in (*apart.model.graph.input, *apart.model.graph.output)}
    exposed.graph.output.extend(typed[name] for name in (*apart.before, *apart.after) if name not in there)
    return exposed


def nbytes(apart: OpenedModel) -> int:
    """Of all that it is given."""
    sizes = (graphs.of_info(value) for value in apart.model.graph.input)
    return sum(int(np.prod(s.shape, dtype=np.int64)) * np.dtype(s.dtype).itemsize for s in sizes if s)


def _is_step(
    node: onnx.NodeProto,
    known: Mapping[str, graphs.TypedValue],
    varying: set[str],
    ends: Mapping[str, frozenset[str]],
) -> bool:
    if node.domain not in ("", "ai.onnx", "com.microsoft") or not any(n in varying for n in node.input):
        return False
    at_the_end = node.op_type in BOUNDED | _CLIPPING and node.output[0] in ends
    if at_the_end or node.op_type in _QUANTISING | _CHOOSING | _ROUNDING_INSIDE:
        return all(name in known for name in node.input if name in varying)
    if node.op_type != "Cast" or node.input[0] not in known or node.output[0] not in known:
        return False
    return _is_float(known[node.input[0]]) and not _is_float(known[node.output[0]])


def _ends(model: onnx.ModelProto) -> dict[str, frozenset[str]]:
    """The values that only go to outputs, moved or of another type, with the names of these outputs."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in {name for inner in graphs.within(node) for name in inner.input if name}:
            readers.setdefault(name, []).append(node)
    found = {value.name: frozenset({value.name}) for value in model.graph.output if value.name not in readers}
    for node in reversed(model.graph.node):
        if node.op_type in MOVING and all(name in found for name in node.output if name):
            name = node.input[0]
            if len(readers[name]) == 1 and name not in graphs.outputs(model):
                found[name] = frozenset().union(*(found[each] for each in node.output if each))
    return found


def _is_float(value: graphs.TypedValue) -> bool:
    return value.dtype.startswith("float")


def _quanta(steps: Iterable[onnx.NodeProto], constants: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The least quantum that constant scales round a value to, by its name."""
    found: dict[str, float] = {}
    for node in steps:
        if node.op_type == "QuantizeLinear" and constants.get(node.input[1], np.zeros(0)).size:
            quantum = float(np.min(constants[node.input[1]]))
            found[node.input[0]] = min(quantum, found.get(node.input[0], quantum))
    return found


def _varying(model: onnx.ModelProto) -> set[str]:
    """The values that depend on inputs."""
    fixed = {tensor.name for tensor in model.graph.initializer}
    found = {value.name for value in model.graph.input} - fixed
    for node in model.graph.node:
        reads = {name for inner in graphs.within(node) for name in inner.input}
        if reads & found:
            found |= {name for name in node.output if name}
    return found


def _renamed(node: onnx.NodeProto, given: Mapping[str, str], made: Mapping[str, str]) -> onnx.NodeProto:
    other = onnx.NodeProto()
    other.CopyFrom(node)
    other.input[:] = [given.get(name, name) for name in node.input]
    other.output[:] = [made.get(name, name) for name in node.output]
    return other


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "'"
    taken.add(name)
    return name
