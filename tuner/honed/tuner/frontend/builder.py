"""Builds the normalised graph: types every node, and folds those whose inputs are constants.

Nodes are folded by ONNX's reference evaluator. TVM's own folding compiles every folded operator, which takes
many times longer than compiling the model.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from honed.process.limits import out_of_memory
from honed.protocol.errors import ModelRefused
from honed.runtime.compiled.model import Precondition

from .values import Array, NodeRefused, Value, elem_type, numpy_dtype

# Operators whose reference implementation is a loop in Python, or which are meant to run on the device.
_SLOW = {
    "AveragePool", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "DFT", "GridSample", "GRU", "Loop",
    "LpPool", "LSTM", "MaxPool", "QLinearConv", "Resize", "RNN", "RoiAlign", "Scan", "STFT", "Upsample",
}  # fmt: skip
_SLOW_ELEMENTS = 1 << 14  # A loop in Python over this many elements still ends within a second
_RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
}  # fmt: skip
_SWELLING_BYTES = 1 << 20  # Smaller constants may be many times larger than their inputs
_SWELLING_TIMES = 8
_MOST_READ = 1 << 28  # Bytes of a constant's inputs
_TENSOR_BYTES = 1 << 32  # Most bytes of one intermediate tensor
FOLDED_BYTES = 1 << 26  # Most bytes of one constant computed while compiling that is larger than its inputs
CONSTANT_BYTES = 1 << 32  # Most bytes of all constants, read and computed
_MATMUL_LIMIT = 1 << 32  # Multiply-adds worth doing on the host


def worth_folding(op: str, arrays: Sequence[Array | None]) -> bool:
    """Return whether evaluating `op` on the host is deterministic and bounded in time and memory."""
    present = [a for a in arrays if a is not None]
    if op in _RANDOM or sum(a.nbytes for a in present) > _MOST_READ:
        return False
    if op in _SLOW:
        return sum(a.size for a in present) <= _SLOW_ELEMENTS
    if op in {"MatMul", "Gemm", "Einsum"} and len(present) >= 2:
        return present[0].size * present[1].shape[-1] <= _MATMUL_LIMIT if present[1].ndim else True
    return True


def swells(made_bytes: int, used_bytes: int) -> bool:
    """Return whether a constant is so much larger than its parts that computing it at run time is cheaper."""
    return made_bytes > _SWELLING_BYTES and made_bytes > _SWELLING_TIMES * used_bytes


def evaluate(node: onnx.NodeProto, opset: int, inputs: dict[str, Array]) -> list[Any]:
    """Evaluate a node of ONNX's domain: return its outputs, arrays or lists of arrays for sequences.

    Raises NodeRefused where the reference evaluator cannot evaluate it.
    """
    arrays = list(inputs.values())
    if node.op_type == "Div" and len(arrays) == 2 and arrays[0].dtype.kind in "iu":
        return [_truncate_quotient(inputs[node.input[0]], inputs[node.input[1]])]
    if node.op_type == "ReduceMean" and not arrays[0].size:
        raise NodeRefused("it is the mean of no elements: ONNX does not define it, and runtimes differ")
    if (made := _by_numpy(node, inputs)) is not None:
        return [made]
    infos = [helper.make_tensor_value_info(n, elem_type(a.dtype), a.shape) for n, a in inputs.items()]
    present = [name for name in node.output if name]
    graph = helper.make_graph([node], "node", infos, [onnx.ValueInfoProto(name=n) for n in present])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = ReferenceEvaluator(model).run(None, inputs)
    except Exception as error:  # The evaluator raises any error of NumPy
        if out_of_memory(error):  # Says nothing of the node
            raise MemoryError(str(error)) from error
        why = f"its constant value cannot be computed: {type(error).__name__}: {error}"
        raise NodeRefused(why) from error
    by_name = dict(zip(present, results, strict=True))
    return [by_name.get(name) for name in node.output]


# The most frequent operators of quantised models; ONNX's evaluator gives equal results, and takes 0.3 ms to
# begin.
_ARITHMETIC: dict[str, np.ufunc] = {"Add": np.add, "Mul": np.multiply, "Sub": np.subtract}


def _by_numpy(node: onnx.NodeProto, inputs: dict[str, Array]) -> Array | None:
    """Return the result of a cast or of plain arithmetic of numbers; None for any other node."""
    given = [inputs[name] for name in node.input if name]
    if any(each.dtype.kind not in "iuf" for each in given):
        return None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if node.op_type in _ARITHMETIC and not node.attribute and given[0].dtype == given[1].dtype:
            return np.asarray(_ARITHMETIC[node.op_type](*given))
        if node.op_type == "Cast":
            wanted = next(each.i for each in node.attribute if each.name == "to")
            to = np.dtype(helper.tensor_dtype_to_np_dtype(wanted))
            return given[0].astype(to) if to.kind in "iuf" and to.isbuiltin == 1 else None
    return None


def _truncate_quotient(x: Array, y: Array) -> Array:
    """Return the integer quotient rounded towards zero, as ONNX defines it; ONNX's evaluator rounds down."""
    if not y.all():
        raise NodeRefused("it divides integers by a constant 0")
    quotient = np.floor_divide(x, y)
    inexact = quotient * y != x
    return np.where(inexact & ((x < 0) != (y < 0)), quotient + 1, quotient).astype(x.dtype)


