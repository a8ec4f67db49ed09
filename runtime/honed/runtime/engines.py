"""Which of two engines is to run a model, or a part of one, by times taken in turns.

And how far ONNX Runtime may optimise what it runs, and what the process of a model's parts may take.
"""

from __future__ import annotations

from honed.protocol.dataclass import dataclass

# How far ONNX Runtime optimises a graph, the highest level first, and its own name of each.
LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "layout": "ORT_ENABLE_LAYOUT",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "none": "ORT_DISABLE_ALL",
}
HIGHEST, LOWEST = "all", "none"
PROVING_MIB = 1024  # of the parts' process where a model is compiled and compared with its reference
TIE = 1.2  # the compiled form may take so many times as long, and leaves the processor to apps


def allowance(*, same_cores: bool) -> float:
    """Return how many times as long as the CPU engine a compiled model may take and still serve.

    On a processor under OpenCL, with `same_cores`, a compiled model leaves nothing to apps, so that it must
    be as fast.
    """
    return 1.0 if same_cores else TIE


def compiled_serves(compiled: float, cpu: float, *, same_cores: bool) -> bool:
    """Return whether a compiled model is as fast as the CPU engine, or nearly so."""
    return compiled <= allowance(same_cores=same_cores) * cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimits:
    """Threads of one run (0: as many as are good) and memory in MiB (0: any)."""

    threads: int = 0
    memory_mib: int = 0


UNLIMITED = PartLimits()
