"""Holds the blocks of a kernel as they are written, and the values that are computed once, outside of loops.

A declaration may be added to any open block: it then precedes the statement that is being written, which is
in that block or in one inside it. So a value that does not change in a loop is declared before the loop when
it is first needed inside.

The lines of a block contain marks for loads while it is written. When the block is complete its marks are
counted: a load with one mark replaces it, a load with several is read into a variable before the first line
that needs it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from . import terms
from .terms import Term, Type

_OTHER = re.compile(r"[^A-Za-z0-9_]")
# Words of OpenCL C, names of its types, and the functions of its library that kernels may call.
_RESERVED = re.compile(
    r"u?(?:char|short|int|long)\d*|(?:half|float|double|bool|void)\d*|"
    r"(?:get|convert|as|atomic|atom|read|write|native|half|work_group|sub_group|cl|mem|async|M|CL|_)_\w*|"
    r"(?:vload|vstore|is|image|fract)\w*|"
    r"auto|break|case|const|continue|default|do|else|enum|extern|for|goto|if|inline|register|restrict|"
    r"return|signed|sizeof|static|struct|switch|typedef|typeof|union|unsigned|volatile|while|kernel|"
    r"global|local|constant|private|generic|uniform|pipe|event_t|sampler_t|true|false|NULL|NAN|"
    r"INFINITY|HUGE_VAL|MAXFLOAT|AT|barrier|size_t|ptrdiff_t|intptr_t|uintptr_t|main|and|or|xor|not|"
    r"abs|abs_diff|acos|acosh|acospi|add_sat|all|any|asin|asinh|asinpi|atan|atan2|atan2pi|atanh|atanpi|"
    r"bitselect|cbrt|ceil|clamp|clz|copysign|cos|cosh|cospi|cross|ctz|degrees|distance|dot|erf|erfc|"
    r"exp|exp10|exp2|expm1|fabs|fast_distance|fast_length|fast_normalize|fdim|floor|fma|fmax|fmin|fmod|"
    r"frexp|hadd|hypot|ilogb|ldexp|length|lgamma|lgamma_r|log|log10|log1p|log2|logb|mad|mad24|mad_hi|"
    r"mad_sat|max|maxmag|min|minmag|mix|modf|mul24|mul_hi|nan|nearbyint|nextafter|normalize|popcount|"
    r"pow|pown|powr|prefetch|printf|radians|remainder|remquo|rhadd|rint|rootn|rotate|round|rsqrt|"
    r"select|shuffle|shuffle2|sign|signbit|sin|sincos|sinh|sinpi|smoothstep|sqrt|step|sub_sat|tan|tanh|"
    r"tanpi|tgamma|trunc|upsample|vec_step"
)


class Names:
    """The identifiers of a kernel."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def fresh(self, wanted: str) -> str:
        """Return the wanted name as an identifier of OpenCL C, with a number appended if it is taken."""
        plain = _OTHER.sub("_", wanted) or "v"
        if plain[0].isdigit() or _RESERVED.fullmatch(plain):
            plain = f"v_{plain}"
        found = plain
        while found in self._taken:
            self._taken[plain] += 1
            found = f"{plain}_{self._taken[plain]}"
        self._taken[found] = 0
        return found


_MARK = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True, slots=True)
class LoadText:
    """A load: its text (with marks of loads in it), the type of its value, and the memory it reads."""

    text: str
    type: Type
    memory: str


