"""Counts the instructions of a kernel by the pipes of a core, weighted with the turns of its loops.

The pipes and their rates are those of Mesa's own statistics (src/panfrost/compiler, `va_stats`): a clock
issues 64 lanes of FMA and of CVT, 16 of SFU and one of LS. Opcodes not named here were assigned by fitting
the totals that the compiler prints for its kernels (facts: residual 0 over 57 dumps). Textures have Arm's
documented rate: eight texels of up to 32 bits a clock, and half as many of 64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from .dump import BasicBlock, KernelDump
from .lanes import LINE, WARP, Access, LaunchGeometry, accesses, constant_offsets

Pipe = Literal["fma", "cvt", "sfu", "ls", "tex", "none"]

_FMA = frozenset(
    {"FMA", "FMA_RSCALE", "FADD", "FADD_IMM", "FADD_LSCALE", "FADD_RSCALE", "FMUL", "IDP", "IDPADD"}
)
_SFU = frozenset(
    {
        "CLPER", "FCOS_TABLE", "FEXP", "FEXP_TABLE", "FLOGD", "FLOG_TABLE", "FPOW_SC", "FRCP", "FRCP_APPROX",
        "FRSQ", "FRSQ_APPROX", "FSINCOS_OFFSET", "FSIN_TABLE", "IMUL", "IMULD", "MUX", "POPCOUNT",
    }
)  # fmt: skip
_NONE = frozenset({"BARRIER", "BRANCHZI", "COLLECT", "JUMP", "PHI", "SPLIT"})
_LS = ("LOAD", "STORE", "LD_", "ST_", "LEA_", "ATOM", "AXCHG", "ACMPXCHG")
_TEX = "TEX_"
_TEXELS = 8  # Texels of up to 32 bits that a core's texture unit returns in a clock
_BITS = re.compile(r"\.i(\d+)")
_WHOLE = re.compile(r"\^?[ru]\d+(?!\d|\^?\.(?:h00|h11|b))")  # Mesa 26 marks a last use as in r1^.h00


@dataclass(slots=True)
class Counts:
    """Instructions of one warp by pipe, and the lines of 64 bytes that its loads and stores touch."""

    fma: float = 0.0
    half: float = 0.0  # Part of `fma` on one half
    cvt: float = 0.0
    offsets: float = 0.0  # Part of `cvt` that adds constants to addresses, which loads could do themselves
    sfu: float = 0.0
    ls: float = 0.0
    lines: float = 0.0
    tex: float = 0.0
    words: float = 0.0  # Words of 32 bits that `tex` returns to a lane

    def add(self, other: Counts, times: float = 1.0) -> None:
        """Add another's counts, multiplied by `times`."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))

    @property
    def cycles(self) -> dict[str, float]:
        """Clocks of a core by pipe, for one warp."""
        texels = self.words * WARP / _TEXELS
        return {"fma": self.fma / 4, "cvt": self.cvt / 4, "sfu": self.sfu, "ls": self.lines, "tex": texels}


_NAMES = tuple(f.name for f in fields(Counts))


@dataclass(frozen=True, slots=True)
class Counted:
    """A kernel's counts: of a warp's whole run, and of one turn of its main loop (the whole without one)."""

    whole: Counts
    main: Counts
    certain: bool  # True if the turns of all loops are known; an unknown loop counts once


@dataclass(frozen=True, slots=True)
class _CountedLoop:
    first: int
    last: int
    turns: int
    test: int  # The last block that runs once more; before the first if none does


def count(kernel: KernelDump, geometry: LaunchGeometry | None = None) -> Counted:
    """Count a kernel, for a launch of this geometry.

    If the lines that a warp touches are not known, its lanes are assumed to be contiguous in memory.
    """
    touched = accesses(kernel.nir, geometry) if geometry else {}
    offsets = constant_offsets(kernel.nir)
    each = [
        _block(block, touched.get(block.number, []), offsets.get(block.number, 0)) for block in kernel.blocks
    ]
    loops, certain = _loops(kernel)
    weights = [1.0] * len(each)
    for loop in loops:
        for n in range(loop.first, loop.last + 1):
            weights[n] *= loop.turns + (n <= loop.test)
    whole = Counts()
    for counts, weight in zip(each, weights, strict=True):
        whole.add(counts, weight)
    return Counted(whole, _main(each, weights, loops) or whole, certain)


