"""Reads the compiler's dump of a program: machine code by basic block, trip counts of loops, and totals."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from .compiler import Dump

_DEFINITION = re.compile(r"(?:con |div )?\s*\d+(?:x\d+)?\s+(%\d+) = (\S+)\s*(.*)")
_NAME = re.compile(r"\s*(%\d+)")
_CONSTANT = re.compile(r"\((0x[0-9a-f]+|-?\d+)")
_COMPARISON = re.compile(r"[iu](?:ge|lt|eq|ne)\d*")
_CONDITION = re.compile(r"if (%\d+)")


@dataclass(slots=True)
class _Loop:
    phis: dict[str, str] = field(default_factory=dict)
    comparisons: list[tuple[str, list[str]]] = field(default_factory=list)  # Operands, by the value defined
    breaks: list[str] = field(default_factory=list)  # Conditions under which the loop ends


@dataclass(frozen=True, slots=True)
class _Induction:
    start: int
    step: int
    following: str  # The name of its value in the next turn


class _LoopValues:
    """A table of the values that a function defines."""

    def __init__(self) -> None:
        self.constants: dict[str, int] = {}
        self.operations: dict[str, tuple[str, list[str]]] = {}

    def number(self, operand: str) -> int | None:
        """Return the value of a constant operand; a dump shows it in parentheses."""
        shown = _CONSTANT.search(operand)
        if shown:
            value = int(shown.group(1), 0)
            return value - (1 << 32) if 1 << 31 <= value < 1 << 32 else value
        name = _name(operand)
        return self.constants.get(name) if name else None

    def first(self, operand: str) -> int | None:
        """Return a loop's start: a constant, or 0 for a group's place along z."""
        # Kernels use that place to hide a 0 from the compiler.
        return 0 if self._of_place(operand) else self.number(operand)

    def _of_place(self, operand: str) -> bool:
        """Return whether a value is a group's place along z plus something, in 32 or 64 bits."""
        operation, operands = self.operations.get(_name(operand) or "", ("", []))
        if operation == "unpack_64_2x32_split_x":  # Form of Mesa 26.1
            operation, operands = self.operations.get(_name(operands[0]) or "", ("", []))
        return operation.startswith("iadd") and any(map(self._along_z, operands))

    def _along_z(self, operand: str) -> bool:
        operation, operands = self.operations.get(_name(operand) or "", ("", []))
        if operation == "pack_64_2x32_split":
            return self._along_z(operands[0])
        return operation == "@load_workgroup_id" and operand.strip().endswith(".z")


def trip_counts(lines: list[str]) -> list[int | None]:
    """Return the turns of every loop in program order; None if they are not constant."""
    return [turns for turns, _ in _turns(lines)]


def _turns(lines: list[str]) -> list[tuple[int | None, bool]]:
    """Return every loop's turns, and whether the code before its test runs once more.

    It does if the test is of this turn's value, not of the next one's.
    """
    values = _LoopValues()
    loops = _loops(lines, values)
    return [_trips(loop, values) for loop in loops]


def _loops(lines: list[str], values: _LoopValues) -> list[_Loop]:
    found: list[_Loop] = []
    inside: list[tuple[_Loop, int]] = []
    for n, line in enumerate(lines):
        text = line.strip()
        column = len(line) - len(line.lstrip())
        if text.startswith("loop {"):
            found.append(_Loop())
            inside.append((found[-1], column))
        elif inside and text == "}" and column == inside[-1][1]:
            inside.pop()
        elif match := _DEFINITION.match(text):
            _define(match.group(1), match.group(2).rstrip("!"), match.group(3), values, inside)
        elif inside and (match := _CONDITION.match(text)) and any("break" in t for t in lines[n : n + 4]):
            inside[-1][0].breaks.append(match.group(1))
    return found


def _define(
    name: str, operation: str, rest: str, values: _LoopValues, inside: list[tuple[_Loop, int]]
) -> None:
    if operation == "load_const":
        if (shown := _CONSTANT.search(rest)) is not None:
            values.constants[name] = int(shown.group(1), 0)
        return
    operands = rest.split(", ")
    values.operations[name] = (operation.split(".", maxsplit=1)[0], operands)
    if not inside:
        return
    if operation == "phi":
        inside[-1][0].phis[name] = rest
    elif _COMPARISON.match(operation):
        inside[-1][0].comparisons.append((name, operands))


