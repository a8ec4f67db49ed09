"""TIR statements as C: loops, conditions, variables, arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tvm import ir, tirx

from . import types
from .blocks import Block, Blocks, Declaration
from .buffers import ArrayUses, KernelBuffer, register_width, space_of
from .calls import Calls
from .expressions import FALSE, TRUE, Expressions
from .memory import KernelMemory
from .terms import ADD, Term
from .types import Unprintable

_INDICES = {"blockIdx": "get_group_id", "threadIdx": "get_local_id"}


class Statements:
    """Writes the statements of one kernel."""

    def __init__(self, blocks: Blocks, expressions: Expressions, memory: KernelMemory, calls: Calls) -> None:
        self.blocks = blocks
        self.expressions = expressions
        self.memory = memory
        self.calls = calls
        self.uses: dict[Any, ArrayUses] = {}
        self.work_group = [1, 1, 1]  # work-items along x, y, z
        self._threads: dict[str, Term] = {}
        self._write: dict[type, Callable[[Any], None]] = {
            tirx.SeqStmt: self._sequence,
            tirx.AttrStmt: self._attribute,
            tirx.DeclBuffer: self._declared,
            tirx.AllocBuffer: self._allocated,
            tirx.Bind: self._bound,
            tirx.For: self._loop,
            tirx.While: self._while,
            tirx.IfThenElse: self._condition,
            tirx.BufferStore: self.memory.store,
            tirx.Evaluate: self._evaluated,
        }

    def write(self, statement: Any) -> None:
        """Write a statement and all in it."""
        writer = self._write.get(type(statement))
        if writer is None:
            raise Unprintable(f"OpenCL C has nothing for the statement {type(statement).__name__}")
        writer(statement)

    def _sequence(self, statement: tirx.SeqStmt) -> None:
        for part in statement.seq:
            self.write(part)

    def _attribute(self, statement: tirx.AttrStmt) -> None:
        if str(statement.attr_key) == "thread_extent":
            self._thread(statement.node, statement.value)
        self.write(statement.body)

    def _thread(self, axis: tirx.IterVar, extent: Any) -> None:
        """A work-item's place along an axis, a variable of the kernel."""
        tag = str(axis.thread_tag)
        if tag not in self._threads:
            kind, _, letter = tag.partition(".")
            if kind not in _INDICES or letter not in ("x", "y", "z"):
                raise Unprintable(f"OpenCL has no {tag}")
            name = self.blocks.names.fresh(str(axis.var.name))
            text = f"const int {name} = {_INDICES[kind]}({'xyz'.index(letter)});"
            self.blocks.open[0].lines.append(Declaration(name, text))
            high = int(extent) - 1 if isinstance(extent, tirx.IntImm) else None
            if kind == "threadIdx" and high is not None:
                self.work_group["xyz".index(letter)] = high + 1
            self._threads[tag] = Term(name, types.INT, low=0, high=high)
        self.expressions.variables[axis.var] = self._threads[tag]

    # Memory

    def _declared(self, statement: tirx.DeclBuffer) -> None:
        source = statement.data
        if isinstance(source, ir.Call) and str(source.op.name) == "tirx.buffer_data":
            source = source.args[0]
        known = self.memory.buffers.get(source)
        if known is None:
            raise Unprintable("a buffer lies in memory that is no argument")
        element = types.parsed(str(statement.buffer.dtype))
        if types.stored(types.vector(element, 1)) != types.stored(types.vector(known.element, 1)):
            raise Unprintable(f"{known.name} is read as {types.name(element)}")
        if known.registers and element != known.element:
            raise Unprintable(f"{known.name} is also read as {types.name(element)}")
        nbytes = _nbytes(statement.buffer)
        self.memory.buffers[statement.buffer] = replace(known, element=element, nbytes=nbytes)

    def _allocated(self, statement: tirx.AllocBuffer) -> None:
        buffer = statement.buffer
        element = types.parsed(str(buffer.dtype))
        elements = _elements(buffer)
        space = space_of(str(buffer.scope()))
        name = self.blocks.names.fresh(str(buffer.name))
        made = KernelBuffer(name, space, element, _nbytes(buffer))
        self.memory.buffers[buffer] = made
        uses = self.uses.get(buffer, ArrayUses())
        width = register_width(uses, element, elements) if space == "private" else None
        if width is not None:
            self._registers(made, elements * element.lanes, width)
        else:
            self._array(made, elements * element.lanes, uses)

    def _registers(self, buffer: KernelBuffer, scalars: int, width: int) -> None:
        count = -(-scalars // width)
        buffer.width = width
        fresh = self.blocks.names.fresh
        buffer.registers = (
            [buffer.name] if count == 1 else [fresh(f"{buffer.name}_{n}") for n in range(count)]
        )
        kind = types.name(types.vector(types.vector(types.stored(buffer.element), 1), width))
        for first in range(0, count, 8):
            self.blocks.line(f"{kind} {', '.join(buffer.registers[first : first + 8])};")

    def _array(self, buffer: KernelBuffer, scalars: int, uses: ArrayUses) -> None:
        """An array, of vectors where it is only read and written by whole ones."""
        element = types.stored(buffer.element)
        space = "__local " if buffer.space == "local" else ""
        single = types.name(types.vector(element, 1))
        at = 0 if buffer.space == "local" else self.blocks.here
        aligned = ""
        if uses.widest > 1:
            buffer.aligned = min(types.vector(element, 1).nbytes * _power(uses.widest), 128)
            aligned = f" __attribute__((aligned({buffer.aligned})))"
        self.blocks.open[at].lines.append(
            Declaration(buffer.name, f"{space}{single} {buffer.name}[{scalars}]{aligned};")
        )

    # Variables and control

    def _bound(self, statement: tirx.Bind) -> None:
        variable = statement.var
        term = self.expressions.full(statement.value)
        if term.pure and term.type.lanes == 1 and (term.type.integer or term.type.kind == "bool"):
            self.expressions.variables[variable] = term
            if term.type.integer:
                self.expressions.sums[variable] = self.expressions.linear(statement.value)
            return
        name = self.blocks.names.fresh(str(variable.name))
        self.blocks.open[-1].lines.append(
            Declaration(name, f"const {types.name(term.type)} {name} = {term.text};")
        )
        self.expressions.variables[variable] = Term(
            name, term.type, home=self.blocks.here, low=term.low, high=term.high
        )

    def _loop(self, statement: tirx.For) -> None:
        start = self.expressions.value(statement.min)
        extent = self.expressions.value(statement.extent)
        if extent.bounds == (1, 1) and start.low is not None and start.low == start.high:
            self.expressions.variables[statement.loop_var] = start
            self.write(statement.body)
            return
        zero = start.text.strip("uUL") == "0"
        stop = extent if zero else self.expressions.operate("+", ADD, start, extent)
        low, high = start.bounds[0], start.bounds[1] + extent.bounds[1] - 1
        of = types.INT if low >= -(1 << 31) and high < (1 << 31) - 1 else start.type
        step = int(statement.step) if statement.step is not None else 1
        name = self.blocks.names.fresh(str(statement.loop_var.name))
        first, last = (_plain(t, of) for t in (start, stop))
        up = f"++{name}" if step == 1 else f"{name} += {step}"
        header = f"for ({types.name(of)} {name} = {first}; {name} < {last}; {up})"
        counter = Term(name, of, home=self.blocks.here + 1, low=low, high=max(low, high))
        begin = Term("0", types.INT) if zero else start
        self.expressions.variables[statement.loop_var] = counter
        self.blocks.enter(Block(header, counter, True, step, begin))
        self.write(statement.body)
        self.blocks.leave()

    def _while(self, statement: tirx.While) -> None:
        self.blocks.enter(Block("while (1)", repeats=True))
        condition = self.expressions.value(statement.condition)
        self.blocks.line(f"if (!({condition.text})) {{ break; }}")
        self.write(statement.body)
        self.blocks.leave()

    def _condition(self, statement: tirx.IfThenElse) -> None:
        condition = self.expressions.value(statement.condition)
        if condition == TRUE:
            self.write(statement.then_case)
        elif condition == FALSE:
            if statement.else_case is not None:
                self.write(statement.else_case)
        else:
            self._block(f"if ({condition.text})", statement.then_case)
            if statement.else_case is not None:
                self._block("else", statement.else_case)

    def _block(self, header: str, body: Any) -> None:
        self.blocks.enter(Block(header))
        self.write(body)
        self.blocks.leave()

    def _evaluated(self, statement: tirx.Evaluate) -> None:
        if isinstance(statement.value, tirx.IntImm):
            return
        if not isinstance(statement.value, ir.Call):
            raise Unprintable("a value is computed for nothing")
        self.calls.statement(statement.value)


def _plain(term: Term, of: types.Type) -> str:
    """An integer as text, in the type of a loop's counter."""
    if term.type == of:
        return term.text
    if term.low is not None and term.low == term.high:
        return str(term.low)
    return f"({types.name(of)})({term.text})"


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _elements(buffer: Any) -> int:
    count = 1
    for extent in buffer.shape:
        if not isinstance(extent, tirx.IntImm):
            raise Unprintable(f"{buffer.name} has a size known only when the kernel runs")
        count *= int(extent)
    return count


def _nbytes(buffer: Any) -> int:
    return _elements(buffer) * types.parsed(str(buffer.dtype)).nbytes
