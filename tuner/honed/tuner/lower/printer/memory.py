"""Manages the memory of a kernel: its buffers, the pointers into them, loads and stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tvm import ir, tirx

from honed.tuner.lower.statements import memory_by_buffer, nodes

from . import terms
from .blocks import Blocks, LoadText
from .expressions import Expressions
from .terms import ADD, EQUAL, PRIMARY, UNARY, LinearForm, Term, Type, Unprintable

Space = Literal["global", "local", "private"]
_SPACES: dict[str, Space] = {"global": "global", "shared": "local", "local": "private"}
# Alignment in bytes of every buffer that a plan, a measurement or a driver gives a kernel: `plan` places
# scratch so, and OpenCL's own allocations are aligned to its largest type, which is larger (OpenCL 3.0,
# 5.2.1).
ALIGNED = 64
_MOST_REGISTERS = 256  # Scalars of one array
_HALF = 16  # Bits


@dataclass(slots=True)
class KernelBuffer:
    """Memory of a kernel; TIR indexes it by `element`, perhaps a vector."""

    name: str
    space: Space
    element: Type
    nbytes: int
    written: bool = True
    aligned: int = ALIGNED  # Bytes
    registers: list[str] = field(default_factory=list)  # The variables that an array in registers became
    width: int = 1  # Scalars in each of them
    paired: bool = False  # The registers are words that hold two halves each

    @property
    def vector(self) -> Type:
        """The type of one variable in registers."""
        return terms.vector(terms.vector(terms.type_in_memory(self.element), 1), self.width)

    @property
    def words(self) -> Type:
        """The type in which variables that hold pairs of halves are declared."""
        return Type("uint", 32, self.width // 2)


@dataclass(slots=True)
class ArrayUses:
    """The ways in which a private array is indexed."""

    constant: bool = True
    lanes: set[int] = field(default_factory=set)
    widest: int = 1  # Scalars read or written at once
    written: set[int] = field(default_factory=set)  # Scalars stored at once; 0: not from a multiple of them
    waits: bool = False  # Halves only: a loop that uses it has inner loops, and none of them uses it


def private_uses(body: tirx.Stmt) -> dict[Any, ArrayUses]:
    """Return how the arrays of a kernel are indexed, by buffer, including other names of their memory."""
    found: dict[Any, ArrayUses] = {}
    memory_of = memory_by_buffer(body)
    for one in nodes(body, (ir.TensorLoad, tirx.BufferStore)):
        buffer = _buffer_of(one)
        uses = found.setdefault(memory_of.get(buffer, buffer), ArrayUses())
        _note(uses, one.indices[0])
        lanes = terms.type_of(one.indices[0]).lanes * terms.parse_type(str(buffer.dtype)).lanes
        uses.widest = max(uses.widest, lanes)
        if isinstance(one, tirx.BufferStore):
            uses.written.add(lanes if _is_aligned(one.indices[0]) else 0)
    halves = any(
        terms.parse_type(str(one.buffer.dtype)).bits == _HALF for one in nodes(body, tirx.AllocBuffer)
    )
    used = {loop: _buffers_used(loop, memory_of) for loop in nodes(body, tirx.For)} if halves else {}
    for loop, all_ in used.items():
        inner = [used[one] for one in nodes(loop.body, tirx.For)]
        for memory in all_.difference(*inner) if inner else ():
            found[memory].waits = True
    return found


def _buffers_used(body: tirx.Stmt, memory_of: Mapping[Any, Any]) -> set[Any]:
    used = (_buffer_of(one) for one in nodes(body, (ir.TensorLoad, tirx.BufferStore)))
    return {memory_of.get(buffer, buffer) for buffer in used}


def _buffer_of(one: ir.TensorLoad | tirx.BufferStore) -> Any:
    return one.source if isinstance(one, ir.TensorLoad) else one.buffer


def _is_aligned(index: Any) -> bool:
    """Return whether an index is of one element, or of as many as a vector has from a multiple of them."""
    if not isinstance(index, tirx.Ramp):
        return True
    return isinstance(index.base, tirx.IntImm) and int(index.base) % int(index.lanes) == 0


def is_held_in_pairs(uses: ArrayUses, element: Type, width: int) -> bool:
    """Return whether an array's variables are words of two halves each: sums that wait for those of a block.

    Mesa before 26.1 gives each half that a loop carries a register of its own. As words the sums of a tile of
    4 x 8 take 16, so that those of the block fit beside them.
    """
    vectors = element.kind == "float" and element.bits == _HALF and width % 2 == 0
    return vectors and uses.waits and uses.written == {width}


def _note(uses: ArrayUses, index: Any) -> None:
    if isinstance(index, tirx.IntImm):
        uses.lanes.add(1)
    elif isinstance(index, tirx.Ramp) and isinstance(index.stride, tirx.IntImm):
        uses.constant &= isinstance(index.base, tirx.IntImm)
        if int(index.stride) != 1:
            uses.lanes.add(1)  # Single lanes are read one by one
            return
        uses.lanes.add(int(index.lanes))
    else:
        uses.constant = False
        uses.lanes.add(1)


def register_width(uses: ArrayUses, element: Type, elements: int) -> int | None:
    """Return how many scalars each variable of an array holds; None if it must stay an array.

    An array with variables is held in registers.
    """
    if not uses.constant or elements * element.lanes > _MOST_REGISTERS:
        return None
    widest = max(uses.lanes, default=1)
    if element.lanes > 1:
        return element.lanes if widest == 1 else None
    return widest if widest in terms.LANES and widest != 3 else 1


def space_of(scope: str) -> Space:
    """Return the address space of a storage scope; raise Unprintable for an unknown one."""
    if scope not in _SPACES:
        raise Unprintable(f"OpenCL C has no memory of scope {scope!r}")
    return _SPACES[scope]


Part = tuple[Term, int]  # A term and its factor, in bytes


def _pointee_type(buffer: KernelBuffer) -> str:
    """Return the C type that pointers into the buffer point at."""
    element = terms.type_in_memory(buffer.element)
    scalar = terms.name(terms.vector(element, 1))
    return scalar if buffer.written else f"const {scalar}"


def total(parts: list[Part], of: Type, constant: int = 0) -> str:
    """Return a sum of multiples in its own type; unsigned ones wrap, as all terms of an offset may."""
    suffix = {terms.UINT: "u", terms.ULONG: "UL"}.get(of, "")
    texts = [f"{constant % (1 << of.bits)}{suffix}"] if constant else []
    for term, factor in sorted(parts, key=lambda part: part[1] < 0):
        sign = " - " if factor < 0 else " + "
        cast = f"({terms.name(of)})" if _needs_cast(term, factor, of) else ""
        operand = cast + (
            term.within(PRIMARY) if cast else term.text if term.level >= UNARY else f"({term.text})"
        )
        times = "" if abs(factor) == 1 else f"{abs(factor)}{suffix} * "
        texts.append((sign if texts else ("0" + suffix + sign if factor < 0 else "")) + times + operand)
    return "".join(texts)


def _needs_cast(term: Term, factor: int, of: Type) -> bool:
    """Return whether C would compute the product in another type."""
    if term.type.bits > of.bits or (of == terms.INT and term.type == terms.UINT):
        return True
    if of == terms.ULONG:
        return abs(factor) == 1 and term.type.bits < 64
    return of == terms.UINT and abs(factor) == 1 and term.type != terms.UINT


class KernelMemory:
    """The buffers of one kernel and their accesses."""

    def __init__(self, blocks: Blocks, expressions: Expressions) -> None:
        self.blocks = blocks
        self.expressions = expressions
        self.buffers: dict[Any, KernelBuffer] = {}

    def load(self, load: ir.TensorLoad) -> Term:
        """Return the value of a load; bools are read as bytes and compared with 0."""
        buffer = self.buffers[load.source]
        index = load.indices[0]
        of = terms.type_of(load)
        stored = terms.type_in_memory(of)
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
        buffer = self.buffers[store.buffer]
        index = store.indices[0]
        of = terms.type_of(store.value)
        stored = terms.type_in_memory(of)
        self.expressions.stored = store
        value = self.expressions.full(store.value)
        self.expressions.stored = None
        if of.kind in ("bool", "mask"):
            if buffer.element.integer:  # TVM has vectors of bools in arrays of signed bytes
                stored = replace(stored, kind=buffer.element.kind)
            value = self.expressions.convert(value, stored)
        self._write(buffer, index, stored, value)
        self.blocks.record_store(buffer.name)

    # Reading

    def _read(self, buffer: KernelBuffer, index: Any, of: Type) -> str:
        base = self._contiguous(buffer, index, of)
        if base is None:
            lanes = self.expressions.lane_sums(index, of.lanes)
            single = terms.vector(of, 1)
            return f"({terms.name(of)})({', '.join(self._element(buffer, n, single) for n in lanes)})"
        if buffer.registers:
            return _gather(_pieces(buffer, base.constant, of.lanes), of)
        if of.lanes == 1:
            return self._element(buffer, base, of)
        place = self._vector(buffer, base, of)
        return place if place is not None else f"vload{of.lanes}(0, {self._address(buffer, base)})"

    def _element(self, buffer: KernelBuffer, index: LinearForm, of: Type) -> str:
        """Return a scalar in memory."""
        if buffer.registers:
            return _gather(_pieces(buffer, index.constant, 1), of)
        if buffer.space == "global":
            pointer, offset = self._pointer(buffer, index)
            return f"{pointer.text}[{offset}]"
        return f"{buffer.name}[{self._index(index)}]"

    # Writing

    def _write(self, buffer: KernelBuffer, index: Any, of: Type, value: Term) -> None:
        base = self._contiguous(buffer, index, of)
        if base is None or (buffer.registers and len(_pieces(buffer, base.constant, of.lanes)) > 1):
            self._scatter(buffer, index, of, value)
        elif buffer.registers:
            name, text = buffer.registers[base.constant // buffer.width], value.text
            if buffer.paired:
                self.blocks.line(f"{name} = as_{terms.name(buffer.words)}({text});")
            else:
                self.blocks.line(f"{_pieces(buffer, base.constant, of.lanes)[0][0]} = {text};")
        elif of.lanes == 1:
            self.blocks.line(f"{self._element(buffer, base, of)} = {value.text};")
        elif (place := self._vector(buffer, base, of)) is not None:
            self.blocks.line(f"{place} = {value.text};")
        else:
            self.blocks.line(f"vstore{of.lanes}({value.text}, 0, {self._address(buffer, base)});")

    def _scatter(self, buffer: KernelBuffer, index: Any, of: Type, value: Term) -> None:
        """Store lanes one by one; all are computed before the first is stored."""
        name = self.blocks.names.fresh(f"{buffer.name}_lanes")
        self.blocks.line(f"const {terms.name(of)} {name} = {value.text};")
        for n, place in enumerate(self.expressions.lane_sums(index, of.lanes)):
            self.blocks.line(f"{self._element(buffer, place, terms.vector(of, 1))} = {name}.s{n:x};")

    # Places

    def _contiguous(self, buffer: KernelBuffer, index: Any, of: Type) -> LinearForm | None:
        """Return where an access begins, in scalars, if its lanes follow one another; else None."""
        within = terms.type_in_memory(buffer.element).lanes
        if terms.type_of(index).lanes == 1:
            return self.expressions.linear(index).times(within)
        if isinstance(index, tirx.Ramp) and isinstance(index.stride, tirx.IntImm) and int(index.stride) == 1:
            return self.expressions.linear(index.base).times(within)
        if within > 1:
            raise Unprintable(f"the vectors of {buffer.name} are not read one after another")
        return None

    def _vector(self, buffer: KernelBuffer, base: LinearForm, of: Type) -> str | None:
        """Return an aligned vector as a place in memory, or None where the alignment is not proven."""
        size = terms.vector(of, 1).nbytes
        if of.lanes == 3 or size * of.lanes > buffer.aligned or base.multiple() % of.lanes:
            return None
        if buffer.space == "global":
            const = "" if buffer.written else "const "
            space = f"__global {const}"
        else:
            space = "__local " if buffer.space == "local" else ""
        return f"*({space}{terms.name(of)}*)({self._address(buffer, base)})"

    def _address(self, buffer: KernelBuffer, base: LinearForm) -> str:
        """Return a pointer to a scalar, as text that another operator may follow in parentheses."""
        if buffer.space == "global":
            pointer, offset = self._pointer(buffer, base)
            step = self.blocks.step(offset * terms.type_in_memory(buffer.element).bits // 8)
            if step is not None:
                return f"AT({_pointee_type(buffer)}, {pointer.text}, {step})"
            return f"{pointer.text} {'+' if offset > 0 else '-'} {abs(offset)}" if offset else pointer.text
        return f"{buffer.name} + {self._index(base)}"

    # Addresses: the buffer's base, plus terms of the index in the order in which they become known, plus a
    # constant. Each prefix is a pointer of its own that other accesses share: 32-bit unsigned byte offsets
    # are added to it, and a term that counts a loop becomes a pointer that the loop moves.

    def _pointer(self, buffer: KernelBuffer, index: LinearForm) -> tuple[Term, int]:
        """Return a pointer, and the number of scalars from it to the indexed element."""
        size = terms.type_in_memory(buffer.element).bits // 8
        parts = sorted(((term, n * size) for term, n in index.terms.values()), key=lambda part: part[0].home)
        if buffer.nbytes >= 1 << 31:
            return self._chain(buffer, parts, terms.ULONG), index.constant
        products = list(index.times(size).products())
        if all(low >= 0 for low, _ in products) and sum(high for _, high in products) < 1 << 32:
            return self._chain(buffer, parts, terms.UINT), index.constant
        if sum(max(-low, high) for low, high in products) < 1 << 31:
            return self._chain(buffer, parts, terms.INT), index.constant
        # The sum alone is known to lie in the buffer, and that modulo 2^32.
        text = total(parts, terms.UINT, index.constant * size)
        whole = Term(text, terms.UINT, ADD, max(t.home for t, _ in parts), all(t.pure for t, _ in parts))
        return self._offset(buffer, Term(buffer.name, buffer.element), whole), 0

    def _chain(self, buffer: KernelBuffer, parts: list[Part], of: Type, within: int | None = None) -> Term:
        """Return the base plus some of the terms, for use in block `within` (else in the innermost)."""
        if not parts:
            return Term(buffer.name, buffer.element)
        home = parts[-1][0].home
        inner = [part for part in parts if part[0].home == home]
        outer = parts[: len(parts) - len(inner)]
        block = self.blocks.open[home]
        counted = next((p for p in inner if block.loop is not None and p[0].text == block.loop.text), None)
        if counted is not None:
            rest = [part for part in inner if part is not counted]
            moved = self._moving_pointer(buffer, outer, counted, home, of)
            if moved is not None:
                return self._offset(buffer, moved, self._sum(rest, of, home), within) if rest else moved
        base = self._chain(buffer, outer, of, within)
        return self._offset(buffer, base, self._sum(inner, of, home), within)

    def _sum(self, parts: list[Part], of: Type, home: int) -> Term:
        term = Term(total(parts, of), of, ADD, home, all(t.pure for t, _ in parts))
        return self.blocks.name_value(term, "at", always=True)

    def _offset(self, buffer: KernelBuffer, base: Term, offset: Term, within: int | None = None) -> Term:
        """Return a pointer some bytes further, declared where its offset is known."""
        kind = _pointee_type(buffer)
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
        elif at < self.blocks.here and not self.blocks.room(at + 1):
            # Pointers that begin here need not be declared further outside.
            at = home = self.blocks.here
            pointer = Term(text, buffer.element, PRIMARY, home)
        loop = self.blocks.open[home].loop
        wanted = f"{buffer.name}_{loop.text if loop is not None else 'at'}"
        return self.blocks.declare(text, pointer, f"__global {kind}*", wanted, at, address=True)

    def _moving_pointer(
        self, buffer: KernelBuffer, outer: list[Part], counted: Part, home: int, of: Type
    ) -> Term | None:
        """Return a pointer that starts before the loop and moves with it; None where there is no room."""
        block = self.blocks.open[home]
        term, factor = counted
        key = f"{buffer.name} moved {factor}: {total(outer, of) if outer else ''}"
        if (found := block.names.get(key)) is not None:
            return found
        if not self.blocks.room(home):
            return None
        assert block.start is not None
        outside = home - 1
        if self._goes_on(outer, factor, home):
            outer, outside = outer[:-1], home - 2
        start = self._chain(buffer, outer, of, outside)
        size = terms.type_in_memory(buffer.element).bits // 8
        name = self.blocks.names.fresh(f"{buffer.name}_{term.text}")
        first = "" if block.start.text == "0" else f" + {factor // size} * {block.start.within(PRIMARY)}"
        kind = _pointee_type(buffer)
        self.blocks.open[outside].lines.append(f"__global {kind}* {name} = {start.text}{first};")
        step = self.blocks.step(factor * block.step)
        if step is not None:
            block.last.append(f"{name} = AT({kind}, {name}, {step});")
        else:
            block.last.append(f"{name} {'+' if factor > 0 else '-'}= {abs(factor) // size * block.step};")
        block.names[key] = Term(name, buffer.element, PRIMARY, home)
        return block.names[key]

    def _goes_on(self, outer: list[Part], factor: int, home: int) -> bool:
        """Return whether each run of a loop begins where the last one ended: the loop around it counts runs.

        Then one pointer serves both loops.
        """
        block, around = self.blocks.open[home], self.blocks.open[home - 1]
        beside = [part for part in outer if part[0].home == home - 1]
        if len(beside) != 1 or around.loop is None or around.turns is None or block.turns is None:
            return False
        ((counter, step),) = beside
        return counter.text == around.loop.text and step == factor * block.turns

    def _index(self, index: LinearForm) -> str:
        """Return an index into one of the kernel's own arrays; terms that loops do not change are named.

        The index is signed where a term may be negative: PoCL 3.1 crashes on some unsigned ones that wrap in
        between.
        """
        if not index.terms:
            return str(index.constant)
        products = list(index.products())
        bounded = sum(max(-low, high) for low, high in products) < 1 << 31
        of = terms.INT if bounded and any(low < 0 for low, _ in products) else terms.UINT
        found: Term | None = None
        for home in sorted({term.home for term, _ in index.terms.values()}):
            parts = [part for part in index.terms.values() if part[0].home == home]
            text = total(parts, of)
            pure = all(term.pure for term, _ in parts)
            if found is not None:
                text, pure = f"{found.text} + {text}", pure and found.pure
            found = self.blocks.name_value(Term(text, of, ADD, home, pure), "at", always=True)
        assert found is not None
        if not index.constant:
            return found.text
        if of == terms.INT:
            return f"{found.text} {'-' if index.constant < 0 else '+'} {abs(index.constant)}"
        return f"{found.text} + {index.constant % (1 << 32)}u"


def _pieces(buffer: KernelBuffer, base: int, lanes: int) -> list[tuple[str, int]]:
    """Return the registers that hold `lanes` scalars from `base`, each with how many of them it holds."""
    found: list[tuple[str, int]] = []
    at = base
    while at < base + lanes:
        register, first = divmod(at, buffer.width)
        count = min(buffer.width - first, base + lanes - at)
        while count not in terms.LANES:
            count -= 1
        name = buffer.registers[register]
        if buffer.paired:
            name = f"as_{terms.name(buffer.vector)}({name})"
        swizzle = "".join(f"{first + n:x}" for n in range(count))
        found.append((name if count == buffer.width else f"{name}.s{swizzle}", count))
        at += count
    return found


def _gather(pieces: list[tuple[str, int]], of: Type) -> str:
    if len(pieces) == 1:
        return pieces[0][0]
    return f"({terms.name(of)})({', '.join(place for place, _ in pieces)})"