class Loads:
    """The loads of a kernel, by the numbers in their marks."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._loads: list[LoadText] = []

    def mark(self, load: LoadText) -> str:
        """Return a new mark for a load that has none yet."""
        self._loads.append(load)
        return f"\ue000{len(self._loads) - 1}\ue001"

    def find_shared(self, texts: list[str]) -> set[int]:
        """Return the numbers of the loads that occur more than once in the lines of a block."""
        uses: Counter[int] = Counter()
        for text in texts:
            uses.update(_marks(text))
        found: set[int] = set()
        # A load's index is marked before the load itself.
        for number in range(max(uses, default=-1), -1, -1):
            if uses[number] > 1:
                found.add(number)
            if uses[number]:
                uses.update(_marks(self._loads[number].text))
        return found

    def declare(self, text: str, shared: set[int], named: dict[int, str]) -> tuple[list[str], str]:
        """Return the declarations that a line needs before it, and the line without marks.

        `named` holds the names of loads declared so far; the loads declared here are added to it.
        """
        before: list[str] = []

        def value(match: re.Match[str]) -> str:
            number = int(match.group(1))
            if number in named:
                return named[number]
            load = self._loads[number]
            plain = _MARK.sub(value, load.text)
            if number not in shared:
                return plain
            named[number] = name = self._names.fresh(f"{load.memory}_value")
            before.append(f"const {terms.name(load.type)} {name} = {plain};")
            return name

        return before, _MARK.sub(value, text)


def _marks(text: str) -> list[int]:
    return [int(number) for number in _MARK.findall(text)]


_WORD = re.compile(r"[A-Za-z_]\w*")
# Registers of 64 filled by arrays and `step`s: pointers, counters and temporaries take the others
_FILLED = 44
_MOST_KEPT = 16  # Values kept over a loop: each takes a register while the loop runs


@dataclass(slots=True)
class Declaration:
    """A line that is dropped where nothing uses the name it declares."""

    name: str
    text: str


@dataclass(slots=True)
class Block:
    """The lines between two braces; `loop` is the counter of a loop that has one."""

    header: str
    loop: Term | None = None
    repeats: bool = False
    step: int = 1
    start: Term | None = None
    turns: int | None = None  # Number of turns of a loop from 0, where it is constant
    spare: bool = False  # Registers remain free: it is neither unrolled nor marked as one that would spill
    lines: list[str | Declaration | Block] = field(default_factory=list)
    last: list[str] = field(default_factory=list)  # Lines after all others: increments of a loop
    names: dict[str, Term] = field(default_factory=dict)
    # Marks of loads, each with the memory it reads
    marks: dict[str, tuple[str, str]] = field(default_factory=dict)
    kept: int = 0

    @property
    def has_loops(self) -> bool:
        """Return whether the block contains a loop."""
        inner = [line for line in self.lines if isinstance(line, Block)]
        return any(block.repeats or block.has_loops for block in inner)

    def before_loop(self, text: str) -> int:
        """Return the index of the last loop, or the end where the text needs a later declaration.

        Also the end where that loop contains another, for which more registers are in use.
        """
        end = len(self.lines)
        loops = [(n, line) for n, line in enumerate(self.lines) if isinstance(line, Block) and line.repeats]
        place = loops[-1][0] if loops and not loops[-1][1].has_loops else end
        behind = {line.name for line in self.lines[place:] if isinstance(line, Declaration)}
        return end if behind.intersection(_WORD.findall(text)) else place


class Blocks:
    """A kernel's open blocks, the outermost first."""

    def __init__(self, names: Names, *, costly_addresses: bool) -> None:
        self.names = names
        self.costly_addresses = costly_addresses
        self.hidden_zero: str | None = "get_group_id(2)"  # Used in grids without blockIdx.z
        self.registers = 0  # Registers of 32 bits for arrays and `step`s
        self.loads = Loads(names)
        self.open: list[Block] = [Block("")]
        self.lazy = 0  # Depth of expressions that are computed only under a condition

    @property
    def here(self) -> int:
        """The index of the innermost open block."""
        return len(self.open) - 1

    def line(self, text: str) -> None:
        """Write a line in the innermost block."""
        self.open[-1].lines.append(text)

    @contextmanager
    def inside(self, block: Block) -> Iterator[None]:
        """Write in a block, which becomes a line of the one around it only when it is closed."""
        self.open.append(block)
        yield
        self.open.pop()
        block.lines += block.last
        self.open[-1].lines.append(block)
        self.open[-1].marks.clear()

    def load(self, load: LoadText) -> str:
        """Return a mark for a load, reused for an equal load until something is stored to its memory."""
        if self.lazy:
            return load.text
        marks = self.open[-1].marks
        if load.text not in marks:
            marks[load.text] = (self.loads.mark(load), load.memory)
        return marks[load.text][0]

    def record_store(self, memory: str | None = None) -> None:
        """Record a change of memory, of all memory for None: values read from it are read again.

        A private array may also be in the index of a load.
        """
        marks = self.open[-1].marks
        for text in [t for t, (_, where) in marks.items() if memory in (None, where) or str(memory) in t]:
            del marks[text]

    def landing(self, home: int) -> int:
        """Return where to declare a value that changes in block `home`: outside of every loop in that block.

        Where there is no such loop this is the innermost block, so that a condition around it also saves the
        computation.
        """
        for n in range(home + 1, len(self.open)):
            if self.open[n].repeats:
                return n - 1
        return len(self.open) - 1

    def find(self, key: str) -> Term | None:
        """Return the value declared under that key that is still in scope, or None."""
        for block in reversed(self.open):
            if key in block.names:
                return block.names[key]
        return None

    def declare(self, key: str, term: Term, kind: str, wanted: str, at: int, *, address: bool) -> Term:
        """Declare a value, perhaps of an `address`, in an open block and remember it.

        Return the term that names it.

        Mesa 26 gives the two halves of a pointer whatever registers are next where a loop begins, and moves
        them into an even one and the next for each load. Where only pointers live on beyond the loop, all of
        them begin with even registers.
        """
        name = self.names.fresh(wanted)
        named = Term(name, term.type, home=term.home, low=term.low, high=term.high)
        block = self.open[at]
        place = block.before_loop(term.text) if address and self.costly_addresses else len(block.lines)
        block.lines.insert(place, Declaration(name, f"{kind} {name} = {term.text};"))
        block.names[key] = named
        return named

    def step(self, nbytes: int) -> str | None:
        """Return the name of a number of bytes to add to an address in the innermost loop.

        None where the compiler may know the number. Mesa 26 keeps no constants of 64 bits: for each it moves
        two into registers before it adds them, twice as many instructions as for unknown numbers.
        """
        loop = next((block for block in reversed(self.open) if block.repeats), None)
        if not (
            self.costly_addresses and self.hidden_zero and loop is not None and loop.spare and nbytes > 0
        ):
            return None
        text = f"{nbytes}u + {self.hidden_zero}"
        if (found := self.find(text)) is None:
            if self.registers + 2 > _FILLED:
                return None
            self.registers += 2
            term = Term(text, terms.ULONG)
            found = self.declare(text, term, "const ulong", f"by_{nbytes}", 0, address=False)
        return found.text

    def name_value(self, term: Term, wanted: str, always: bool = False) -> Term:
        """Return the name of a pure value, declared outside of the loops that do not change it.

        A value that belongs in the innermost loop is returned unnamed, unless `always`.
        """
        if term.simple or not term.pure:
            return term
        key = f"{terms.name(term.type)} {term.text}"
        if (found := self.find(key)) is not None:
            return found
        at = self.landing(term.home)
        leaves = at < self.here  # The innermost loop
        if not (always or leaves) or (leaves and not self.room(at + 1)):
            return term
        return self.declare(key, term, f"const {terms.name(term.type)}", wanted, at, address=always)

    def room(self, loop: int) -> bool:
        """Count one more value in registers while a loop runs, and return whether there is room."""
        self.open[loop].kept += 1
        return self.open[loop].kept <= _MOST_KEPT

    def text(self) -> list[str]:
        """Return the lines of the whole kernel, indented, without declarations that nothing uses."""
        (outer,) = self.open
        _resolve(outer, self.loads)
        used: Counter[str] = Counter()
        _count(outer, used)
        while _prune(outer, used):
            pass
        return list(_indent(outer, 1))


