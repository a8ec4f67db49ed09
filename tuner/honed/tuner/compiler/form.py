"""Rewrites a decoder's graph to run with room for more rows of state than are valid.

The compiled decoder has state of a fixed length, its room. New rows are appended to the room, and the first
rows of the room are the valid ones. A model with a mask and positions as inputs needs no change. Other models
compute the positions of their tokens from the length of the state. They get one more input, ROWS_MASK: which
rows of the room are valid. Each value that depends on the length of the state is then needed twice: as a
size, for shapes, it depends on the room; as a number, for positions and masks, it is computed from the number
of valid rows. Other columns of the room count as positions after the newest token, which causal masks hide.
Where no mask is an input, attention hides them, too.

This module verifies nothing: the service compares the result with ONNX Runtime before it serves. Constructs
that it does not understand are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from honed.protocol.errors import ModelRefused
from honed.runtime.compiled.model import ROWS_MASK
from honed.tuner.verify import graphs

Shapes = Mapping[str, tuple[int, ...]]
_SMALL: Final = 1 << 22  # Elements of a value that is computed here
_HIDDEN: Final = -1e9  # Added to scores that no token is to see; in halves the least there is
_INT: Final = onnx.TensorProto.INT64
# Inputs that are sizes, axes or repeats, by operator: they follow from the room.
_SIZES: Final[Mapping[str, tuple[int, ...]]] = {
    "Reshape": (1,), "Expand": (1,), "ConstantOfShape": (0,), "Tile": (1,), "Pad": (1,), "Split": (1,),
    "Resize": (3,), "Squeeze": (1,), "Unsqueeze": (1,), "OneHot": (1,), "Slice": (1, 2, 3, 4),
}  # fmt: skip
# Inputs that hold indices along axes of the first: those of an axis of the state follow from the room.
_INDICES: Final = ("Gather", "GatherND", "GatherElements", "ScatterND", "ScatterElements")
_IMPURE: Final = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli")


def with_room(model: onnx.ModelProto, shapes: Shapes) -> onnx.ModelProto:
    """Return a checked decoder with the input ROWS_MASK, which it may have already; `shapes` must have it.

    Raises ModelRefused where honed does not understand how the model depends on the length of its state.
    """
    if any(info.name == ROWS_MASK for info in model.graph.input):
        return model
    inner = {name: shape for name, shape in shapes.items() if name != ROWS_MASK}
    return _Rewrite(graphs.inline_functions(model), inner, shapes[ROWS_MASK][1]).finish()


@dataclass(frozen=True, slots=True)
class _RoomEffect:
    """A value that follows from sizes alone: with this room, and with room for one row more."""

    room: np.ndarray
    more: np.ndarray

    @property
    def follows(self) -> bool:
        """Return whether the value depends on the length of the state."""
        return self.room.shape != self.more.shape or not np.array_equal(self.room, self.more)


class _Rewrite:
    """A rewriter of the graph; `numbers` has the names of values computed from the number of valid rows."""

    def __init__(self, model: onnx.ModelProto, shapes: Shapes, room: int) -> None:
        self._model, self._room = model, room
        self._now, self._more = (_infer_shapes(model, shapes, room, more) for more in (0, 1))
        self._known: dict[str, _RoomEffect] = {}
        self._constants = {t.name: t for t in model.graph.initializer}
        self._numbers: dict[str, str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._made = 0
        self._masked = any("mask" in info.name for info in model.graph.input)
        self._hides = False
        self._opset = next((each.version for each in model.opset_import if not each.domain), 1)

    def finish(self) -> onnx.ModelProto:
        """Return the model with its new nodes."""
        graph = self._model.graph
        given = list(graph.node)
        self._begin()
        for node in given:
            self._write(node)
        if not self._masked and not self._hides:
            raise _refusal("no Softmax or Attention over the rows of its state was found to hide the others")
        del graph.node[:]
        graph.node.extend(self._nodes)
        info = helper.make_tensor_value_info(ROWS_MASK, onnx.TensorProto.UINT8, [1, self._room])
        graph.input.append(info)
        return self._model

    # Sizes: which of them depend on the length of the state

    def _axis_follows(self, name: str, axis: int) -> bool:
        """Return whether the size of an axis follows from the length of the state; False if not known."""
        now, more = self._now.get(name), self._more.get(name)
        if now is None or more is None or not -len(now) <= axis < len(now):
            return False
        return now[axis] != more[axis]

    def _value(self, name: str) -> _RoomEffect | None:
        if name in self._known:
            return self._known[name]
        tensor = self._constants.get(name)
        if tensor is None or int(np.prod(tensor.dims)) > _SMALL:
            return None
        array = numpy_helper.to_array(tensor)
        return _RoomEffect(array, array)

    def _compute(self, node: onnx.NodeProto) -> _RoomEffect | None:
        """Return the value of a node that follows from sizes and constants alone, else None."""
        if node.op_type in _IMPURE or len(node.output) != 1 or any(a.HasField("g") for a in node.attribute):
            return None
        if node.op_type in ("Shape", "Size") and not node.domain:
            now, more = self._now.get(node.input[0]), self._more.get(node.input[0])
            if now is None or more is None:
                return None
            both = [
                _evaluate(node, {node.input[0]: _array_of_shape(shape)}, self._opset) for shape in (now, more)
            ]
        else:
            read = {name: self._value(name) for name in node.input if name}
            values = {name: value for name, value in read.items() if value is not None}
            # A value of constants alone does not depend on the state.
            if len(values) != len(read) or not any(name in self._known for name in read) or node.domain:
                return None
            both = [
                _evaluate(node, {name: value.room for name, value in values.items()}, self._opset),
                _evaluate(node, {name: value.more for name, value in values.items()}, self._opset),
            ]
        room, more_room = both
        if room is None or more_room is None or room.size > _SMALL:
            return None
        return _RoomEffect(room, more_room)

    # Writing: nodes of the new graph

    def _op(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = self._name()
        self._nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def _constant(self, value: Any, dtype: Any = np.int64) -> str:
        name, array = self._name(), np.asarray(value, dtype)
        self._model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _name(self) -> str:
        self._made += 1
        return f"honed.{self._made}"

    def _begin(self) -> None:
        """Write the number of valid rows, as a vector of one and as a scalar."""
        mask = self._op("Cast", ROWS_MASK, to=_INT)
        self._mask = self._op("Reshape", mask, self._constant([self._room]))
        count = self._op("ReduceSum", self._mask, keepdims=1)
        self._before = self._op("Reshape", count, self._constant([1]))

    def _write(self, node: onnx.NodeProto) -> None:
        value = self._compute(node)
        if value is not None:
            self._known[node.output[0]] = value
        if value is None or not value.follows:
            self._hide(node)
            self._read(node)
        else:
            self._nodes.append(node)
            self._number(node, value)

    def _read(self, node: onnx.NodeProto) -> None:
        """Write a node that computes with data; where it reads a size, that of the valid rows."""
        if node.op_type == "Slice" and self._write_slice(node):
            return
        if node.op_type == "Trilu" and len(node.input) > 1 and node.input[1] in self._numbers:
            self._triangle(node)
            return
        for at, name in enumerate(node.input):
            if name in self._numbers and not self._is_size(node, at):
                node.input[at] = self._index(node, at, self._numbers[name])
        if any(name in self._numbers for name in _read_inside(node)):
            raise _refusal(f"a graph within node {graphs.label(node)!r} reads the length of its state")
        self._nodes.append(node)

    def _number(self, node: onnx.NodeProto, value: _RoomEffect) -> None:
        """Write the computation of a node on sizes once more, from the number of valid rows."""
        kind, name = node.op_type, node.output[0]
        if kind in ("Shape", "Size"):
            if kind == "Size" or value.room.shape != value.more.shape:
                raise _refusal(f"node {graphs.label(node)!r} counts elements of its state")
            slope = value.more - value.room
            grown = self._op("Mul", self._before, self._constant(slope.reshape(-1)))
            begun = self._constant((value.room - slope * self._room).reshape(-1))
            self._numbers[name] = self._op(
                "Reshape", self._op("Add", grown, begun), self._constant(value.room.shape)
            )
        elif kind == "Range":
            self._numbers[name] = self._range(node, value)
        elif kind == "Slice" and self._write_slice(node, shown=True):
            pass
        elif kind == "Trilu" and len(node.input) > 1 and node.input[1] in self._numbers:
            self._triangle(node, shown=True)
        else:
            inputs = [
                self._index(node, at, self._numbers[each])
                if each in self._numbers and not self._is_size(node, at)
                else each
                for at, each in enumerate(node.input)
            ]
            if inputs != list(node.input):
                again = onnx.NodeProto()
                again.CopyFrom(node)
                del again.input[:]
                again.input.extend(inputs)
                again.output[0] = again.name = self._name()
                self._nodes.append(again)
                self._numbers[name] = again.output[0]

    def _is_size(self, node: onnx.NodeProto, at: int) -> bool:
        """Return whether an input is a size, or an index along an axis of the state's rows."""
        if at in _SIZES.get(node.op_type, ()):
            return True
        if node.op_type in _INDICES and at == 1:
            axes = [graphs.attribute(node, "axis", 0)]
            if node.op_type in ("GatherND", "ScatterND"):
                axes = list(range(len(self._now.get(node.input[0], ()))))
            return any(self._axis_follows(node.input[0], axis) for axis in axes)
        return False

    def _index(self, node: onnx.NodeProto, at: int, number: str) -> str:
        """Return a number as a node reads it; an index is limited to the axis that it indexes."""
        shape = self._now.get(node.input[0])
        if node.op_type not in ("Gather", "GatherElements") or at != 1 or shape is None:
            return number
        return self._clip(number, shape[graphs.attribute(node, "axis", 0)], self._known[node.input[1]].room)

    def _clip(self, number: str, size: int, like: np.ndarray) -> str:
        last = self._constant(size - 1, like.dtype)
        return self._op("Where", self._op("Less", number, last), number, last)

    def _range(self, node: onnx.NodeProto, value: _RoomEffect) -> str:
        """Write the positions that a Range counts: of tokens, or of all columns of the attention."""
        known = [self._value(name) for name in node.input]
        assert all(each is not None for each in known)
        start, _, step = (each.room.reshape(()) for each in known if each is not None)
        more = known[0].more.reshape(()) if known[0] is not None else start
        dtype, count = value.room.dtype, value.room.size
        if value.room.size == value.more.size:  # Places of tokens
            first = self._numbers.get(node.input[0], node.input[0])
            first = self._op("Reshape", first, self._constant([1]))
            return self._op("Add", first, self._constant(step * np.arange(count), dtype))
        new = int(start) + count - self._room
        if step != 1 or start != more or start != 0 or new < 0:
            raise _refusal(
                f"node {graphs.label(node)!r} counts rows of its state from another than the first"
            )
        return self._op("Cast", self._columns(new), to=helper.np_dtype_to_tensor_dtype(dtype))

    def _write_slice(self, node: onnx.NodeProto, *, shown: bool = False) -> bool:
        """Write a Slice of a table by positions, such as those of a causal mask.

        False for any other Slice.
        """
        if len(node.input) < 3 or not any(name in self._numbers for name in node.input[1:3]):
            return False
        parts = [self._value(name) if name else None for name in node.input[1:]]
        starts, ends = (part.room.reshape(-1) if part is not None else None for part in parts[:2])
        shape = self._now.get(node.input[0])
        if starts is None or ends is None or shape is None:
            raise _refusal(f"node {graphs.label(node)!r} cuts by the length of its state")
        axes = (
            parts[2].room.reshape(-1) if len(parts) > 2 and parts[2] is not None else np.arange(len(starts))
        )
        steps = parts[3].room if len(parts) > 3 and parts[3] is not None else np.ones(1)
        if all(self._axis_follows(node.input[0], int(axis)) for axis in axes):
            return False  # Rows of the state itself
        if np.any(steps != 1):
            raise _refusal(f"node {graphs.label(node)!r} cuts by the length of its state in steps")
        found = self._numbers.get(node.input[0], node.input[0])
        more = [part.more.reshape(-1) for part in parts[:2] if part is not None]
        for at, axis in enumerate(map(int, axes)):
            size = shape[axis]
            span = np.arange(size)[int(starts[at]) : int(ends[at])]
            grown = np.arange(size)[int(more[0][at]) : int(more[1][at])]
            if np.array_equal(span, grown):
                places = self._constant(span)
            elif len(span) == len(grown):
                number = self._numbers.get(node.input[1], node.input[1])
                one = self._op("Gather", number, self._constant([at]), axis=0)
                offsets = self._constant(np.arange(len(span)))
                places = self._op("Add", self._op("Cast", one, to=_INT), offsets)
            elif starts[at] == 0 and len(span) >= self._room:
                places = self._columns(len(span) - self._room)
            else:
                raise _refusal(f"node {graphs.label(node)!r} cuts a table by the length of its state")
            places = self._clip(places, size, np.zeros((), np.int64))
            found = self._op("Gather", found, places, axis=axis)
        if shown:
            self._numbers[node.output[0]] = found
        else:
            self._nodes.append(helper.make_node("Identity", [found], [node.output[0]]))
        return True

    def _columns(self, new: int) -> str:
        """Return the positions of columns.

        Columns of the room without a row get one after the newest token's.
        """
        behind = self._op("Add", self._before, self._constant([new]))
        there = self._op("Cast", self._mask, to=onnx.TensorProto.BOOL)
        columns = self._op("Where", there, self._constant(np.arange(self._room)), behind)
        return self._op(
            "Concat", columns, self._op("Add", self._before, self._constant(np.arange(new))), axis=0
        )

    def _triangle(self, node: onnx.NodeProto, *, shown: bool = False) -> None:
        """Write a Trilu whose diagonal follows from the length of the state."""
        data = node.input[0]
        shape = self._now.get(data)
        if shape is None or not self._axis_follows(data, -1):
            raise _refusal(f"node {graphs.label(node)!r} draws a diagonal by the length of its state")
        rows, columns = shape[-2:]
        places = self._columns(columns - self._room)
        offsets = self._op("Sub", places, self._constant(np.arange(rows).reshape(-1, 1)))
        diagonal = self._op("Cast", self._numbers[node.input[1]], to=_INT)
        diagonal = self._op("Reshape", diagonal, self._constant([1]))
        upper = bool(graphs.attribute(node, "upper", 1))
        out = self._op("Less", offsets, diagonal) if upper else self._op("Less", diagonal, offsets)
        zero = self._op("Sub", data, data) if data not in self._known else self._zero(data)
        kept = self._op("Where", out, zero, self._numbers.get(data, data))
        if shown:
            self._numbers[node.output[0]] = kept
        else:
            self._nodes.append(helper.make_node("Identity", [kept], [node.output[0]]))

    def _zero(self, data: str) -> str:
        return self._constant(0, self._known[data].room.dtype)

    # Masks: attention ignores columns without a row

    def _hide(self, node: onnx.NodeProto) -> None:
        """Mask columns without a row in attention, where no mask that is an input does so."""
        if self._masked:
            return
        if node.op_type == "Softmax" and not node.domain:
            self._hide_scores(node)
        elif node.op_type == "Attention" and not node.domain:
            self._hide_columns(node, 3, 4)
        elif node.op_type == "MultiHeadAttention":
            self._hide_columns(node, 4, 6)
        elif node.op_type == "GroupQueryAttention":
            raise _refusal(f"node {graphs.label(node)!r} takes the number of its rows from the state's size")

    def _hide_scores(self, node: onnx.NodeProto) -> None:
        scores = node.input[0]
        shape = self._now.get(scores)
        axis = graphs.attribute(node, "axis", -1 if self._opset > 12 else 1)
        if shape is None:
            raise _refusal(f"the sizes of what node {graphs.label(node)!r} reads are not known")
        if not self._axis_follows(scores, axis):
            return
        axis %= len(shape)
        places = [shape[axis] if each == axis else 1 for each in range(len(shape))]
        columns = self._op("Reshape", self._there(shape[axis] - self._room), self._constant(places))
        seen = self._op("Cast", columns, to=onnx.TensorProto.BOOL)
        hidden = self._hidden(self._kinds.get(scores, onnx.TensorProto.FLOAT))
        node.input[0] = self._op("Where", seen, scores, hidden)
        self._hides = True

    def _hide_columns(self, node: onnx.NodeProto, at: int, past: int) -> None:
        """Mask columns without a row by the input `at` of an attention, which may join its keys to `past`."""
        keys, state = node.input[1], node.input[past] if len(node.input) > past else ""
        joined = bool(state) and self._axis_follows(state, 2)
        shape = self._now.get(keys)
        if shape is None:
            raise _refusal(f"the sizes of what node {graphs.label(node)!r} reads are not known")
        axis = -2 if len(shape) > 3 else 1  # Shape [B, N, S, H] or [B, S, N * H]
        if not joined and not self._axis_follows(keys, axis):
            return
        if not joined and any(graphs.attribute(node, name, 0) for name in ("is_causal", "unidirectional")):
            raise _refusal(f"node {graphs.label(node)!r} is causal, and does not know the rows of its state")
        new = shape[axis] - (0 if joined else self._room)
        there = self._op("Cast", self._there(new), to=onnx.TensorProto.BOOL)
        node.input.extend([""] * (at + 1 - len(node.input)))
        if at == 4:  # A mask of keys, [B, columns]
            if node.input[at]:
                raise _refusal(f"node {graphs.label(node)!r} has a mask of its own beside the state's rows")
            columns = self._op("Reshape", there, self._constant([1, self._room + new]))
            node.input[at] = self._op("Cast", columns, to=onnx.TensorProto.INT32)
        elif node.input[at]:
            node.input[at] = self._with_columns(node, node.input[at], there, self._room + new)
        else:  # A row for each token
            asking = self._now[node.input[0]]
            whole = [asking[-2] if len(asking) > 3 else asking[1], self._room + new]
            node.input[at] = self._op("Expand", there, self._constant(whole))
        self._hides = True

    def _with_columns(self, node: onnx.NodeProto, mask: str, there: str, columns: int) -> str:
        """Return a mask [..., columns] of an attention, which hides columns without a row, too."""
        shape, kind = self._now.get(mask), self._kinds.get(mask)
        if not shape or shape[-1] != columns or kind is None:
            raise _refusal(f"node {graphs.label(node)!r} has a mask of its own beside the state's rows")
        if kind == onnx.TensorProto.BOOL:
            return self._op("And", mask, there)
        return self._op("Where", there, mask, self._hidden(kind))

    def _hidden(self, kind: int) -> str:
        """Return what is added to scores that no token is to see, or stands in their place."""
        least = np.finfo(np.float16).min if kind == onnx.TensorProto.FLOAT16 else _HIDDEN
        return self._op("Cast", self._constant(least, np.float32), to=kind)

    def _there(self, new: int) -> str:
        """Return which columns are valid, 1 or 0: those of rows in the room, and all those of new tokens."""
        return self._op("Concat", self._mask, self._constant(np.ones(new)), axis=0)

    @cached_property
    def _kinds(self) -> Mapping[str, int]:
        return dict(_types(self._model))


