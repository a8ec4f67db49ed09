"""What a kernel asks of a core's pipes: its instructions, weighted with the turns of its loops.

The pipes and their rates are those of Mesa's own statistics (src/panfrost/compiler, `va_stats`): a clock
issues 64 lanes of FMA and of CVT, 16 of SFU and one of LS. Opcodes not named here were assigned by fitting
the totals that the compiler prints for its kernels (facts: residual 0 over 57 dumps).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from .dump import BasicBlock, KernelDump

Pipe = Literal["fma", "cvt", "sfu", "ls", "none"]

_FMA = frozenset({"FMA", "FMA_RSCALE", "FADD", "FADD_IMM", "FADD_LSCALE", "FADD_RSCALE", "FMUL", "IDP"})
_SFU = frozenset(
    {
        "CLZ", "FCOS_TABLE", "FEXP", "FEXP_TABLE", "FLOGD", "FLOG_TABLE", "FPOW_SC", "FRCP", "FRCP_APPROX",
        "FRSQ", "FRSQ_APPROX", "FSINCOS_OFFSET", "FSIN_TABLE", "IMUL", "IMULD", "MUX", "POPCOUNT",
    }
)  # fmt: skip
_NONE = frozenset({"BARRIER", "BRANCHZI", "COLLECT", "JUMP", "PHI", "SPLIT"})
_LS = ("LOAD", "STORE", "LD_", "ST_", "LEA_", "ATOM", "AXCHG", "ACMPXCHG")
_BITS = re.compile(r"\.i(\d+)")
_WHOLE = re.compile(r"\^?[ru]\d+(?!\d|\.h00|\.h11|\.b)")


@dataclass(slots=True)
class Counts:
    """Instructions of one warp by pipe, and the lines of 64 bytes that its loads and stores touch."""

    fma: float = 0.0
    half: float = 0.0  # of `fma` those on one half
    cvt: float = 0.0
    sfu: float = 0.0
    ls: float = 0.0
    lines: float = 0.0

    def add(self, other: Counts, times: float = 1.0) -> None:
        """Add another's, so many times."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))

    @property
    def cycles(self) -> dict[str, float]:
        """Clocks of a core by pipe, for one warp."""
        return {"fma": self.fma / 4, "cvt": self.cvt / 4, "sfu": self.sfu, "ls": self.lines}


_NAMES = tuple(f.name for f in fields(Counts))


@dataclass(frozen=True, slots=True)
class Counted:
    """A kernel's counts: of a warp's whole run, and of one turn of its main loop (the same without)."""

    whole: Counts
    main: Counts
    certain: bool  # the turns of all loops are known; an unknown loop counts once


@dataclass(frozen=True, slots=True)
class _CountedLoop:
    first: int
    last: int
    turns: int


def counted(kernel: KernelDump) -> Counted:
    """Count a kernel. Lanes of a warp are taken to lie side by side in memory."""
    each = [_block(block) for block in kernel.blocks]
    loops, certain = _loops(kernel)
    weights = [1.0] * len(each)
    for loop in loops:
        for n in range(loop.first, loop.last + 1):
            weights[n] *= loop.turns
    whole = Counts()
    for counts, weight in zip(each, weights, strict=True):
        whole.add(counts, weight)
    return Counted(whole, _main(each, weights, loops) or whole, certain)


def _block(block: BasicBlock) -> Counts:
    found = Counts()
    for text in block.instructions:
        opcode = text.split(" = ", 1)[-1].split()[0]
        pipe = pipe_of(opcode)
        if pipe == "none":
            continue
        setattr(found, pipe, getattr(found, pipe) + 1)
        if pipe == "fma" and ".v2f16" in opcode and not _is_packed(text):
            found.half += 1
        if pipe == "ls":
            found.lines += _lines(opcode)
    return found


def pipe_of(opcode: str) -> Pipe:
    """Return the pipe of an opcode as a dump names it, with or without its modifiers (FMA.v2f16)."""
    base = opcode.split(".", maxsplit=1)[0]
    if base.startswith(_LS):
        return "ls"
    if base in _FMA:
        return "fma"
    if base in _SFU or "SHIFT" in base:
        return "sfu"
    return "none" if base in _NONE else "cvt"


def _is_packed(text: str) -> bool:
    """Whether an instruction computes two halves: one of its operands is a whole register, not r1.h00."""
    operands = text.split(" = ", 1)[-1].partition(" ")[2]
    return any(_WHOLE.match(operand.strip()) for operand in operands.split(","))


def _lines(opcode: str) -> float:
    """Lines that 16 lanes touch: each moves so many bits, beside its neighbour."""
    bits = _BITS.search(opcode)
    return max(1.0, (int(bits.group(1)) if bits else 32) * 16 / 8 / 64)


def _loops(kernel: KernelDump) -> tuple[list[_CountedLoop], bool]:
    """Loops by their first and last block, outermost first, and whether all their turns are known."""
    places = {block.number: n for n, block in enumerate(kernel.blocks)}
    ends: dict[int, int] = {}
    for n, block in enumerate(kernel.blocks):
        for following in block.successors:
            head = places.get(following, len(places))
            if head <= n:
                ends[head] = max(ends.get(head, 0), n)
    heads = sorted(ends)
    known = len(heads) == len(kernel.trips)
    turns = list(kernel.trips) if known else [None] * len(heads)
    found = [_CountedLoop(head, ends[head], count or 1) for head, count in zip(heads, turns, strict=True)]
    return found, known and all(turns)


def _main(each: Sequence[Counts], weights: Sequence[float], loops: Sequence[_CountedLoop]) -> Counts | None:
    """One turn of the innermost loop that most is done in."""

    def work(loop: _CountedLoop) -> float:
        return sum(
            (each[n].fma + each[n].cvt + each[n].sfu + each[n].ls) * weights[n]
            for n in range(loop.first, loop.last + 1)
        )

    innermost = [a for a in loops if not any(a.first < b.first and b.last <= a.last for b in loops)]
    if not innermost:
        return None
    best, found = max(innermost, key=work), Counts()
    for n in range(best.first, best.last + 1):
        found.add(each[n])
    return found