def _block(block: BasicBlock, touched: Sequence[Access], offsets: int) -> Counts:
    """Count a block, whose loads and stores (but not spills) are those of its NIR."""
    found, left = Counts(offsets=offsets), list(touched)
    for text in block.instructions:
        opcode = text.split(" = ", 1)[-1].split()[0]
        pipe = pipe_of(opcode)
        if pipe == "none":
            continue
        issued = 2 if opcode.startswith("SHADDX") else 1  # Adds 64 bits, 32 at a time
        setattr(found, pipe, getattr(found, pipe) + issued)
        if pipe == "fma" and ".v2f16" in opcode and not _is_packed(text):
            found.half += 1
        if pipe == "tex":
            found.words += text.split(" = ", 1)[0].count(":") + 1
        if pipe == "ls":
            bits = _bits(opcode)
            access = next((one for one in left if one.bits == bits), None)
            if access is not None:
                left.remove(access)
            found.lines += access.lines if access else max(1.0, bits * WARP / 8 / LINE)
    return found


def pipe_of(opcode: str) -> Pipe:
    """Return the pipe of an opcode as a dump names it, with or without its modifiers (FMA.v2f16)."""
    base = opcode.split(".", maxsplit=1)[0]
    if base.startswith(_LS):
        return "ls"
    if base.startswith(_TEX):
        return "tex"
    if base in _FMA:
        return "fma"
    if base in _SFU or "SHIFT" in base:
        return "sfu"
    return "none" if base in _NONE else "cvt"


def _is_packed(text: str) -> bool:
    """Return whether an instruction computes two halves: an operand is a whole register, not r1.h00."""
    operands = text.split(" = ", 1)[-1].partition(" ")[2]
    return any(_WHOLE.match(operand.strip()) for operand in operands.split(","))


def _bits(opcode: str) -> int:
    """Return the bits that a lane moves, 32 if the opcode does not say."""
    bits = _BITS.search(opcode)
    return int(bits.group(1)) if bits else 32


def _loops(kernel: KernelDump) -> tuple[list[_CountedLoop], bool]:
    """Return loops by their first and last block, outermost first, and whether all turns are known."""
    places = {block.number: n for n, block in enumerate(kernel.blocks)}
    ends: dict[int, int] = {}
    for n, block in enumerate(kernel.blocks):
        for following in block.successors:
            head = places.get(following, len(places))
            if head <= n:
                ends[head] = max(ends.get(head, 0), n)
    heads = sorted(ends)
    known = len(heads) == len(kernel.trips)
    found = []
    for n, head in enumerate(heads):
        within = range(head, ends[head] + 1)
        turns = kernel.trips[n] if known else None
        again = known and turns is not None and n < len(kernel.once_more) and kernel.once_more[n]
        leaves = (
            m
            for m in within
            if any(places.get(b, len(places)) not in within for b in kernel.blocks[m].successors)
        )
        test = next(leaves, -1) if again else -1
        found.append(_CountedLoop(head, ends[head], turns or 1, test))
    return found, known and all(kernel.trips)


def _main(each: Sequence[Counts], weights: Sequence[float], loops: Sequence[_CountedLoop]) -> Counts | None:
    """Return the counts of one turn of the innermost loop with the most work; None without loops."""

    def work(loop: _CountedLoop) -> float:
        return sum(
            (each[n].fma + each[n].cvt + each[n].sfu + each[n].ls + each[n].tex) * weights[n]
            for n in range(loop.first, loop.last + 1)
        )

    innermost = [a for a in loops if not any(a.first < b.first and b.last <= a.last for b in loops)]
    if not innermost:
        return None
    best, found = max(innermost, key=work), Counts()
    for n in range(best.first, best.last + 1):
        found.add(each[n])
    return found