def _resolve(block: Block, loads: Loads) -> None:
    """Put loads, or the variables they are read into, in the place of their marks."""
    shared = loads.find_shared([_text(line) for line in block.lines])
    named: dict[int, str] = {}
    lines: list[str | Declaration | Block] = []
    for line in block.lines:
        before, text = loads.declare(_text(line), shared, named)
        lines += before
        if isinstance(line, str):
            line = text
        elif isinstance(line, Declaration):
            line.text = text
        else:
            line.header = text
            _resolve(line, loads)
        lines.append(line)
    block.lines = lines


def _text(line: str | Declaration | Block) -> str:
    if isinstance(line, Block):
        return line.header
    return line if isinstance(line, str) else line.text


def _count(block: Block, used: Counter[str]) -> None:
    for line in block.lines:
        used.update(_WORD.findall(_text(line)))
        if isinstance(line, Block):
            _count(line, used)


def _prune(block: Block, used: Counter[str]) -> bool:
    """Drop declarations whose name is not used, the last first; return whether there were any."""
    kept: list[str | Declaration | Block] = []
    dropped = False
    for line in reversed(block.lines):
        if isinstance(line, Block):
            dropped |= _prune(line, used)
        elif isinstance(line, Declaration) and used[line.name] == 1:
            used.subtract(_WORD.findall(line.text))
            dropped = True
            continue
        kept.append(line)
    block.lines = kept[::-1]
    return dropped


def _indent(block: Block, depth: int) -> list[str]:
    found: list[str] = []
    space = "  " * depth
    for line in block.lines:
        if isinstance(line, Block):
            found += [f"{space}{line.header} {{", *_indent(line, depth + 1), f"{space}}}"]
        else:
            found.append(space + _text(line))
    return found
