"""Which of a core's pipes an instruction of Valhall goes through.

The pipes and their rates are those of Mesa's own statistics (src/panfrost/compiler, `va_stats`): a clock
issues 64 lanes of FMA and of CVT, 16 of SFU and one of LS. Opcodes not named here were assigned by fitting
the totals that the compiler prints for its kernels (facts: residual 0 over 57 dumps).
"""

from __future__ import annotations

from typing import Literal

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


def pipe_of(opcode: str) -> Pipe:
    """The pipe of an opcode as a dump names it, with or without its modifiers (FMA.v2f16)."""
    base = opcode.split(".", maxsplit=1)[0]
    if base.startswith(_LS):
        return "ls"
    if base in _FMA:
        return "fma"
    if base in _SFU or "SHIFT" in base:
        return "sfu"
    return "none" if base in _NONE else "cvt"