def _infer_shapes(model: onnx.ModelProto, shapes: Shapes, room: int, more: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of values where the state has room for `room + more` rows."""
    skeleton = _skeleton(model)
    opened = {info.name: info.type.tensor_type.shape.dim for info in model.graph.input}
    given = {
        name: tuple(
            size + more if size >= room and not opened[name][axis].HasField("dim_value") else size
            for axis, size in enumerate(shape)
        )
        for name, shape in shapes.items()
        if name in opened and len(opened[name]) == len(shape)
    }
    return {name: value.shape for name, value in graphs.infer(graphs.bind_shapes(skeleton, given)).items()}


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the data of large weights."""
    light = onnx.ModelProto()
    light.opset_import.extend(model.opset_import)
    light.ir_version = model.ir_version
    graph = light.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims) > 4096:  # Values this large never describe shapes
            graph.initializer.add(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        else:
            graph.initializer.append(tensor)
    return light


def _types(model: onnx.ModelProto) -> Iterator[tuple[str, int]]:
    inferred = onnx.shape_inference.infer_shapes(_skeleton(model)).graph
    for info in (*inferred.input, *inferred.value_info, *inferred.output):
        yield info.name, info.type.tensor_type.elem_type


def _evaluate(node: onnx.NodeProto, values: Mapping[str, np.ndarray], opset: int) -> np.ndarray | None:
    """Return the value of a node of ONNX's domain; None where it cannot be computed here."""
    found = graphs.evaluate_node(node, values, [helper.make_opsetid("", opset)])
    return None if found is None else np.asarray(found)


def _array_of_shape(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of a shape that takes no memory."""
    return np.broadcast_to(np.zeros((), np.int8), shape)


def _read_inside(node: onnx.NodeProto) -> Iterator[str]:
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from inner.input
                yield from _read_inside(inner)


def _refusal(why: str) -> ModelRefused:
    return ModelRefused(f"it cannot have room for more rows than there are: {why}")