# Nodes whose results are values of their first input (Concat: of all), through which `rely` looks.
_MOVING = {
    "Cast", "Concat", "Expand", "Gather", "Identity", "ReduceMax", "ReduceMin", "Reshape", "Slice",
    "Transpose",
}  # fmt: skip
_MOST_MOVES = 16
TARGET_OPSET = 21  # The opset of normalised graphs
SHAPE_DATA_LIMIT = 4096  # Elements; a constant longer than this is never a shape, axes or pads
_SCHEMAS: dict[tuple[str, int, str], onnx.defs.OpSchema] = {}


def _within(data: Array, low: int, high: int) -> bool:
    return not data.size or bool(low <= data.min() and data.max() <= high)


def _ends(kind: np.dtype[Any]) -> Array:
    """Return the least and the greatest number of a type of integers or booleans."""
    if kind.kind == "b":
        return np.array([0, 1])
    info = np.iinfo(kind.name)
    return np.array([info.min, info.max], kind)


def schema(op: str, opset: int, domain: str = "") -> onnx.defs.OpSchema | None:
    """Return ONNX's definition of an operator at an opset, or None where it has none."""
    key = (op, opset, domain)
    if key not in _SCHEMAS:
        try:
            _SCHEMAS[key] = onnx.defs.get_schema(op, opset, domain)
        except onnx.defs.SchemaError:
            return None
    return _SCHEMAS[key]


def infer(node: onnx.NodeProto, opset: int, values: Sequence[Value | None]) -> list[onnx.TypeProto | None]:
    """Return the types that ONNX infers for a node's outputs, each None where it cannot.

    Raises NodeRefused where the types contradict each other.
    """
    definition = schema(node.op_type, opset, node.domain)
    if definition is None:
        return [None] * len(node.output)
    present = {v.name: v for v in values if v is not None}
    data = {
        v.name: numpy_helper.from_array(v.data, v.name)
        for v in present.values()
        if v.data is not None and v.size <= SHAPE_DATA_LIMIT
    }
    try:
        found = shape_inference.infer_node_outputs(
            definition,
            node,
            {name: v.type_proto() for name, v in present.items()},
            data,
            opset_imports=[helper.make_opsetid("", opset)],
        )
    except Exception as error:  # A C++ exception without a Python class of its own
        if out_of_memory(error):
            raise MemoryError(str(error)) from error
        text = " ".join(str(error).split())
        raise NodeRefused(f"its types or shapes contradict: {text}") from error
    return [found.get(name) for name in node.output]


