"""Rewriting rules of sequences and optionals, which exist while compiling only, as lists of tensors."""

from __future__ import annotations

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import (
    EmptyOptional,
    Item,
    Listing,
    NodeCall,
    NodeRefused,
    Value,
    normal_axis,
)

from .layout import join, pieces, with_axis, without_axes


@rule("SequenceConstruct")
def construct(b: Builder, c: NodeCall) -> Listing:
    """A list of the tensors."""
    return Listing(tuple(c.tensors()))


@rule("SequenceEmpty")
def empty(b: Builder, c: NodeCall) -> Listing:
    """An empty list of tensors."""
    return Listing(())


def _position(c: NodeCall, index: int, length: int, *, end: bool) -> int:
    return normal_axis(c.numbers(index, "position")[0], length, end=end)


@rule("SequenceAt")
def at(b: Builder, c: NodeCall) -> Value:
    """A tensor of a list."""
    items = c.listing().items
    return items[_position(c, 1, len(items), end=False)]


@rule("SequenceInsert")
def insert(b: Builder, c: NodeCall) -> Listing:
    """The list with one more tensor."""
    items = list(c.listing().items)
    items.insert(len(items) if c.opt(2) is None else _position(c, 2, len(items), end=True), c.x(1))
    return Listing(tuple(items))


@rule("SequenceErase")
def erase(b: Builder, c: NodeCall) -> Listing:
    """The list with one tensor less."""
    items = list(c.listing().items)
    del items[-1 if c.opt(1) is None else _position(c, 1, len(items), end=False)]
    return Listing(tuple(items))


@rule("SequenceLength")
def length(b: Builder, c: NodeCall) -> Value:
    """A constant, known while compiling."""
    return b.constant(np.array(len(c.listing().items), np.int64))


@rule("ConcatFromSequence")
def concat(b: Builder, c: NodeCall) -> Value:
    """Concatenation along an axis, existing or new."""
    items = list(c.listing().items)
    if not items:
        raise NodeRefused("it joins an empty sequence")
    new = bool(c.integer("new_axis"))
    axis = normal_axis(c.integer("axis"), items[0].rank + new)
    if new:
        items = [with_axis(b, v, axis) for v in items]
    return join(b, items, axis)


@rule("SplitToSequence")
def split(b: Builder, c: NodeCall) -> Listing:
    """Slices along an axis, of one size or of given sizes."""
    x = c.x()
    axis = normal_axis(c.integer("axis"), x.rank)
    extent, given = x.shape[axis], c.opt_const(1, "split")
    if given is None or given.ndim == 0:
        chunk = 1 if given is None else int(given)
        if chunk < 1:
            raise NodeRefused(f"it splits into parts of {chunk}")
        sizes = [min(chunk, extent - i) for i in range(0, extent, chunk)]
    else:
        sizes = [int(v) for v in given]
    if sum(sizes) != extent or min(sizes, default=0) < 0:
        raise NodeRefused(f"it splits {extent} elements into {sizes}")
    parts = pieces(b, x, axis, sizes)
    if given is None and not c.integer("keepdims", 1):
        parts = [without_axes(b, p, [axis]) for p in parts]
    return Listing(tuple(parts))


@rule("Optional")
def optional(b: Builder, c: NodeCall) -> Item:
    """The value, or an empty optional."""
    return c.inputs[0] if c.inputs and c.inputs[0] is not None else EmptyOptional()


@rule("OptionalHasElement")
def has_element(b: Builder, c: NodeCall) -> Value:
    """A constant that says whether there is a value."""
    there = bool(c.inputs) and c.inputs[0] is not None and not isinstance(c.inputs[0], EmptyOptional)
    return b.constant(np.array(there))


@rule("OptionalGetElement")
def get_element(b: Builder, c: NodeCall) -> Item:
    """The value of an optional that has one."""
    found = c.inputs[0] if c.inputs else None
    if found is None or isinstance(found, EmptyOptional):
        raise NodeRefused("it takes the element of an empty optional")
    return found
