"""Pointers into global memory: computed once, outside of loops, and moved with the loop they depend on.

An address is the buffer's base, plus terms of the index in the order in which they become known, plus a
constant. Each prefix is a pointer of its own that other accesses share: 32-bit unsigned byte offsets are
added to it, and a term that counts a loop becomes a pointer that the loop moves.
"""

from __future__ import annotations

from . import types
from .blocks import Block, Blocks
from .buffers import KernelBuffer
from .terms import ADD, PRIMARY, UNARY, LinearForm, Term
from .types import Type

Part = tuple[Term, int]  # a term and its factor, in bytes


class Addresses:
    """The pointers of one kernel."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def pointer(self, buffer: KernelBuffer, index: LinearForm) -> tuple[Term, int]:
        """A pointer and the elements from it to the one indexed (counted in scalars)."""
        size = types.stored(buffer.element).bits // 8
        parts = sorted(((term, n * size) for term, n in index.terms.values()), key=lambda part: part[0].home)
        if buffer.wide:
            return self._chain(buffer, parts, types.ULONG), index.constant
        products = list(index.times(size).products())
        if all(low >= 0 for low, _ in products) and sum(high for _, high in products) < 1 << 32:
            return self._chain(buffer, parts, types.UINT), index.constant
        if sum(max(-low, high) for low, high in products) < 1 << 31:
            return self._chain(buffer, parts, types.INT), index.constant
        # Only the whole is known to lie in the buffer, and only modulo 2^32.
        text = total(parts, types.UINT, index.constant * size)
        whole = Term(text, types.UINT, ADD, max(t.home for t, _ in parts), all(t.pure for t, _ in parts))
        return self._offset(buffer, Term(buffer.name, buffer.element), whole), 0

    def _chain(self, buffer: KernelBuffer, parts: list[Part], of: Type, within: int | None = None) -> Term:
        """The base plus some of the terms, for use in block `within` (else in the innermost)."""
        if not parts:
            return Term(buffer.name, buffer.element)
        home = parts[-1][0].home
        inner = [part for part in parts if part[0].home == home]
        outer = parts[: len(parts) - len(inner)]
        block = self.blocks.open[home]
        counted = next((p for p in inner if block.loop is not None and p[0].text == block.loop.text), None)
        if counted is not None:
            rest = [part for part in inner if part is not counted]
            moved = self._moved(buffer, outer, counted, home, of)
            if moved is not None:
                return self._offset(buffer, moved, self._summed(rest, of, home), within) if rest else moved
        base = self._chain(buffer, outer, of, within)
        return self._offset(buffer, base, self._summed(inner, of, home), within)

    def _summed(self, parts: list[Part], of: Type, home: int) -> Term:
        term = Term(total(parts, of), of, ADD, home, all(t.pure for t, _ in parts))
        return self.blocks.kept(term, "at", always=True)

    def _offset(self, buffer: KernelBuffer, base: Term, offset: Term, within: int | None = None) -> Term:
        """A pointer some bytes further, declared where its offset is known."""
        kind = _pointed(buffer)
        text = f"AT({kind}, {base.text}, {offset.text})"
        home = max(base.home, offset.home)
        pointer = Term(text, buffer.element, PRIMARY, home, offset.pure and base.pure)
        if not pointer.pure:
            return pointer
        if (found := self.blocks.find(text)) is not None:
            return found
        at = self.blocks.landing(home)
        if within is not None:
            at = min(at, within)
        elif self.blocks.leaves_loop(home) and not self.blocks.room(at + 1):
            # Pointers that begin here belong no further outside than this one.
            at = home = self.blocks.here
            pointer = Term(text, buffer.element, PRIMARY, home)
        return self.blocks.declare(text, pointer, f"__global {kind}*", self._name(buffer, home), at)

    def _moved(
        self, buffer: KernelBuffer, outer: list[Part], counted: Part, home: int, of: Type
    ) -> Term | None:
        """A pointer that starts before the loop and moves with it, while there is room for one more."""
        block = self.blocks.open[home]
        term, factor = counted
        key = f"{buffer.name} moved {factor}: {total(outer, of) if outer else ''}"
        if (found := block.known.get(key)) is not None:
            return found
        if not self.blocks.room(home):
            return None
        assert block.start is not None
        start = self._chain(buffer, outer, of, home - 1)
        size = types.stored(buffer.element).bits // 8
        name = self.blocks.names.fresh(f"{buffer.name}_{term.text}")
        first = _first(block, factor // size)
        kind = _pointed(buffer)
        self.blocks.open[home - 1].lines.append(f"__global {kind}* {name} = {start.text}{first};")
        block.last.append(f"{name} {'+' if factor > 0 else '-'}= {abs(factor) // size * block.step};")
        block.known[key] = Term(name, buffer.element, PRIMARY, home)
        return block.known[key]

    def _name(self, buffer: KernelBuffer, home: int) -> str:
        loop = self.blocks.open[home].loop
        return f"{buffer.name}_{loop.text if loop is not None else 'at'}"


def _first(block: Block, factor: int) -> str:
    """What the loop's first value adds to a pointer."""
    assert block.start is not None
    if block.start.text == "0":
        return ""
    return f" + {factor} * {block.start.within(PRIMARY)}"


def _pointed(buffer: KernelBuffer) -> str:
    """What pointers into the buffer point at."""
    element = types.stored(buffer.element)
    scalar = types.name(types.vector(element, 1))
    return scalar if buffer.written else f"const {scalar}"


def total(parts: list[Part], of: Type, constant: int = 0) -> str:
    """A sum of multiples in a type of its own; unsigned ones wrap, as all parts of an offset may."""
    suffix = {types.UINT: "u", types.ULONG: "UL"}.get(of, "")
    texts = [f"{constant % (1 << of.bits)}{suffix}"] if constant else []
    for term, factor in sorted(parts, key=lambda part: part[1] < 0):
        sign = " - " if factor < 0 else " + "
        cast = f"({types.name(of)})" if _needs_cast(term, factor, of) else ""
        operand = cast + (
            term.within(PRIMARY) if cast else term.text if term.level >= UNARY else f"({term.text})"
        )
        times = "" if abs(factor) == 1 else f"{abs(factor)}{suffix} * "
        texts.append((sign if texts else ("0" + suffix + sign if factor < 0 else "")) + times + operand)
    return "".join(texts)


def _needs_cast(term: Term, factor: int, of: Type) -> bool:
    """Whether C would compute the product in another type."""
    if term.type.bits > of.bits or (of == types.INT and term.type == types.UINT):
        return True
    if of == types.ULONG:
        return abs(factor) == 1 and term.type.bits < 64
    return of == types.UINT and abs(factor) == 1 and term.type != types.UINT