def static_shape(kind: onnx.TypeProto | None) -> tuple[int, ...] | None:
    """Return the shape where it is a tensor's and every size is known, else None."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    if any(not d.HasField("dim_value") for d in dims):
        return None
    return tuple(int(d.dim_value) for d in dims)


class Builder:
    """The graph being built, at TARGET_OPSET. Names are unique; constants become initialisers when used."""

    def __init__(self, reserved: Sequence[str]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[str, Value] = {}
        self.scope = ""  # The source node being rewritten; names of new nodes start with it
        self._names = set(reserved)
        self._counts: dict[str, int] = {}  # Counters of names by hint
        self._constant_room = CONSTANT_BYTES
        self._small: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self.preconditions: list[Precondition] = []
        self._given: set[str] = set()  # Inputs
        self._makers: dict[str, onnx.NodeProto] = {}

    def unique(self, hint: str) -> str:
        """Return a name that nothing else in the graph has."""
        hint = hint or "value"
        count = self._counts.get(hint, 1)
        name = hint if count == 1 else f"{hint}_{count}"
        while name in self._names:
            count += 1
            name = f"{hint}_{count}"
        self._counts[hint] = count
        self._names.add(name)
        return name

    def input(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Value:
        """Add a graph input under its own (reserved) name; an input without elements becomes a constant."""
        if 0 in shape:
            return self.constant(np.zeros(shape, dtype), hint=name)
        value = Value(name, np.dtype(dtype), shape)
        self.values[name] = value
        self._given.add(name)
        return value

    def rely(self, value: Value, low: int, high: int, why: str, *, must: str = "") -> None:
        """Have requests checked so that all of `value` lies in `low`..`high`, as far as inputs decide it.

        Inputs are reached through nodes that move all values, convert them, or add constants. A value that is
        computed otherwise may lie anywhere: the caller computes something defined for it, or says in `must`
        what cannot be compiled then. Raises NodeRefused with that, and for constants out of range.
        """
        if value.data is not None:
            if not _within(value.data, low, high):
                raise NodeRefused(f"{why} lie in {low} to {high}, and a constant does not")
            return
        found = self._bounds(value.name, low, high)
        if found is None or any(least > most for least, most in found.values()):
            if must:
                raise NodeRefused(must)
            return
        for name, (least, most) in found.items():
            kind = self.values[name].dtype
            known = any(
                each.input == name and (each.low, each.high) == (least, most) for each in self.preconditions
            )
            if not known and not (kind.kind in "biu" and _within(_ends(kind), least, most)):
                why = f"{self.scope}: {why}"
                self.preconditions.append(Precondition(input=name, low=least, high=most, why=why))

    def _bounds(self, name: str, low: int, high: int, depth: int = 0) -> dict[str, tuple[int, int]] | None:
        """Return the bounds of inputs that keep a value in `low`..`high`.

        None where other values decide it.
        """
        if name in self._given:
            return {name: (low, high)}
        node = self._makers.get(name)
        if node is None or depth > _MOST_MOVES:
            return None
        read = list(node.input) if node.op_type == "Concat" else node.input[:1]
        if node.op_type in ("Add", "Sub"):
            known = [self.values[each].data for each in node.input]
            at = 0 if known[0] is None else 1
            constant = known[1 - at]
            if constant is None or not constant.size or constant.dtype.kind not in "iu":
                return None
            least, most = int(constant.min()), int(constant.max())
            if node.op_type == "Add":
                low, high = low - least, high - most
            elif at == 0:
                low, high = low + most, high + least
            else:
                low, high = most - high, least - low
            read = [node.input[at]]
        elif node.op_type not in _MOVING or self._leaves_out(node, name):
            return None
        found: dict[str, tuple[int, int]] = {}
        for each in read:
            data = self.values[each].data
            inner = self._bounds(each, low, high, depth + 1) if data is None else {}
            if inner is None or (data is not None and not _within(data, low, high)):
                return None
            for one, (least, most) in inner.items():
                before = found.get(one, (least, most))
                found[one] = max(least, before[0]), min(most, before[1])
        return found

    def _leaves_out(self, node: onnx.NodeProto, name: str) -> bool:
        """Return whether a value lacks elements of the value it is moved from; those may be anything."""
        moved = self.values[node.input[0]]
        dropped = moved.size > self.values[name].size
        return moved.data is None and node.op_type in ("Gather", "Slice") and dropped

    def constant(self, data: Any, dtype: Any = None, hint: str = "") -> Value:
        """Add a constant; small constants that are equal are added once."""
        array = np.ascontiguousarray(data, dtype=dtype).reshape(np.shape(data))
        if array.dtype.kind in "OUS":
            raise NodeRefused("it works on strings, which are not compiled")
        key = (array.dtype.name, array.shape, array.tobytes() if array.nbytes <= 1024 else b"")
        if array.nbytes <= 1024 and key in self._small:
            return self._small[key]
        self._constant_room -= array.nbytes
        if self._constant_room < 0:
            raise ModelRefused("the model's constants grow beyond the limit while compiling; raise the limit")
        value = Value(self.unique(hint or f"{self.scope}/constant"), array.dtype, array.shape, array)
        self.values[value.name] = value
        if array.nbytes <= 1024:
            self._small[key] = value
        return value

    def hold(self, data: Array) -> Value:
        """Add a constant that is not folded further: its results are larger, or for the device."""
        return replace(self.constant(data), data=None)

    def ints(self, *numbers: int) -> Value:
        """Add a one-dimensional int64 constant."""
        return self.constant(np.array(numbers, np.int64))

    def like(self, number: float, value: Value) -> Value:
        """Add a scalar constant of the type of `value`."""
        return self.constant(np.asarray(number).astype(value.dtype))

    def cast(self, value: Value, dtype: Any) -> Value:
        """Return the value cast to a NumPy dtype, or the value itself where it has that dtype."""
        return value if value.dtype == dtype else self("Cast", value, to=elem_type(np.dtype(dtype)))

    def __call__(self, op: str, *inputs: Value | float | None, **attrs: Any) -> Value:
        """Emit a node with one output; a number stands for a scalar of the type of the last tensor."""
        tensors = [v for v in inputs if isinstance(v, Value)]
        given = [self.like(v, tensors[-1]) if isinstance(v, int | float) else v for v in inputs]
        return self.multi(op, given, 1, **attrs)[0]

    def chain(self, op: str, parts: Iterable[Value]) -> Value:
        """Emit nodes of two operands that combine all parts, the first ones first."""
        return functools.reduce(lambda x, y: self(op, x, y), parts)

    def multi(self, op: str, inputs: Sequence[Value | None], outputs: int, **attrs: Any) -> list[Value]:
        """Emit a node at TARGET_OPSET; raises NodeRefused where its output shapes are not static."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        names = [self.unique(f"{self.scope}/{op}") for _ in range(outputs)]
        node = helper.make_node(
            op,
            ["" if v is None else v.name for v in given],
            names,
            name=names[0],
            **{k: v for k, v in attrs.items() if v is not None},
        )
        return self.add(node, given)

    def add(self, node: onnx.NodeProto, inputs: Sequence[Value | None]) -> list[Value]:
        """Add a finished node of TARGET_OPSET whose inputs are values of this graph."""
        types = infer(node, TARGET_OPSET, inputs)
        results = [self._value_of(name, found) for name, found in zip(node.output, types, strict=True)]
        folded = self._fold(node, inputs, results)
        if folded is not None:
            return folded
        self.nodes.append(node)
        self.values.update({v.name: v for v in results})
        self._makers.update(dict.fromkeys(node.output, node))
        return results

    def opaque(self, node: onnx.NodeProto, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Value:
        """Add a finished node of one output whose type and shape only the caller knows."""
        value = Value(node.output[0], dtype, shape)
        self.nodes.append(node)
        self.values[value.name] = value
        return value

    def _value_of(self, name: str, kind: onnx.TypeProto | None) -> Value:
        shape = static_shape(kind)
        if shape is None or kind is None:
            raise NodeRefused("the shape of its output depends on the values of its inputs")
        value = Value(name, numpy_dtype(kind.tensor_type.elem_type), shape)
        if value.size * value.dtype.itemsize > _TENSOR_BYTES:
            raise NodeRefused(
                f"its output of shape {list(shape)} is above the limit of {_TENSOR_BYTES >> 20} MiB"
            )
        return value

    def _fold(
        self, node: onnx.NodeProto, inputs: Sequence[Value | None], results: Sequence[Value]
    ) -> list[Value] | None:
        if all(v.size == 0 for v in results):
            return [self.constant(np.zeros(v.shape, v.dtype), hint=v.name) for v in results]
        present = [v for v in inputs if v is not None]
        data = {v.name: v.data for v in present if v.data is not None}
        if any(v.data is None for v in present):
            return None
        made, used = (sum(v.size * v.dtype.itemsize for v in group) for group in (results, present))
        if made > max(FOLDED_BYTES, used) or swells(made, used):
            return None
        if not worth_folding(node.op_type, [v.data for v in present]):
            return None
        made_of = zip(evaluate(node, TARGET_OPSET, data), results, strict=True)
        return [self.constant(np.asarray(array, v.dtype), hint=v.name) for array, v in made_of]
