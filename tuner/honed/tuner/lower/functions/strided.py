"""Values that are other values seen with strides: transposed, sliced, reshaped. NumPy knows how."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax, tirx

Shape = tuple[int, ...]
Lookup = Callable[[relax.Var], relax.Expr | None]
_Bytes = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class StridedIndex:
    """Of one dimension: `start`, plus or minus (`sign`) the index along `axis` of what is seen.

    `sign` 0: the same for all of it.
    """

    axis: int
    sign: int
    start: int


@dataclass(frozen=True, slots=True)
class StridedView:
    """What is seen of `source`, once that has the shape `dimensions`: an index for each of them."""

    source: relax.Expr
    dimensions: Shape
    indices: tuple[StridedIndex, ...]
    shape: Shape

    @property
    def moves(self) -> bool:
        """Whether it is more than the source with another shape."""
        axes = [index.axis for index in self.indices if index.sign]
        whole = math.prod(self.shape) == math.prod(self.dimensions)
        return not whole or axes != sorted(axes) or any(index.sign < 0 for index in self.indices)

    @property
    def contiguous_axis(self) -> int | None:
        """The axis along which neighbours are neighbours in memory; None where there is none."""
        last = self.indices[-1] if self.indices else None
        return last.axis if last is not None and last.sign == 1 else None

    def has_rows_along(self, axes: Container[int]) -> bool:
        """Whether rows along one of the axes are whole rows of the last dimension."""
        return self.contiguous_axis in axes and self.indices[-1].start == 0

    def at(self, indices: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """Where an element is in the source."""
        return [
            tirx.IntImm("int64", i.start)
            if not i.sign
            else i.start - indices[i.axis]
            if i.sign < 0
            else indices[i.axis] + i.start
            if i.start
            else indices[i.axis]
            for i in self.indices
        ]


def view(expr: relax.Expr, lookup: Lookup) -> StridedView | None:
    """An expression as a view of the value furthest behind it; None where it has no elements."""
    return next(views(expr, lookup), None)


def views(expr: relax.Expr, lookup: Lookup) -> Iterator[StridedView]:
    """An expression as views of the values behind it, the furthest first; none where it has no elements."""
    steps: list[tuple[relax.Call, Callable[[_Bytes, relax.Call], _Bytes | None]]] = []
    sources = [expr]
    while (call := _moving(sources[-1], lookup)) is not None:
        steps.append((call, _MOVES[call.op.name]))
        sources.append(call.args[0])
    while sources:
        memory: _Bytes = np.empty(extents(sources[-1]), np.int8)
        seen: _Bytes | None = memory
        for call, move in reversed(steps[: len(sources) - 1]):
            seen = move(seen, call) if seen is not None else None
        if seen is not None and not seen.size:
            return
        found = None if seen is None else _view(sources[-1], memory, seen)
        if found is not None:
            yield found
        sources.pop()


def whole(expr: relax.Expr) -> StridedView:
    """A value as it is."""
    shape = extents(expr)
    indices = [StridedIndex(axis, int(extent > 1), 0) for axis, extent in enumerate(shape)]
    return StridedView(expr, shape, tuple(indices), shape)


def extents(expr: relax.Expr) -> Shape:
    """The shape of a value, which is fixed."""
    return tuple(int(extent) for extent in expr.ty.shape)


def is_fixed(expr: relax.Expr) -> bool:
    """Whether a value is a tensor whose shape is known."""
    shape = getattr(expr.ty, "shape", None)
    return shape is not None and all(isinstance(extent, tirx.IntImm) for extent in shape)


def _moving(expr: relax.Expr, lookup: Lookup) -> relax.Call | None:
    """The call that makes an expression, where it only moves what it is given."""
    made = lookup(expr) if isinstance(expr, relax.Var) else expr
    if not isinstance(made, relax.Call) or getattr(made.op, "name", "") not in _MOVES:
        return None
    return made if is_fixed(made.args[0]) else None


def _transposed(seen: _Bytes, call: relax.Call) -> _Bytes:
    axes = call.attrs.axes
    return seen.transpose(None if axes is None else [int(axis) for axis in axes])


def _reshaped(seen: _Bytes, call: relax.Call) -> _Bytes | None:
    found = seen.view()
    try:
        found.shape = extents(call)
    except AttributeError:
        return None  # that takes a copy
    return found


def _sliced(seen: _Bytes, call: relax.Call) -> _Bytes:
    axes, begins, _, *strides = ([int(n.value) for n in one.fields] for one in call.args[1:])
    found, wanted = seen, extents(call)
    for place, (axis, begin) in enumerate(zip(axes, begins, strict=True)):
        step, have = strides[0][place] if strides else 1, seen.shape[axis]
        start = min(max(begin + have if begin < 0 else begin, 0), have - 1)
        end = start + step * wanted[axis]
        found = found[(slice(None),) * axis + (slice(start, end if end >= 0 else None, step),)]
    return found


def cut_at(call: relax.Call) -> int | None:
    """How many elements stand before a slice's; None where it has none, or they are no neighbours."""
    memory: _Bytes = np.empty(extents(call.args[0]), np.int8)
    seen = _sliced(memory, call)
    return _address(seen) - _address(memory) if seen.size and seen.flags.c_contiguous else None


_MOVES: Mapping[str, Callable[[_Bytes, relax.Call], _Bytes | None]] = {
    "relax.permute_dims": _transposed,
    "relax.reshape": _reshaped,
    "relax.strided_slice": _sliced,
}


def _view(source: relax.Expr, memory: _Bytes, seen: _Bytes) -> StridedView | None:
    """The dimensions that strides divide the source into, and the index along each.

    None where they do not divide it.
    """
    offset = _address(seen) - _address(memory)
    axes = [axis for axis, extent in enumerate(seen.shape) if extent > 1]
    found: list[tuple[int, StridedIndex]] = []
    left = memory.size
    for axis in sorted(axes, key=lambda axis: -abs(seen.strides[axis])):
        stride, extent = seen.strides[axis], seen.shape[axis]
        size, start = left // abs(stride), offset // abs(stride)
        first, last = sorted((start, start + (extent - 1 if stride > 0 else 1 - extent)))
        if left % abs(stride) or first < 0 or last >= size:
            return None
        left, offset = abs(stride), offset % abs(stride)
        if stride > 0 and start % extent == 0 and size % extent == 0:
            found += [
                (size // extent, StridedIndex(0, 0, start // extent)),
                (extent, StridedIndex(axis, 1, 0)),
            ]
        else:
            found.append((size, StridedIndex(axis, 1 if stride > 0 else -1, start)))
    found.append((left, StridedIndex(0, 0, offset)))
    kept = [(size, index) for size, index in found if size > 1]
    return StridedView(source, tuple(size for size, _ in kept), tuple(index for _, index in kept), seen.shape)


def _address(array: _Bytes) -> int:
    interface: dict[str, Any] = array.__array_interface__
    return int(interface["data"][0])
