"""A kernel: its calls and statements, its signature, and what a source needs before its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tvm import ir, tirx
from tvm_ffi import structural_walk

from . import expressions, types
from .blocks import Block, Blocks, Declaration, Names
from .expressions import FALSE, TRUE, Expressions
from .memory import ArrayUses, KernelBuffer, KernelMemory, private_uses, register_width, space_of
from .terms import ADD, BIT_AND, BIT_OR, BIT_XOR, EQUAL, OR, PRIMARY, SHIFT, TERNARY, Term, bounded, number
from .types import Type, Unprintable

# ---- Calls in TIR: functions of OpenCL C, and TVM's builtins that are left after its passes ----

_OPERATORS = {
    "bitwise_and": ("&", BIT_AND), "bitwise_or": ("|", BIT_OR), "bitwise_xor": ("^", BIT_XOR),
    "shift_left": ("<<", SHIFT), "shift_right": (">>", SHIFT),
}  # fmt: skip
_RENAMED = {"nearbyint": "rint"}


class Calls:
    """Prints the calls of one kernel."""

    def __init__(self, blocks: Blocks, expressions: Expressions, memory: KernelMemory) -> None:
        self.blocks = blocks
        self.expressions = expressions
        self.memory = memory

    def term(self, call: ir.Call) -> Term:
        """A call as C."""
        name = str(getattr(call.op, "name", "a function")).rpartition(".")[2]
        if name in ("call_pure_extern", "call_extern"):
            return self._extern(str(call.args[0].value), list(call.args)[1:], call)
        if name == "if_then_else":
            return self._choice(call)
        if name in _OPERATORS:
            sign, level = _OPERATORS[name]
            return self.expressions.operate(sign, level, *(self.expressions.term(a) for a in call.args))
        if name in ("likely", "tvm_thread_invariant"):
            return self.expressions.term(call.args[0])
        if name == "isnan":
            return self._unordered(call.args[0])
        if name == "reinterpret":
            return self._reinterpret(call)
        if name == "large_uint_imm":
            low, high = (int(a.value) for a in call.args)
            return number((high << 32) | low, types.parsed(str(call.ty.dtype)))
        raise Unprintable(f"OpenCL C has nothing for TVM's {name}")

    def statement(self, call: ir.Call) -> None:
        """Write a call for what it does."""
        name = str(getattr(call.op, "name", "")).rpartition(".")[2]
        if name == "tvm_storage_sync":
            scope = str(call.args[0].value)
            if scope not in ("shared", "warp"):
                raise Unprintable(f"a kernel cannot wait for {scope} memory")
            self.blocks.line("barrier(CLK_LOCAL_MEM_FENCE);")
        else:
            self.blocks.line(f"{self.term(call).text};")
        self.blocks.stored()

    def _extern(self, name: str, arguments: list[Any], call: ir.Call) -> Term:
        if name.startswith("atomic"):
            raise Unprintable("a kernel uses atomic operations")
        of = types.parsed(str(call.ty.dtype))
        given = [self.expressions.full(a) for a in arguments]
        text = f"{_RENAMED.get(name, name)}({', '.join(term.text for term in given)})"
        return self.expressions.joined(text, of, PRIMARY, *given)

    def _unordered(self, argument: Any) -> Term:
        x = self.expressions.term(argument)
        of = types.BOOL if x.type.lanes == 1 else Type("mask", x.type.bits, x.type.lanes)
        return self.expressions.joined(f"{x.within(EQUAL)} != {x.within(EQUAL + 1)}", of, EQUAL, x)

    def _reinterpret(self, call: ir.Call) -> Term:
        x = self.expressions.full(call.args[0])
        of = types.parsed(str(call.ty.dtype))
        return self.expressions.joined(f"as_{types.name(of)}({x.text})", of, PRIMARY, x)

    def _choice(self, call: ir.Call) -> Term:
        """One of two values of which only that one may be computed."""
        test, yes, no = call.args
        condition = self.expressions.term(test)
        if condition in (TRUE, FALSE):
            return self.expressions.full(yes if condition == TRUE else no)
        if types.parsed(str(call.ty.dtype)).lanes > 1:
            return self._branches(condition, yes, no, call)
        condition = self.expressions.settled(condition)
        self.blocks.lazy += 1
        a, b = self.expressions.term(yes), self.expressions.term(no)
        self.blocks.lazy -= 1
        text = f"{condition.within(OR)} ? {a.within(TERNARY + 1)} : {b.within(TERNARY + 1)}"
        found = self.expressions.joined(text, a.type, TERNARY, condition, a, b)
        if a.type.integer:
            least, most = zip(a.bounds, b.bounds, strict=True)
            found = bounded(found, min(least), max(most))
        return found

    def _branches(self, condition: Term, yes: Any, no: Any, call: ir.Call) -> Term:
        """A choice of vectors, as a statement before the one that needs it."""
        if self.blocks.lazy:
            raise Unprintable("a choice of vectors stands inside a choice of scalars")
        of = types.parsed(str(call.ty.dtype))
        if condition.type.lanes > 1:
            return self.expressions.choose(condition, self.expressions.full(yes), self.expressions.full(no))
        condition = self.expressions.settled(condition)
        name = self.blocks.names.fresh("chosen")
        self.blocks.line(f"{types.name(of)} {name};")
        for header, value in ((f"if ({condition.text})", yes), ("else", no)):
            self.blocks.enter(Block(header))
            term = self.expressions.full(value)
            if of.kind == "mask":
                term = self.expressions.mask(term, of.bits)
            self.blocks.line(f"{name} = {term.text};")
            self.blocks.leave()
        return Term(name, of, PRIMARY, self.blocks.here)


# ---- TIR statements as C: loops, conditions, variables, arrays ----

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


# ---- A kernel: its signature, its body, and what a source needs before its kernels ----

_AT = "#define AT(type, base, bytes) ((__global type*)((__global const char*)(base) + (bytes)))"
_EXTENSIONS = {"cl_khr_fp16": re.compile(r"\bhalf\d*\b"), "cl_khr_fp64": re.compile(r"\bdouble\d*\b")}


def source_of(kernels: dict[str, tirx.PrimFunc], *, contract: bool) -> str:
    """One source with all kernels, by their entry names."""
    texts = [_kernel(entry, func, contract=contract) for entry, func in kernels.items()]
    body = "\n".join(texts)
    before = [
        f"#pragma OPENCL EXTENSION {e} : enable" for e, word in _EXTENSIONS.items() if word.search(body)
    ]
    if "AT(" in body:
        before.append(_AT)
    before += expressions.extreme_definitions(body)
    return "\n".join([*before, "", body] if before else [body])


def _kernel(entry: str, func: tirx.PrimFunc, *, contract: bool) -> str:
    names = Names()
    names.fresh(entry)
    blocks = Blocks(names)
    expressions = Expressions(blocks, contract=contract)
    memory = KernelMemory(blocks, expressions)
    expressions.load = memory.load
    calls = Calls(blocks, expressions, memory)
    expressions.call = calls.term
    statements = Statements(blocks, expressions, memory, calls)
    written = _written(func)
    restrict = "restrict " if bool(func.attrs.get("tirx.noalias", False)) else ""
    arguments = []
    for pointer in func.params:
        buffer = _argument(pointer, names, pointer in written)
        memory.buffers[pointer] = buffer
        kind = types.name(types.stored(buffer.element))
        const = "" if buffer.written else "const "
        arguments.append(f"__global {const}{kind}* {restrict}{buffer.name}")
    statements.uses = private_uses(func.body)
    statements.write(func.body)
    lines = "\n".join(blocks.text())
    # Told of nothing, NVIDIA's compiler takes as many registers as groups of 256 work-items allow.
    group = f"__attribute__((reqd_work_group_size({', '.join(map(str, statements.work_group))})))"
    return f"__kernel {group}\nvoid {entry}({', '.join(arguments)}) {{\n{lines}\n}}\n"


def _argument(pointer: ir.Var, names: Names, written: bool) -> KernelBuffer:
    if not isinstance(pointer.ty, ir.PointerType):
        raise Unprintable(f"kernel argument {pointer.name} is not a pointer")
    element = types.vector(types.parsed(str(pointer.ty.element_type.dtype)), 1)
    return KernelBuffer(names.fresh(str(pointer.name).removesuffix("_ptr")), "global", element, 0, written)


def _written(func: tirx.PrimFunc) -> set[Any]:
    """The arguments that the kernel stores to."""
    behind: dict[Any, Any] = {}

    def declared(node: tirx.DeclBuffer) -> None:
        source = node.data.args[0] if isinstance(node.data, ir.Call) else node.data
        behind[node.buffer] = behind.get(source, source)

    stored: set[Any] = set()
    structural_walk(func.body, [(tirx.DeclBuffer, declared)], order="pre")
    structural_walk(func.body, [(tirx.BufferStore, lambda n: stored.add(n.buffer))], order="pre")
    return {behind.get(buffer, buffer) for buffer in stored}
