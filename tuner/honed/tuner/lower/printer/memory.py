"""Loads and stores: whole vectors where they are aligned, `vloadN` where they may not be, lanes elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import ir, tirx

from . import types
from .addresses import Addresses, total
from .blocks import Blocks, LoadText
from .buffers import KernelBuffer
from .expressions import Expressions
from .terms import ADD, EQUAL, PRIMARY, UNARY, LinearForm, Term
from .types import Type, Unprintable


class KernelMemory:
    """The buffers of one kernel and the ways into them."""

    def __init__(self, blocks: Blocks, expressions: Expressions) -> None:
        self.blocks = blocks
        self.expressions = expressions
        self.addresses = Addresses(blocks)
        self.buffers: dict[Any, KernelBuffer] = {}

    def load(self, load: ir.TensorLoad) -> Term:
        """What a load reads; bools are read as bytes and compared with 0."""
        buffer = self._buffer(load.source)
        index = _only(load.indices)
        of = types.parsed(str(load.ty.dtype))
        stored = types.stored(of)
        text = self._read(buffer, index, stored)
        level = UNARY if text[0] == "*" else PRIMARY
        if buffer.space != "private":
            text = self.blocks.load(LoadText(text, stored, buffer.name))
        found = Term(text, stored, level, self.blocks.here, pure=False)
        if of.kind == "bool":
            return replace(found, text=f"{found.within(EQUAL + 1)} != 0", type=of, level=EQUAL)
        return self.expressions.convert(found, of) if of.kind == "mask" else found

    def store(self, store: tirx.BufferStore) -> None:
        """Write the statement that stores a value."""
        buffer = self._buffer(store.buffer)
        index = _only(store.indices)
        of = types.parsed(str(store.value.ty.dtype))
        stored = types.stored(of)
        self.expressions.stored = store
        value = self.expressions.full(store.value)
        self.expressions.stored = None
        if of.kind in ("bool", "mask"):
            value = self.expressions.convert(value, stored)
        self._write(buffer, index, stored, value)
        self.blocks.stored(buffer.name)

    def _buffer(self, key: Any) -> KernelBuffer:
        if key not in self.buffers:
            raise Unprintable(f"{key.name} is used where it is not declared")
        return self.buffers[key]

    # Reading

    def _read(self, buffer: KernelBuffer, index: Any, of: Type) -> str:
        base = self._contiguous(buffer, index, of)
        if base is None:
            lanes = self.expressions.lane_sums(index, of.lanes)
            single = types.vector(of, 1)
            return f"({types.name(of)})({', '.join(self._element(buffer, n, single) for n in lanes)})"
        if buffer.registers:
            return _gathered(_pieces(buffer, base.constant, of.lanes), of)
        if of.lanes == 1:
            return self._element(buffer, base, of)
        place = self._vector(buffer, base, of)
        return place if place is not None else f"vload{of.lanes}(0, {self._address(buffer, base)})"

    def _element(self, buffer: KernelBuffer, index: LinearForm, of: Type) -> str:
        """A scalar in memory."""
        if buffer.registers:
            return _gathered(_pieces(buffer, index.constant, 1), of)
        if buffer.space == "global":
            pointer, offset = self.addresses.pointer(buffer, index)
            return f"{pointer.text}[{offset}]"
        return f"{buffer.name}[{self._index(index)}]"

    # Writing

    def _write(self, buffer: KernelBuffer, index: Any, of: Type, value: Term) -> None:
        base = self._contiguous(buffer, index, of)
        if base is None or (buffer.registers and len(_pieces(buffer, base.constant, of.lanes)) > 1):
            self._scatter(buffer, index, of, value)
        elif buffer.registers:
            self.blocks.line(f"{_pieces(buffer, base.constant, of.lanes)[0][0]} = {value.text};")
        elif of.lanes == 1:
            self.blocks.line(f"{self._element(buffer, base, of)} = {value.text};")
        elif (place := self._vector(buffer, base, of)) is not None:
            self.blocks.line(f"{place} = {value.text};")
        else:
            self.blocks.line(f"vstore{of.lanes}({value.text}, 0, {self._address(buffer, base)});")

    def _scatter(self, buffer: KernelBuffer, index: Any, of: Type, value: Term) -> None:
        """Lanes stored one by one; all are computed before the first is stored."""
        name = self.blocks.names.fresh(f"{buffer.name}_lanes")
        self.blocks.line(f"const {types.name(of)} {name} = {value.text};")
        sums = self.expressions.lane_sums(index, of.lanes)
        for n, place in enumerate(sums):
            self.blocks.line(f"{self._element(buffer, place, types.vector(of, 1))} = {name}.s{n:x};")

    # Places

    def _contiguous(self, buffer: KernelBuffer, index: Any, of: Type) -> LinearForm | None:
        """Where an access begins, in scalars, if its lanes follow one another."""
        within = types.stored(buffer.element).lanes
        if types.parsed(str(index.ty.dtype)).lanes == 1:
            return self.expressions.linear(index).times(within)
        if isinstance(index, tirx.Ramp) and isinstance(index.stride, tirx.IntImm) and int(index.stride) == 1:
            return self.expressions.linear(index.base).times(within)
        if within > 1:
            raise Unprintable(f"the vectors of {buffer.name} are not read one after another")
        return None

    def _vector(self, buffer: KernelBuffer, base: LinearForm, of: Type) -> str | None:
        """An aligned vector as a place in memory; None where the alignment is not proven."""
        size = types.vector(of, 1).nbytes
        if of.lanes == 3 or size * of.lanes > buffer.aligned or base.multiple() % of.lanes:
            return None
        if buffer.space == "global":
            const = "" if buffer.written else "const "
            space = f"__global {const}"
        else:
            space = "__local " if buffer.space == "local" else ""
        return f"*({space}{types.name(of)}*)({self._address(buffer, base)})"

    def _address(self, buffer: KernelBuffer, base: LinearForm) -> str:
        """A pointer to a scalar, as text that another operator may follow in parentheses."""
        if buffer.space == "global":
            pointer, offset = self.addresses.pointer(buffer, base)
            return f"{pointer.text} {'+' if offset > 0 else '-'} {abs(offset)}" if offset else pointer.text
        return f"{buffer.name} + {self._index(base)}"

    def _index(self, index: LinearForm) -> str:
        """An index into an array of the kernel's own; the parts that loops do not change are named.

        Signed where a part may be negative: PoCL 3.1 crashes on some unsigned ones that wrap between.
        """
        if not index.terms:
            return str(index.constant)
        products = list(index.products())
        bounded = sum(max(-low, high) for low, high in products) < 1 << 31
        of = types.INT if bounded and any(low < 0 for low, _ in products) else types.UINT
        found: Term | None = None
        for home in sorted({term.home for term, _ in index.terms.values()}):
            parts = [part for part in index.terms.values() if part[0].home == home]
            text = total(parts, of)
            pure = all(term.pure for term, _ in parts)
            if found is not None:
                text, pure = f"{found.text} + {text}", pure and found.pure
            found = self.blocks.kept(Term(text, of, ADD, home, pure), "at", always=True)
        assert found is not None
        if not index.constant:
            return found.text
        if of == types.INT:
            return f"{found.text} {'-' if index.constant < 0 else '+'} {abs(index.constant)}"
        return f"{found.text} + {index.constant % (1 << 32)}u"


def _only(indices: Any) -> Any:
    if len(indices) != 1:
        raise Unprintable("an access has several indices after lowering")
    return indices[0]


def _pieces(buffer: KernelBuffer, base: int, lanes: int) -> list[tuple[str, int]]:
    """The registers that hold so many scalars from `base`, each as a place and how many of them it holds."""
    found: list[tuple[str, int]] = []
    at = base
    while at < base + lanes:
        register, first = divmod(at, buffer.width)
        count = min(buffer.width - first, base + lanes - at)
        while count not in types.LANES:
            count -= 1
        name = buffer.registers[register]
        swizzle = "".join(f"{first + n:x}" for n in range(count))
        found.append((name if count == buffer.width else f"{name}.s{swizzle}", count))
        at += count
    return found


def _gathered(pieces: list[tuple[str, int]], of: Type) -> str:
    if len(pieces) == 1:
        return pieces[0][0]
    return f"({types.name(of)})({', '.join(place for place, _ in pieces)})"
