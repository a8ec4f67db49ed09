"""A normalised model as passes see it: nodes of one output each, types, constants as arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Replaced = dict[str, list[onnx.NodeProto]]  # The nodes that replace the one that makes a value
ELEMENTWISE = {
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd",
    "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Cos", "Cosh", "Div", "Equal", "Erf", "Exp",
    "Floor", "Greater", "GreaterOrEqual", "Identity", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min",
    "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Relu", "Round", "Sigmoid", "Sin", "Sinh", "Sqrt", "Sub", "Tan",
    "Tanh", "Where", "Xor",
}  # fmt: skip
REDUCTIONS = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"})


@dataclass(frozen=True, slots=True)
class TensorType:
    """ONNX's number of an element type, and a static shape."""

    elem: int
    shape: Shape

    def along(self, axis: int, extent: int) -> TensorType:
        """Return the type with another extent of one axis, counted from the front."""
        return TensorType(self.elem, (*self.shape[:axis], extent, *self.shape[axis + 1 :]))


@dataclass()
class Graph:
    """Nodes in topological order, none of which changes. `types` knows every value and constant."""

    name: str
    nodes: list[onnx.NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: dict[str, TensorType]
    constants: dict[str, Array]
    _digests: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, proto: onnx.GraphProto) -> Graph:
        """Read the graph of a normalised model."""
        infos = (*proto.input, *proto.output, *proto.value_info)
        types = {i.name: _type(i.type.tensor_type) for i in infos}
        types |= {t.name: TensorType(t.data_type, tuple(t.dims)) for t in proto.initializer}
        return cls(
            name=proto.name,
            nodes=list(proto.node),
            inputs=tuple(i.name for i in proto.input),
            outputs=tuple(o.name for o in proto.output),
            types=types,
            constants={t.name: numpy_helper.to_array(t) for t in proto.initializer},
        )

    def proto(self) -> onnx.GraphProto:
        """Return this graph as ONNX writes it."""
        shown = {*self.inputs, *self.outputs}
        graph = helper.make_graph(
            self.nodes,
            self.name,
            [self._info(name) for name in self.inputs],
            [self._info(name) for name in self.outputs],
            value_info=[self._info(n.output[0]) for n in self.nodes if n.output[0] not in shown],
        )
        graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in self.constants.items())
        return graph

    def copy(self) -> Graph:
        """Return a graph whose nodes, types and constants can be changed; nodes themselves are shared."""
        return replace(self, nodes=list(self.nodes), types=dict(self.types), constants=dict(self.constants))

    def shape(self, name: str) -> Shape:
        """Return the shape of a value or constant."""
        return self.types[name].shape

    def numbers(self, name: str) -> list[int]:
        """Return a constant as a list of integers."""
        return [int(v) for v in self.constants[name].reshape(-1)]

    @cached_property
    def makers(self) -> dict[str, onnx.NodeProto]:
        """The node that makes each value."""
        return {node.output[0]: node for node in self.nodes}

    @cached_property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        """The nodes that read each value, one that reads it twice once."""
        found: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                found.setdefault(name, []).append(node)
        return found

    def uses(self, value: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value; none where the value is an output of the graph."""
        return [] if value in self.outputs else self.readers.get(value, [])

    def only(self, value: str) -> onnx.NodeProto | None:
        """Return the only node that reads a value; None where there are others, or the value is an output."""
        found = self.uses(value)
        return found[0] if len(found) == 1 else None

    def leaves(self, value: str, inside: Container[str]) -> bool:
        """Return whether a value is an output, or read outside a region of values."""
        readers = self.readers.get(value, [])
        return value in self.outputs or any(node.output[0] not in inside for node in readers)

    def digest(self, name: str) -> bytes:
        """Return a digest that is equal for constants of equal type, shape and content."""
        if name not in self._digests:
            array = np.ascontiguousarray(self.constants[name])
            kind = repr((self.types[name].elem, array.shape)).encode()
            self._digests[name] = hashlib.blake2b(kind + array.tobytes(), digest_size=16).digest()
        return self._digests[name]

    def unique(self, name: str) -> str:
        """Return `name`, or a similar name that is not in use."""
        candidate, n = name, 2
        while candidate in self.types:
            candidate, n = f"{name}_{n}", n + 1
        return candidate

    def constant(self, array: Array, name: str) -> str:
        """Add a constant and return its name."""
        taken = self.unique(name)
        elem = int(helper.np_dtype_to_tensor_dtype(array.dtype))
        self.types[taken] = TensorType(elem, array.shape)
        self.constants[taken] = array
        return taken

    def node(
        self, op: str, inputs: Sequence[str], output: str, kind: TensorType, **attrs: object
    ) -> onnx.NodeProto:
        """Return a node that makes `output`, and record the type; the node is not added to the graph."""
        self.types[output] = kind
        return helper.make_node(op, list(inputs), [output], name=output, **attrs)

    def reshape(self, source: str, output: str, shape: Shape) -> onnx.NodeProto:
        """Return a Reshape that makes `output`."""
        target = self.constant(np.array(shape, np.int64), f"{output}/shape")
        return self.node(
            "Reshape", (source, target), output, TensorType(self.types[source].elem, shape), allowzero=1
        )

    def slice(self, source: str, output: str, axis: int, start: int, end: int) -> onnx.NodeProto:
        """Return a Slice of one axis, from `start` up to `end`, that makes `output`."""
        kind = self.types[source].along(axis, end - start)
        return self.node("Slice", (source, *self._ints(output, start, end, axis, 1)), output, kind)

    def reverse(self, source: str, output: str, axis: int) -> onnx.NodeProto:
        """Return a Slice of one whole axis backwards that makes `output`."""
        inputs = self._ints(output, -1, -self.shape(source)[axis] - 1, axis, -1)
        return self.node("Slice", (source, *inputs), output, self.types[source])

    def bounds(self, node: onnx.NodeProto) -> tuple[int, int, int] | None:
        """Return the axis, start and end of a slice of neighbours along one axis, as passes write them.

        Returns None for other nodes.
        """
        if node.op_type != "Slice" or any(name not in self.constants for name in node.input[1:]):
            return None
        starts, ends, axes, steps = (self.numbers(name) for name in node.input[1:])
        if len(axes) != 1 or steps != [1] or axes[0] < 0 or not 0 <= starts[0] < ends[0]:
            return None
        return axes[0], starts[0], ends[0]

    def _ints(self, output: str, *numbers: int) -> list[str]:
        """Return one-dimensional constants of one element each, named after the output they are for."""
        return [self.constant(np.array([n], np.int64), f"{output}/constant") for n in numbers]

    def replacing(self, replaced: Replaced) -> Graph:
        """Return the graph with other nodes in the place of those that make these values."""
        return self.tidy(new for node in self.nodes for new in replaced.get(node.output[0], [node]))

    def tidy(self, nodes: Iterable[onnx.NodeProto]) -> Graph:
        """Return the graph of other nodes, in any order, without those that no output needs.

        The order is kept as far as it is topological. Raises ValueError where no order is.
        """
        made = {node.output[0]: node for node in nodes}
        needed: set[str] = set()
        pending = [name for name in self.outputs if name in made]
        while pending:
            name = pending.pop()
            if name not in needed:
                needed.add(name)
                pending += [given for given in made[name].input if given in made]
        ordered = _topological([node for name, node in made.items() if name in needed], made)
        read = {name for node in ordered for name in node.input}
        known = {*self.inputs, *self.outputs, *needed, *read}
        return replace(
            self,
            nodes=ordered,
            types={name: kind for name, kind in self.types.items() if name in known},
            constants={name: v for name, v in self.constants.items() if name in read},
        )

    def _info(self, name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, self.types[name].elem, self.types[name].shape)


def axis_of(node: onnx.NodeProto, rank: int) -> int:
    """Return the attribute `axis` of a node, counted from the front."""
    return int(helper.get_node_attr_value(node, "axis")) % rank


def perm_of(node: onnx.NodeProto) -> list[int]:
    """Return the axes of a Transpose's input, in the order of its result."""
    return list(helper.get_node_attr_value(node, "perm"))


def _type(kind: onnx.TypeProto.Tensor) -> TensorType:
    return TensorType(kind.elem_type, tuple(int(d.dim_value) for d in kind.shape.dim))


def _topological(nodes: list[onnx.NodeProto], makers: dict[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return every node after those it reads, otherwise in the original order."""
    ordered: list[onnx.NodeProto] = []
    done: set[str] = set()
    open_: set[str] = set()
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            name = node.output[0]
            missing = [given for given in node.input if given in makers and given not in done]
            if name in done or not missing:
                stack.pop()
                open_.discard(name)
                if name not in done:
                    done.add(name)
                    ordered.append(node)
            elif name in open_:
                raise ValueError(f"{name} depends on itself")
            else:
                open_.add(name)
                stack += [makers[given] for given in reversed(missing)]
    return ordered
