"""Which of two engines is to run a model, or a part of one, by times taken in turns.

And how far ONNX Runtime may optimise what it runs, and what the process of a model's parts may take.
"""

from __future__ import annotations

from typing import Any

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


def session_options(onnxruntime: Any, threads: int, level: str, *, spinning: bool, arena: bool = True) -> Any:
    """Return the SessionOptions of the module `onnxruntime` by which the CPU engine runs a model."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, LEVELS[level])
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = arena
    options.log_severity_level = 4
    # Threads wait actively within a run, and not after it, which would take the cores from apps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    return options


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
