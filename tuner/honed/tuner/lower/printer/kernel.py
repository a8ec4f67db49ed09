"""Prints a kernel: its statements, its signature, and the definitions before the kernels of a source."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tvm import ir, tirx
from tvm.ir import IRModule
from tvm.s_tir.pipeline import finalize_device_passes
from tvm_ffi import structural_map

from honed.machine.profile import DeviceProfile
from honed.tuner.lower import ROLLED
from honed.tuner.lower.statements import memory_by_buffer, memory_of, nodes, parts, uses

from . import terms
from .blocks import Block, Blocks, Declaration, Names
from .bounds import bound_accesses
from .expressions import FALSE, TRUE, Expressions
from .library import definitions
from .memory import (
    ArrayUses,
    KernelBuffer,
    KernelMemory,
    is_held_in_pairs,
    private_uses,
    register_width,
    space_of,
)
from .terms import ADD, Term, Unprintable

_MOST_TURNS = 16  # Turns of a loop that is unrolled
_MOST_STATEMENTS = 128  # Statements that one outermost loop may become
_INDICES = {"blockIdx": "get_group_id", "threadIdx": "get_local_id"}
_UNROLLED = 32  # Turns of a loop that Mesa 26.2 unrolls


class Statements:
    """Writes the statements of one kernel."""

    def __init__(self, blocks: Blocks, expressions: Expressions, memory: KernelMemory) -> None:
        self.blocks = blocks
        self.expressions = expressions
        self.memory = memory
        self.uses: dict[Any, ArrayUses] = {}
        self.work_group = [1, 1, 1]  # Work-items along x, y, z
        self._threads: dict[str, Term] = {}
        self._write: dict[type, Callable[[Any], None]] = {
            tirx.SeqStmt: self._sequence,
            tirx.AttrStmt: self._attribute,
            tirx.DeclBuffer: self._declare,
            tirx.AllocBuffer: self._allocate,
            tirx.Bind: self._bind,
            tirx.For: self._loop,
            tirx.While: self._while,
            tirx.IfThenElse: self._condition,
            tirx.BufferStore: self.memory.store,
            tirx.Evaluate: self._evaluate,
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
        """Declare a work-item's place along an axis as a variable of the kernel."""
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
            self._threads[tag] = Term(name, terms.INT, low=0, high=high)
            if tag == "blockIdx.z":
                self.blocks.hidden_zero = None
        self.expressions.variables[axis.var] = self._threads[tag]

    # Memory

    def _declare(self, statement: tirx.DeclBuffer) -> None:
        known = self.memory.buffers.get(memory_of(statement.data))
        if known is None:
            raise Unprintable("a buffer lies in memory that is no argument")
        element = terms.parse_type(str(statement.buffer.dtype))
        if terms.type_in_memory(terms.vector(element, 1)) != terms.type_in_memory(
            terms.vector(known.element, 1)
        ):
            raise Unprintable(f"{known.name} is read as {terms.name(element)}")
        if known.registers and element != known.element:
            raise Unprintable(f"{known.name} is also read as {terms.name(element)}")
        nbytes = _nbytes(statement.buffer)
        self.memory.buffers[statement.buffer] = replace(known, element=element, nbytes=nbytes)

    def _allocate(self, statement: tirx.AllocBuffer) -> None:
        buffer = statement.buffer
        element = terms.parse_type(str(buffer.dtype))
        elements = _elements(buffer)
        space = space_of(str(buffer.scope()))
        name = self.blocks.names.fresh(str(buffer.name))
        made = KernelBuffer(name, space, element, _nbytes(buffer))
        self.memory.buffers[buffer] = made
        uses = self.uses.get(buffer, ArrayUses())
        width = register_width(uses, element, elements) if space == "private" else None
        if width is not None:
            made.width, made.paired = width, is_held_in_pairs(uses, element, width)
            self._registers(made, elements * element.lanes)
        else:
            self._array(made, elements * element.lanes, uses)

    def _registers(self, buffer: KernelBuffer, scalars: int) -> None:
        self.blocks.registers += scalars * buffer.vector.bits // 32
        count = -(-scalars // buffer.width)
        fresh = self.blocks.names.fresh
        buffer.registers = (
            [buffer.name] if count == 1 else [fresh(f"{buffer.name}_{n}") for n in range(count)]
        )
        kind = terms.name(buffer.words if buffer.paired else buffer.vector)
        for first in range(0, count, 8):
            self.blocks.line(f"{kind} {', '.join(buffer.registers[first : first + 8])};")

    def _array(self, buffer: KernelBuffer, scalars: int, uses: ArrayUses) -> None:
        """Declare an array, of vectors where all reads and writes are whole vectors."""
        element = terms.type_in_memory(buffer.element)
        space = "__local " if buffer.space == "local" else ""
        single = terms.name(terms.vector(element, 1))
        at = 0 if buffer.space == "local" else self.blocks.here
        aligned = ""
        if uses.widest > 1:
            buffer.aligned = min(terms.vector(element, 1).nbytes * (1 << (uses.widest - 1).bit_length()), 128)
            aligned = f" __attribute__((aligned({buffer.aligned})))"
        self.blocks.open[at].lines.append(
            Declaration(buffer.name, f"{space}{single} {buffer.name}[{scalars}]{aligned};")
        )

    # Variables and control

    def _bind(self, statement: tirx.Bind) -> None:
        variable = statement.var
        term = self.expressions.full(statement.value)
        if term.pure and term.type.lanes == 1 and (term.type.integer or term.type.kind == "bool"):
            self.expressions.variables[variable] = term
            if term.type.integer:
                self.expressions.sums[variable] = self.expressions.linear(statement.value)
            return
        name = self.blocks.names.fresh(str(variable.name))
        self.blocks.open[-1].lines.append(
            Declaration(name, f"const {terms.name(term.type)} {name} = {term.text};")
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
        of = terms.INT if low >= -(1 << 31) and high < (1 << 31) - 1 else start.type
        step = int(statement.step) if statement.step is not None else 1
        name = self.blocks.names.fresh(str(statement.loop_var.name))
        first, last = (_plain(t, of) for t in (start, stop))
        if zero and ROLLED in statement.annotations and self.blocks.hidden_zero is not None:
            first = self.blocks.hidden_zero
        up = f"++{name}" if step == 1 else f"{name} += {step}"
        header = f"for ({terms.name(of)} {name} = {first}; {name} < {last}; {up})"
        counter = Term(name, of, home=self.blocks.here + 1, low=low, high=max(low, high))
        begin = Term("0", terms.INT) if zero else start
        self.expressions.variables[statement.loop_var] = counter
        turns = extent.high if zero and step == 1 and extent.low == extent.high else None
        spare = first != self.blocks.hidden_zero and extent.bounds[1] > _UNROLLED
        with self.blocks.inside(Block(header, counter, True, step, begin, turns, spare)):
            self.write(statement.body)

    def _while(self, statement: tirx.While) -> None:
        with self.blocks.inside(Block("while (1)", repeats=True)):
            condition = self.expressions.value(statement.condition)
            self.blocks.line(f"if (!({condition.text})) {{ break; }}")
            self.write(statement.body)

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
        with self.blocks.inside(Block(header)):
            self.write(body)

    def _evaluate(self, statement: tirx.Evaluate) -> None:
        if isinstance(statement.value, tirx.IntImm):
            return
        if not isinstance(statement.value, ir.Call):
            raise Unprintable("a value is computed for nothing")
        if str(getattr(statement.value.op, "name", "")).rpartition(".")[2] == "tvm_storage_sync":
            scope = str(statement.value.args[0].value)
            if scope not in ("shared", "warp"):
                raise Unprintable(f"a kernel cannot wait for {scope} memory")
            self.blocks.line("barrier(CLK_LOCAL_MEM_FENCE);")
        else:
            self.blocks.line(f"{self.expressions.term(statement.value).text};")
        self.blocks.record_store()


def _plain(term: Term, of: terms.Type) -> str:
    """Return an integer as text, in the type of a loop's counter."""
    if term.type == of:
        return term.text
    if term.low is not None and term.low == term.high:
        return str(term.low)
    return f"({terms.name(of)})({term.text})"


def _elements(buffer: Any) -> int:
    if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
        raise Unprintable(f"{buffer.name} has a size known only when the kernel runs")
    return math.prod(map(int, buffer.shape))


def _nbytes(buffer: Any) -> int:
    return _elements(buffer) * terms.parse_type(str(buffer.dtype)).nbytes


_AT = "#define AT(type, base, bytes) ((__global type*)((__global const char*)(base) + (bytes)))"
_EXTENSIONS = {"cl_khr_fp16": re.compile(r"\bhalf\d*\b"), "cl_khr_fp64": re.compile(r"\bdouble\d*\b")}


def print_kernels(kernels: dict[str, tirx.PrimFunc], profile: DeviceProfile) -> str:
    """Print kernels as OpenCL C, by their entry names; raise Unprintable (a ValueError) where it has none."""
    return source_of({entry: bound_accesses(f) for entry, f in _prepare(kernels).items()}, profile)


def _prepare(kernels: dict[str, tirx.PrimFunc]) -> dict[str, tirx.PrimFunc]:
    """Return the kernels after TVM's last passes, with short loops over private arrays unrolled.

    An array whose indices are all constant can be held in registers; an array that a loop counts through
    cannot.
    """
    final = finalize_device_passes()(IRModule(kernels))
    found = {str(f.attrs["global_symbol"]): _mark_loops(f) for f in final.functions.values()}
    if any(changed for _, changed in found.values()):
        module = IRModule({entry: func for entry, (func, _) in found.items()})
        for step in (tirx.transform.UnrollLoop(), tirx.transform.StmtSimplify()):
            module = step(module)
        return {str(f.attrs["global_symbol"]): f for f in module.functions.values()}
    return {entry: func for entry, (func, _) in found.items()}


def _mark_loops(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, bool]:
    """Return the kernel with the loops to be unrolled marked, and whether there are any."""
    private = {one.buffer for one in nodes(func.body, tirx.AllocBuffer) if str(one.buffer.scope()) == "local"}
    chosen: set[Any] = set()
    if private:
        _choose(func.body, private, chosen)
    if not chosen:
        return func, False

    def mark(loop: tirx.For) -> tirx.For:
        if loop.loop_var not in chosen:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)

    return func.with_body(structural_map(func.body, [(tirx.For, mark)])), True


def _choose(statement: Any, private: set[Any], chosen: set[Any]) -> int:
    """Choose loops in a statement, inner ones first; return how many statements it will be."""
    within = [statement.body] if isinstance(statement, tirx.While) else parts(statement)
    if not within:
        return 1
    inside = sum(_choose(part, private, chosen) for part in within)
    if (
        isinstance(statement, tirx.For)
        and isinstance(statement.extent, tirx.IntImm)
        and statement.kind == tirx.ForKind.SERIAL
        and int(statement.extent) <= _MOST_TURNS
        and int(statement.extent) * inside <= _MOST_STATEMENTS
        and _indexes(statement, private)
    ):
        chosen.add(statement.loop_var)
        return int(statement.extent) * inside
    return inside


def _indexes(loop: tirx.For, private: set[Any]) -> bool:
    """Return whether the loop's variable is in an index into a private array."""
    return any(
        (one.source if isinstance(one, ir.TensorLoad) else one.buffer) in private
        and uses(one.indices, [loop.loop_var])
        for one in nodes(loop.body, (ir.TensorLoad, tirx.BufferStore))
    )


def source_of(kernels: dict[str, tirx.PrimFunc], profile: DeviceProfile) -> str:
    """Return one source with all kernels, by their entry names."""
    texts = [_kernel(entry, func, profile) for entry, func in kernels.items()]
    body = "\n".join(texts)
    before = [
        f"#pragma OPENCL EXTENSION {e} : enable" for e, word in _EXTENSIONS.items() if word.search(body)
    ]
    if "AT(" in body:
        before.append(_AT)
    before += definitions(body)
    return "\n".join([*before, "", body] if before else [body])


def _kernel(entry: str, func: tirx.PrimFunc, profile: DeviceProfile) -> str:
    names = Names()
    names.fresh(entry)
    blocks = Blocks(names, costly_addresses=profile.costly_addresses)
    expressions = Expressions(blocks, contract=profile.family.contracts)
    memory = KernelMemory(blocks, expressions)
    expressions.load = memory.load
    statements = Statements(blocks, expressions, memory)
    memory_of = memory_by_buffer(func.body)
    written = {memory_of.get(one.buffer, one.buffer) for one in nodes(func.body, tirx.BufferStore)}
    restrict = "restrict " if bool(func.attrs.get("tirx.noalias", False)) else ""
    arguments = []
    for pointer in func.params:
        buffer = _argument(pointer, names, pointer in written)
        memory.buffers[pointer] = buffer
        kind = terms.name(terms.type_in_memory(buffer.element))
        const = "" if buffer.written else "const "
        arguments.append(f"__global {const}{kind}* {restrict}{buffer.name}")
    statements.uses = private_uses(func.body)
    statements.write(func.body)
    lines = "\n".join(blocks.text())
    # NVIDIA's compiler by default uses as many registers as groups of 256 work-items allow.
    group = f"__attribute__((reqd_work_group_size({', '.join(map(str, statements.work_group))})))"
    return f"__kernel {group}\nvoid {entry}({', '.join(arguments)}) {{\n{lines}\n}}\n"


def _argument(pointer: ir.Var, names: Names, written: bool) -> KernelBuffer:
    if not isinstance(pointer.ty, ir.PointerType):
        raise Unprintable(f"kernel argument {pointer.name} is not a pointer")
    element = terms.vector(terms.parse_type(str(pointer.ty.element_type.dtype)), 1)
    return KernelBuffer(names.fresh(str(pointer.name).removesuffix("_ptr")), "global", element, 0, written)