def _trips(loop: _Loop, values: _LoopValues) -> tuple[int | None, bool]:
    inductions = {
        name: found for name, rest in loop.phis.items() if (found := _induction(name, rest, values))
    }
    turns, once_more = None, False
    for defined, operands in loop.comparisons:
        if loop.breaks and defined not in loop.breaks:
            continue
        for name, induction in inductions.items():
            for side in (0, 1):
                if _name(operands[side]) not in (name, induction.following):
                    continue
                limit = values.number(operands[1 - side])
                if limit is not None:
                    turns = max(1, abs(-(-(limit - induction.start) // induction.step)))
                    once_more = _name(operands[side]) == name
    return turns, once_more


def _induction(name: str, phi: str, values: _LoopValues) -> _Induction | None:
    """Return the induction of a phi of a constant and of itself plus a constant; None for other phis."""
    sources = [part.split(":", 1)[1] for part in phi.split(", ") if ":" in part]
    if len(sources) != 2:
        return None
    for start, following in (sources, reversed(sources)):
        added = values.operations.get(_name(following) or "")
        if added is None or not added[0].startswith("iadd"):
            continue
        names = [_name(operand) for operand in added[1]]
        if name not in names[:2]:
            continue
        step = values.number(added[1][1 - names.index(name)])
        first = values.first(start)
        if step and first is not None:
            return _Induction(first, step, _name(following) or "")
    return None


def _name(operand: str) -> str | None:
    match = _NAME.match(operand)
    return match.group(1) if match else None


_KERNEL = "shader: MESA_SHADER_KERNEL"
_FUNCTION = re.compile(r"impl (\w+)")
_BLOCK = re.compile(r"block(\d+) \{")
_TOTALS = re.compile(
    r"(\d+) inst(?:rs)?, [\d.]+ cycles, [\d.]+ fma, [\d.]+ cvt, [\d.]+ sfu, (?:[\d.]+ alu, )?[\d.]+ v, "
    r"[\d.]+ t, [\d.]+ ls, \d+ (?:quadwords|code size), (\d+) threads, \d+ loops, (\d+):(\d+) spills"
    r"(?::fills, \d+ spill cost, (\d+) registers used)?"
)


@dataclass(frozen=True, slots=True)
class BasicBlock:
    """A basic block of machine code, in program order."""

    number: int
    instructions: tuple[str, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDump:
    """The machine code of a kernel.

    `trips` are those of its loops in program order, None if unknown. `once_more` says for each loop whether
    the code before its test runs once more: Mesa 26 rotates loops so that their work does.
    """

    name: str
    blocks: tuple[BasicBlock, ...]
    trips: tuple[int | None, ...]
    once_more: tuple[bool, ...] = ()
    instructions: int
    half_occupancy: bool  # True if it uses more than 32 registers, so that a core runs half as many threads
    spills: int
    fills: int
    registers: int | None = None  # Registers used; Mesa 25 does not say
    nir: tuple[str, ...] = ()  # The source of the machine code


class Unreadable(ValueError):
    """Raised when a dump is not as this module expects; the text says what is missing."""


def kernels(dump: Dump) -> dict[str, KernelDump]:
    """Return the kernels of a program by name.

    The compiler prints each several times; the last one counts. Raises Unreadable.
    """
    text = f"{dump.code}\n{dump.stats}"  # Mesa 26 prints all on its stderr
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if line.startswith(_KERNEL)]
    totals = [match.groups() for match in _TOTALS.finditer(text)]
    found: dict[str, KernelDump] = {}
    sections = [lines[a:b] for a, b in pairwise([*starts, len(lines)])]
    sections = [section for section in sections if any(_BLOCK.match(line) for line in section)]
    if len(sections) != len(totals):
        raise Unreadable(f"the dump has {len(sections)} kernels and totals of {len(totals)}")
    for section, (instructions, threads, spills, fills, registers) in zip(sections, totals, strict=True):
        nir = _nir(section)
        turns = _turns(nir)
        kernel = KernelDump(
            name=_function(section),
            blocks=_final_blocks(section),
            trips=tuple(count for count, _ in turns),
            once_more=tuple(once_more for _, once_more in turns),
            instructions=int(instructions),
            half_occupancy=int(threads) < 2,
            spills=int(spills),
            fills=int(fills),
            registers=int(registers) if registers else None,
            nir=tuple(nir),
        )
        found[kernel.name] = kernel
    if not found:
        raise Unreadable("the dump has no kernel")
    return found


def _function(section: list[str]) -> str:
    for line in section:
        if (match := _FUNCTION.search(line)) is not None:
            return match.group(1)
    raise Unreadable("a kernel of the dump has no name")


def _nir(section: list[str]) -> list[str]:
    begin = next((n for n, line in enumerate(section) if line.startswith("impl ")), 0)
    end = next((n for n, line in enumerate(section) if line.startswith("block0 {")), len(section))
    return section[begin:end]


def _final_blocks(section: list[str]) -> tuple[BasicBlock, ...]:
    """Return the blocks of the last version printed."""
    begin = max(n for n, line in enumerate(section) if line.startswith("block0 {"))
    found: list[BasicBlock] = []
    number, instructions = -1, list[str]()
    for line in section[begin:]:
        if (match := _BLOCK.match(line)) is not None:
            number, instructions = int(match.group(1)), []
        elif line.startswith("}") and number >= 0:
            after = line.split(" from ")[0]
            following = re.findall(r"block(\d+)", after) if "->" in after else []
            found.append(BasicBlock(number, tuple(instructions), tuple(map(int, following))))
            number = -1
        elif number >= 0 and line.strip():
            instructions.append(line.strip())
    return tuple(found)
