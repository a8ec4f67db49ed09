"""The compiler's dump of a program, read: machine code by basic block, and totals."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from .compiler import Dump
from .trips import trip_counts

_KERNEL = "shader: MESA_SHADER_KERNEL"
_FUNCTION = re.compile(r"impl (\w+)")
_BLOCK = re.compile(r"block(\d+) \{")
_TOTALS = re.compile(
    r"(\d+) inst, [\d.]+ cycles, [\d.]+ fma, [\d.]+ cvt, [\d.]+ sfu, [\d.]+ v, [\d.]+ t, [\d.]+ ls, "
    r"\d+ quadwords, (\d+) threads, \d+ loops, (\d+):(\d+) spills"
)


@dataclass(frozen=True, slots=True)
class BasicBlock:
    """A basic block of machine code, in the order in which it lies."""

    number: int
    instructions: tuple[str, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDump:
    """One kernel's machine code. `trips` are those of its loops in program order, None where unknown."""

    name: str
    blocks: tuple[BasicBlock, ...]
    trips: tuple[int | None, ...]
    instructions: int
    half_occupancy: bool  # it takes more than 32 registers, so that a core runs half as many threads
    spills: int
    fills: int


class Unreadable(ValueError):
    """A dump is not what this module knows; the text says what is missing."""


def kernels(dump: Dump) -> dict[str, KernelDump]:
    """The kernels of a program by name. The compiler makes each more than once; the last one counts."""
    lines = dump.code.split("\n")
    starts = [n for n, line in enumerate(lines) if line.startswith(_KERNEL)]
    totals = [match.groups() for match in _TOTALS.finditer(f"{dump.code}\n{dump.stats}")]
    found: dict[str, KernelDump] = {}
    sections = [lines[a:b] for a, b in pairwise([*starts, len(lines)])]
    sections = [section for section in sections if any(_BLOCK.match(line) for line in section)]
    if len(sections) != len(totals):
        raise Unreadable(f"the dump has {len(sections)} kernels and totals of {len(totals)}")
    for section, (instructions, threads, spills, fills) in zip(sections, totals, strict=True):
        kernel = KernelDump(
            name=_name(section),
            blocks=_final_blocks(section),
            trips=tuple(trip_counts(_nir(section))),
            instructions=int(instructions),
            half_occupancy=int(threads) < 2,
            spills=int(spills),
            fills=int(fills),
        )
        found[kernel.name] = kernel
    if not found:
        raise Unreadable("the dump has no kernel")
    return found


def _name(section: list[str]) -> str:
    for line in section:
        if (match := _FUNCTION.search(line)) is not None:
            return match.group(1)
    raise Unreadable("a kernel of the dump has no name")


def _nir(section: list[str]) -> list[str]:
    begin = next((n for n, line in enumerate(section) if line.startswith("impl ")), 0)
    end = next((n for n, line in enumerate(section) if line.startswith("block0 {")), len(section))
    return section[begin:end]


def _final_blocks(section: list[str]) -> tuple[BasicBlock, ...]:
    """The blocks of the last form that is printed."""
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
