"""Prints TIR expressions as C: numbers, variables, arithmetic, comparisons, choices, conversions.

Where C computes in another type than TIR, the result is converted back: C's smallest integer arithmetic is
that of int. Parts of an integer expression that change in no loop around it are named outside of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, tirx
from tvm_ffi import structural_equal

from honed.tuner.lower import DOT_ADD
from honed.tuner.lower.target import is_dot

from . import terms
from .blocks import Block, Blocks
from .library import CIRCULAR, defined_name
from .terms import (
    ADD,
    AND,
    BIT_AND,
    BIT_OR,
    BIT_XOR,
    EQUAL,
    LESS,
    MUL,
    OR,
    PRIMARY,
    SHIFT,
    TERNARY,
    UNARY,
    LinearForm,
    Term,
    Type,
    Unprintable,
    bounds,
    decide,
    floating,
    lane,
    number,
    with_bounds,
)


def never_nan(expr: Any) -> bool:
    """Return whether the value is a number whatever the inputs hold."""
    if isinstance(expr, tirx.Broadcast):
        return never_nan(expr.value)
    if isinstance(expr, tirx.Cast):
        return "float" not in str(expr.value.ty.dtype) or never_nan(expr.value)
    if isinstance(expr, tirx.Max | tirx.Min):
        return never_nan(expr.a) and never_nan(expr.b)
    return isinstance(expr, tirx.FloatImm) and float(expr.value) == float(expr.value)


_ARITHMETIC: dict[type, tuple[str, int]] = {
    tirx.Add: ("+", ADD), tirx.Sub: ("-", ADD), tirx.Mul: ("*", MUL), tirx.Div: ("/", MUL),
    tirx.Mod: ("%", MUL),
    tirx.BitwiseAnd: ("&", BIT_AND), tirx.BitwiseOr: ("|", BIT_OR), tirx.BitwiseXor: ("^", BIT_XOR),
    tirx.LShift: ("<<", SHIFT), tirx.RShift: (">>", SHIFT),
}  # fmt: skip
_COMPARISONS: dict[type, tuple[str, int]] = {
    tirx.LT: ("<", LESS), tirx.LE: ("<=", LESS), tirx.GT: (">", LESS), tirx.GE: (">=", LESS),
    tirx.EQ: ("==", EQUAL), tirx.NE: ("!=", EQUAL),
}  # fmt: skip
_RENAMED = {"nearbyint": "rint"}
# Functions of singles that compute halves. Mesa 25.0 lacks asin, exp2 and log of halves, and crashes. Its exp
# of halves is the exact one of singles, for which tiles spill; the device's own instruction is exact to more
# than the 11 bits of a half.
_OF_HALVES = {"asin": "asin", "exp2": "exp2", "log": "log", "exp": "native_exp"}
TRUE, FALSE = Term("true", terms.BOOL), Term("false", terms.BOOL)


class Expressions:
    """A printer of the expressions of one kernel."""

    def __init__(self, blocks: Blocks, *, contract: bool) -> None:
        """Set up the printer.

        `contract` lets the compiler fuse products with sums, instead of calling `mad`.
        """
        self.blocks = blocks
        self.contract = contract
        self.load: Callable[
            [ir.TensorLoad], Term
        ]  # Set by the kernel's memory, whose indices are expressions
        self.variables: dict[Any, Term] = {}
        self.stored: tirx.BufferStore | None = None  # The statement that is being written
        self.sums: dict[Any, LinearForm] = {}  # Integer variables as sums of others
        self._print: dict[type, Callable[[Any], Term]] = {
            tirx.IntImm: self._integer,
            tirx.FloatImm: lambda e: floating(float(e.value), terms.type_of(e)),
            ir.Var: self._variable,
            tirx.Min: self._extreme,
            tirx.Max: self._extreme,
            tirx.And: self._both,
            tirx.Or: self._both,
            tirx.Not: self._not,
            tirx.BitwiseNot: self._complement,
            tirx.Select: self._select,
            tirx.Cast: lambda e: self.convert(self.term(e.value), terms.type_of(e)),
            tirx.Ramp: self._ramp,
            # Stays a scalar: operators apply it to every lane, and others request it spread.
            tirx.Broadcast: lambda e: self.term(e.value),
            tirx.Shuffle: self._shuffle,
            tirx.Let: self._let,
            ir.TensorLoad: lambda e: self.load(e),
            ir.Call: self._call,
            **dict.fromkeys(_ARITHMETIC, self._arithmetic),
            **dict.fromkeys(_COMPARISONS, self._comparison),
        }

    def term(self, expr: Any) -> Term:
        """Return the expression as C; raise Unprintable where OpenCL C has no equivalent."""
        printer = self._print.get(type(expr))
        if printer is None:
            raise Unprintable(f"OpenCL C has nothing for {type(expr).__name__}")
        return printer(expr)

    def value(self, expr: Any) -> Term:
        """Return a whole expression as C; if no loop around it changes it, it is named before that loop."""
        return self.settle(self.term(expr))

    def settle(self, term: Term) -> Term:
        """Return an index or condition by its name, where naming it outside of the innermost loops pays."""
        if term.type.lanes > 1 or not (term.type.integer or term.type.kind == "bool"):
            return term
        return self.blocks.name_value(term, "inside" if term.type.kind == "bool" else "at")

    def full(self, expr: Any) -> Term:
        """Return the expression, spread over all lanes of its type where it is one value for all."""
        return self.spread(self.term(expr), terms.type_of(expr))

    def spread(self, term: Term, to: Type) -> Term:
        """Return a scalar spread over the lanes of a vector type; a vector is returned as it is."""
        if term.type.lanes == to.lanes or to.lanes == 1:
            return term
        if term.type.kind == "bool":
            mask = terms.vector(Type("mask", 32), to.lanes)
            return Term(
                f"({terms.name(mask)})(-(int){term.within(UNARY)})", mask, PRIMARY, term.home, term.pure
            )
        of = terms.vector(term.type, to.lanes)
        return Term(f"({terms.name(of)})({term.text})", of, PRIMARY, term.home, term.pure)

    def combine(self, text: str, of: Type, level: int, *parts: Term) -> Term:
        """Return a term made of others; those that belong further out than the whole are named there."""
        return Term(text, of, level, max(p.home for p in parts), all(p.pure for p in parts))

    def parts(self, *operands: Term) -> list[Term]:
        """Return the operands of one operator; those that change in fewer loops than the others are named."""
        landings = [self.blocks.landing(t.home) if t.pure else self.blocks.here for t in operands]
        most = max(landings)
        return [self.settle(t) if at < most else t for t, at in zip(operands, landings, strict=True)]

    # Leaves

    def _integer(self, expr: tirx.IntImm) -> Term:
        of = terms.type_of(expr)
        value = int(expr.value)
        return (TRUE if value else FALSE) if of.kind == "bool" else number(value, of)

    def _variable(self, expr: ir.Var) -> Term:
        found = self.variables.get(expr)
        if found is None:
            raise Unprintable(f"{expr.name} is used where it has no value")
        of = terms.type_of(expr) if found.type.integer and found.type.lanes == 1 else found.type
        if of != found.type:  # Counters have 32 bits
            return with_bounds(self.convert(found, of), *found.bounds)
        return self.blocks.name_value(found, "at") if expr in self.sums and found.level < PRIMARY else found

    # Arithmetic

    def _arithmetic(self, expr: Any) -> Term:
        sign, level = _ARITHMETIC[type(expr)]
        if sign == "+" and (isinstance(expr.a, tirx.Mul) or isinstance(expr.b, tirx.Mul)):
            of = terms.type_of(expr)
            if of.kind == "float":
                return self._multiply_add(expr, of)
        if sign == "+" and (is_dot(expr.a) or is_dot(expr.b)):
            return self._dot_add(expr)
        a, b = self.term(expr.a), self.term(expr.b)
        if sign == "%" and a.type.kind == "float":
            return self._call_of_two("fmod", self.full(expr.a), self.full(expr.b))
        return self.operate(sign, level, a, b)

    def operate(self, sign: str, level: int, a: Term, b: Term) -> Term:
        """Return an operator of two operands of equal type, of which one may be a scalar for all lanes."""
        a, b = self._match(*self.parts(a, b))
        of = a.type if a.type.lanes >= b.type.lanes else b.type
        found = self.combine(f"{a.within(level)} {sign} {b.within(level + 1)}", of, level, a, b)
        if sign in "/%" and of.integer and b.bounds[0] <= 0 <= b.bounds[1]:
            # Impure: it must stay where the condition around it guards it
            found = Term(found.text, of, level, self.blocks.here, pure=False)
        if of.integer and of.lanes == 1:
            if of.bits < 32:
                return self.convert(Term(found.text, terms.INT, level, found.home, found.pure), of)
            if (known := bounds(sign, a, b)) is not None:
                found = with_bounds(found, *known)
                fixed = found.pure and found.low is not None and found.low == found.high
                return number(known[0], of) if fixed else found
        return found

    def _match(self, a: Term, b: Term) -> tuple[Term, Term]:
        """Return operands that C combines: small integers are spread, because C would convert them to int."""
        if a.type.lanes != b.type.lanes:
            wide, narrow = (a, b) if a.type.lanes > b.type.lanes else (b, a)
            if narrow.type.bits < 32 or narrow.type.kind == "bool" or narrow.type.integer:
                a, b = self.spread(a, wide.type), self.spread(b, wide.type)
        if a.type.kind == b.type.kind == "mask" and a.type.bits != b.type.bits:
            bits = max(a.type.bits, b.type.bits)
            return self.mask(a, bits), self.mask(b, bits)
        return a, b

    def _multiply_add(self, expr: tirx.Add, of: Type) -> Term:
        """Return a product and a sum in one, rounded once or twice, whichever the device does faster."""
        product, other = (expr.a, expr.b) if isinstance(expr.a, tirx.Mul) else (expr.b, expr.a)
        x, y, z = (self.spread(self.term(e), of) for e in (product.a, product.b, other))
        if self.contract:
            text = f"{x.within(MUL)} * {y.within(MUL + 1)} + {z.within(ADD + 1)}"
            return self.combine(text, of, ADD, x, y, z)
        return self.combine(f"mad({x.text}, {y.text}, {z.text})", of, PRIMARY, x, y, z)

    def _dot_add(self, expr: tirx.Add) -> Term:
        """Return a dot product of bytes and its addend in one; no sum is long enough to saturate.

        Raises Unprintable for vectors of words.
        """
        dot, other = (expr.a, expr.b) if is_dot(expr.a) else (expr.b, expr.a)
        a, b, z = (self.full(argument) for argument in (*list(dot.args)[1:], other))
        if a.type.lanes > 1:
            raise Unprintable("dot products of bytes are not of vectors of words")
        return self.combine(f"{DOT_ADD}({a.text}, {b.text}, {z.text})", terms.INT, PRIMARY, a, b, z)

    def _call_of_two(self, function: str, a: Term, b: Term) -> Term:
        return self.combine(f"{function}({a.text}, {b.text})", a.type, PRIMARY, a, b)

    def _extreme(self, expr: Any) -> Term:
        low = type(expr) is tirx.Min
        a, b = self.parts(self.full(expr.a), self.full(expr.b))
        if a.type.kind in ("bool", "mask"):
            return self.operate("&" if low else "|", BIT_AND if low else BIT_OR, a, b)
        if a.type.kind == "float":
            return self._of_numbers("min" if low else "max", expr, a, b)
        found = self._call_of_two("min" if low else "max", a, b)
        if a.type.integer and a.type.lanes == 1:
            least, most = zip(a.bounds, b.bounds, strict=True)
            return with_bounds(found, *((min(least), min(most)) if low else (max(least), max(most))))
        return found

    def _of_numbers(self, which: str, expr: Any, a: Term, b: Term) -> Term:
        """Return the larger or smaller of floats, by a function that defines NaN and infinities (`extremes`).

        NaN on either side is returned, unless that side is never NaN; but NaN does not replace the present
        result of a reduction, which would take two more comparisons for each element.
        """
        if never_nan(expr.a) or self._is_stored(expr.b):
            a, b = b, a
        elif not (never_nan(expr.b) or self._is_stored(expr.a)):
            which = f"nan{which}"
        return self._call_of_two(defined_name(which, a.type), a, b)

    def _is_stored(self, expr: Any) -> bool:
        """Return whether an expression loads the element that the present statement stores to."""
        return (
            self.stored is not None
            and isinstance(expr, ir.TensorLoad)
            and expr.source.same_as(self.stored.buffer)
            and structural_equal(list(expr.indices), list(self.stored.indices))
        )

    # Truth

    def _comparison(self, expr: Any) -> Term:
        sign, level = _COMPARISONS[type(expr)]
        a, b = self.term(expr.a), self.term(expr.b)
        if a.type.integer and (known := decide(sign, a, b)) is not None:
            return TRUE if known else FALSE
        a, b = self._match(*self.parts(a, b))
        wide = a.type if a.type.lanes >= b.type.lanes else b.type
        text = f"{a.within(level)} {sign} {b.within(level + 1)}"
        return self.combine(text, terms.comparison_type(wide), level, a, b)

    def _both(self, expr: Any) -> Term:
        either = type(expr) is tirx.Or
        a = self.term(expr.a)
        self.blocks.lazy += 1
        b = self.term(expr.b)
        self.blocks.lazy -= 1
        decides, leaves = (TRUE, FALSE) if either else (FALSE, TRUE)
        if decides in (a, b):
            return decides
        if leaves in (a, b):
            return b if a == leaves else a
        a, b = self.parts(a, b)
        if max(a.type.lanes, b.type.lanes) > 1:
            a, b = self.spread(a, b.type), self.spread(b, a.type)
            return self.operate("|" if either else "&", BIT_OR if either else BIT_AND, a, b)
        sign, level = ("||", OR) if either else ("&&", AND)
        return self.combine(f"{a.within(level)} {sign} {b.within(level)}", terms.BOOL, level, a, b)

    def _not(self, expr: tirx.Not) -> Term:
        a = self.term(expr.a)
        if a in (TRUE, FALSE):
            return FALSE if a == TRUE else TRUE
        sign = "~" if a.type.kind == "mask" else "!"
        return self.combine(f"{sign}{a.within(UNARY)}", a.type, UNARY, a)

    def _complement(self, expr: Any) -> Term:
        a = self.term(expr.a)
        found = self.combine(f"~{a.within(UNARY)}", a.type, UNARY, a)
        if a.type.lanes == 1 and a.type.bits < 32:
            return self.convert(Term(found.text, terms.INT, UNARY, a.home, a.pure), a.type)
        return found

    def _select(self, expr: tirx.Select) -> Term:
        return self.choose(self.term(expr.condition), self.full(expr.true_value), self.full(expr.false_value))

    def choose(self, condition: Term, yes: Term, no: Term) -> Term:
        """Return one of two values; both may be computed."""
        if condition in (TRUE, FALSE):
            return yes if condition == TRUE else no
        condition, yes, no = self.parts(condition, yes, no)
        if yes.type.lanes == 1 and condition.type.lanes == 1:
            return self._ternary(condition, yes, no)
        yes, no = self._match(yes, no)
        mask = self.mask(self.spread(condition, yes.type), yes.type.bits)
        return self.combine(
            f"select({no.text}, {yes.text}, {mask.text})", yes.type, PRIMARY, condition, yes, no
        )

    def _ternary(self, condition: Term, yes: Term, no: Term) -> Term:
        text = f"{condition.within(OR)} ? {yes.within(TERNARY + 1)} : {no.within(TERNARY + 1)}"
        found = self.combine(text, yes.type, TERNARY, condition, yes, no)
        if yes.type.integer:
            least, most = zip(yes.bounds, no.bounds, strict=True)
            found = with_bounds(found, min(least), max(most))
        return found

    def mask(self, term: Term, bits: int) -> Term:
        """Return a mask converted to elements of `bits` bits."""
        if term.type.bits == bits:
            return term
        of = Type("mask", bits, term.type.lanes)
        return self.combine(f"convert_{terms.name(of)}({term.text})", of, PRIMARY, term)

    # Conversions

    def convert(self, term: Term, to: Type) -> Term:
        """Return the value in another type; floating point becomes integer by dropping its fraction."""
        to = terms.vector(to, term.type.lanes) if to.lanes != term.type.lanes else to
        if term.type == to or (term.type.kind, to.kind) == ("mask", "mask"):
            return term
        if to.kind == "bool":
            return self.combine(f"{term.within(EQUAL + 1)} != 0", to, EQUAL, term)
        if to.kind == "mask":
            zero = f"({terms.name(term.type)})(0)"
            of = Type("mask", term.type.bits, to.lanes)
            return self.combine(f"{term.within(EQUAL + 1)} != {zero}", of, EQUAL, term)
        if term.type.kind == "mask":
            return self.combine(f"convert_{terms.name(to)}(-{term.within(UNARY)})", to, PRIMARY, term)
        if to.lanes > 1 or (term.type.kind == "float" and to.integer):
            return self.combine(f"convert_{terms.name(to)}({term.text})", to, PRIMARY, term)
        found = self.combine(f"({terms.name(to)}){term.within(UNARY)}", to, UNARY, term)
        return with_bounds(found, *term.bounds) if term.type.kind != "float" and to.integer else found

    # Vectors

    def _ramp(self, expr: tirx.Ramp) -> Term:
        base, stride = self.term(expr.base), self.term(expr.stride)
        of = terms.vector(base.type, int(expr.lanes))
        steps = ", ".join(str(n) for n in range(of.lanes))
        text = f"{self.spread(base, of).text} + {self.spread(stride, of).text} * ({terms.name(of)})({steps})"
        return self.combine(text, of, ADD, base, stride)

    def _shuffle(self, expr: tirx.Shuffle) -> Term:
        vectors = [(self.full(v), terms.type_of(v).lanes) for v in expr.vectors]
        elements = [
            term.text if lanes == 1 else f"{term.within(PRIMARY)}.s{n:x}"
            for term, lanes in vectors
            for n in range(lanes)
        ]
        chosen = [elements[int(n)] for n in expr.indices]
        whole = [term for term, _ in vectors]
        of = terms.type_of(expr)
        if len(chosen) == 1:
            if whole[0].type.kind == "mask":
                return self.combine(f"{chosen[0]} != 0", terms.BOOL, EQUAL, *whole)
            return self.combine(chosen[0], of, PRIMARY, *whole)
        if of.kind == "mask":
            of = Type("mask", whole[0].type.bits, of.lanes)
        return self.combine(f"({terms.name(of)})({', '.join(chosen)})", of, PRIMARY, *whole)

    def _let(self, expr: tirx.Let) -> Term:
        self.variables[expr.var] = self.full(expr.value)
        return self.term(expr.body)

    # Calls: functions of OpenCL C, and TVM's builtins that are left after its passes

    def _call(self, call: ir.Call) -> Term:
        name = str(getattr(call.op, "name", "a function")).rpartition(".")[2]
        if name in ("call_pure_extern", "call_extern"):
            return self._extern(call)
        if name == "if_then_else":
            return self._choice(call)
        if name in ("likely", "tvm_thread_invariant"):
            return self.term(call.args[0])
        if name == "isnan":
            x = self.term(call.args[0])
            text = f"{x.within(EQUAL)} != {x.within(EQUAL + 1)}"
            return self.combine(text, terms.comparison_type(x.type), EQUAL, x)
        if name == "reinterpret":
            x, of = self.full(call.args[0]), terms.type_of(call)
            return self.combine(f"as_{terms.name(of)}({x.text})", of, PRIMARY, x)
        raise Unprintable(f"OpenCL C has nothing for TVM's {name}")

    def _extern(self, call: ir.Call) -> Term:
        function, *arguments = call.args
        name = str(function.value)
        if name.startswith("atomic"):
            raise Unprintable("a kernel uses atomic operations")
        given = [self.full(a) for a in arguments]
        to = of = terms.type_of(call)
        if name in CIRCULAR and given[0].type.bits < 64:
            name = defined_name(name, given[0].type)
        elif name in _OF_HALVES and to.bits < 32:
            name, of = _OF_HALVES[name], Type(to.kind, 32, to.lanes)
            given = [self.convert(term, of) for term in given]
        text = f"{_RENAMED.get(name, name)}({', '.join(term.text for term in given)})"
        return self.convert(self.combine(text, of, PRIMARY, *given), to)

    def _choice(self, call: ir.Call) -> Term:
        """Return one of two values, of which only the selected one may be computed."""
        test, yes, no = call.args
        condition = self.term(test)
        if condition in (TRUE, FALSE):
            return self.full(yes if condition == TRUE else no)
        if terms.type_of(call).lanes > 1:
            return self._branches(condition, yes, no, terms.type_of(call))
        condition = self.settle(condition)
        self.blocks.lazy += 1
        a, b = self.term(yes), self.term(no)
        self.blocks.lazy -= 1
        return self._ternary(condition, a, b)

    def _branches(self, condition: Term, yes: Any, no: Any, of: Type) -> Term:
        """Return a choice of vectors, made by a statement placed before the one that needs it.

        Raises Unprintable where the choice is inside a choice of scalars.
        """
        if self.blocks.lazy:
            raise Unprintable("a choice of vectors stands inside a choice of scalars")
        if condition.type.lanes > 1:
            return self.choose(condition, self.full(yes), self.full(no))
        condition = self.settle(condition)
        name = self.blocks.names.fresh("chosen")
        self.blocks.line(f"{terms.name(of)} {name};")
        for header, value in ((f"if ({condition.text})", yes), ("else", no)):
            with self.blocks.inside(Block(header)):
                term = self.full(value)
                if of.kind == "mask":
                    term = self.mask(term, of.bits)
                self.blocks.line(f"{name} = {term.text};")
        return Term(name, of, PRIMARY, self.blocks.here)

    # Sums

    def linear(self, expr: Any) -> LinearForm:
        """Return an integer index as a sum; integer types in between are assumed to hold its values."""
        kind = type(expr)
        if kind is tirx.IntImm:
            return LinearForm({}, int(expr.value))
        if kind is ir.Var:
            return self.sums[expr] if expr in self.sums else self._single(self.variables[expr])
        if kind is tirx.Add:
            return self.linear(expr.a).plus(self.linear(expr.b))
        if kind is tirx.Sub:
            return self.linear(expr.a).plus(self.linear(expr.b), -1)
        if kind is tirx.Mul or kind is tirx.LShift:
            return self._product(expr)
        if kind is tirx.Cast:
            value = terms.type_of(expr.value)
            if value.integer and value.bits <= terms.type_of(expr).bits:
                return self.linear(expr.value)
        return self._single(self.value(expr))

    def _single(self, term: Term) -> LinearForm:
        if term.pure and term.low is not None and term.low == term.high:
            return LinearForm({}, term.low)
        return LinearForm.of(term)

    def _product(self, expr: Any) -> LinearForm:
        a, b = expr.a, expr.b
        if isinstance(b, tirx.IntImm):
            value = int(b.value)
            return self.linear(a).times(value if type(expr) is tirx.Mul else 1 << value)
        if isinstance(a, tirx.IntImm) and type(expr) is tirx.Mul:
            return self.linear(b).times(int(a.value))
        return self._single(self.value(expr))

    def lane_sums(self, index: Any, lanes: int) -> list[LinearForm]:
        """Return the index of each lane of a vector."""
        return [self.linear(lane(index, n)) for n in range(lanes)]
