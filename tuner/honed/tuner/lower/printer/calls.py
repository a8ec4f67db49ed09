"""Calls in TIR: functions of OpenCL C, and TVM's builtins that are left after its passes."""

from __future__ import annotations

from typing import Any

from tvm import ir

from . import types
from .blocks import Block, Blocks
from .expressions import FALSE, TRUE, Expressions
from .memory import KernelMemory
from .terms import BIT_AND, BIT_OR, BIT_XOR, EQUAL, OR, PRIMARY, SHIFT, TERNARY, Term, bounded, number
from .types import Type, Unprintable

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
