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

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from honed.onnxfile.reading import nodes
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
        now, more = (_infer(model, shapes, room, rows) for rows in (0, 1))
        self._now = {name: value.shape for name, value in now.items()}
        self._more = {name: value.shape for name, value in more.items()}
        self._dtypes = {name: value.dtype for name, value in now.items()}
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
            name = node.input[0]
            if name not in self._now or name not in self._more:
                return None
            shapes = self._now[name], self._more[name]
            values = {name: _RoomEffect(*(np.broadcast_to(np.int8(0), shape) for shape in shapes))}
        else:
            read = set(filter(None, node.input))
            values = {name: value for name in read if (value := self._value(name)) is not None}
            # A value of constants alone does not depend on the state.
            if len(values) != len(read) or read.isdisjoint(self._known) or node.domain:
                return None
        opsets = [helper.make_opsetid("", self._opset)]
        room = graphs.evaluate_node(node, {name: value.room for name, value in values.items()}, opsets)
        more = graphs.evaluate_node(node, {name: value.more for name, value in values.items()}, opsets)
        if room is None or more is None or np.size(room) > _SMALL:
            return None
        return _RoomEffect(np.asarray(room), np.asarray(more))

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
        if found := self._by_positions(node):
            self._nodes.append(helper.make_node("Identity", [found], [node.output[0]]))
            return
        node.input[:] = self._with_numbers(node)
        inside = islice(nodes([node]), 1, None)
        if any(name in self._numbers for inner in inside for name in inner.input):
            raise _refusal(f"a graph within node {graphs.label(node)!r} reads the length of its state")
        self._nodes.append(node)

    def _with_numbers(self, node: onnx.NodeProto) -> list[str]:
        """Return the inputs of a node, each a number of valid rows where it reads a size as a number."""
        return [
            self._index(node, at, self._numbers[name])
            if name in self._numbers and not self._is_size(node, at)
            else name
            for at, name in enumerate(node.input)
        ]

    def _by_positions(self, node: onnx.NodeProto) -> str:
        """Return the output of a Slice or Trilu by positions, written from positions; "" for other nodes."""
        if node.op_type == "Slice":
            return self._slice(node)
        if node.op_type == "Trilu" and len(node.input) > 1 and node.input[1] in self._numbers:
            return self._triangle(node)
        return ""

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
        elif found := self._by_positions(node):
            self._numbers[name] = found
        else:
            inputs = self._with_numbers(node)
            if inputs != list(node.input):
                again = onnx.NodeProto()
                again.CopyFrom(node)
                again.input[:] = inputs
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

    def _slice(self, node: onnx.NodeProto) -> str:
        """Write a Slice of a table by positions, such as those of a causal mask; "" for any other Slice."""
        if len(node.input) < 3 or not any(name in self._numbers for name in node.input[1:3]):
            return ""
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
            return ""  # Rows of the state itself
        if np.any(steps != 1):
            raise _refusal(f"node {graphs.label(node)!r} cuts by the length of its state in steps")
        found: str = self._numbers.get(node.input[0], node.input[0])
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
        return found

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

    def _triangle(self, node: onnx.NodeProto) -> str:
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
        known = self._known.get(data)
        zero = self._constant(0, known.room.dtype) if known is not None else self._op("Sub", data, data)
        return self._op("Where", out, zero, self._numbers.get(data, data))

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
        node.input[0] = self._op("Where", seen, scores, self._hidden(scores))
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
        shape = self._now.get(mask)
        if not shape or shape[-1] != columns:
            raise _refusal(f"node {graphs.label(node)!r} has a mask of its own beside the state's rows")
        if self._dtypes[mask] == "bool":
            return self._op("And", mask, there)
        return self._op("Where", there, mask, self._hidden(mask))

    def _hidden(self, scores: str) -> str:
        """Return what stands in the place of scores that no token is to see, in their type."""
        dtype = np.dtype(self._dtypes[scores])
        least = np.finfo(np.float16).min if dtype == np.float16 else _HIDDEN
        return self._op("Cast", self._constant(least, np.float32), to=helper.np_dtype_to_tensor_dtype(dtype))

    def _there(self, new: int) -> str:
        """Return which columns are valid, 1 or 0: those of rows in the room, and all those of new tokens."""
        return self._op("Concat", self._mask, self._constant(np.ones(new)), axis=0)


def _infer(model: onnx.ModelProto, shapes: Shapes, room: int, more: int) -> dict[str, graphs.TypedValue]:
    """Return types and shapes of values where the state has room for `room + more` rows."""
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
    return graphs.infer(graphs.bind_shapes(skeleton, given))


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


def _refusal(why: str) -> ModelRefused:
    return ModelRefused(f"it cannot have room for more rows than there are: {why}")
