"""Decides which of two engines runs a model, or a partition of one, from their times.

It also has ONNX Runtime's optimisation levels and error messages, and the limits of a process that runs
partitions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# ONNX Runtime's optimisation levels, highest first, with its own names of them.
LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "layout": "ORT_ENABLE_LAYOUT",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "none": "ORT_DISABLE_ALL",
}
HIGHEST, LOWEST = "all", "none"
PROVING_MIB = 1024  # Memory of the partitions' process while a model is verified after compiling, in MiB
TIE = 1.2  # A compiled model may be slower by this factor, as it leaves the processor to apps


def session_options(onnxruntime: Any, threads: int, level: str, *, spinning: bool, arena: bool = True) -> Any:
    """Return SessionOptions of the module `onnxruntime` with which the CPU engine runs a model."""
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


_MOST_SAID = 300  # Characters
_SOURCE = re.compile(r"(?:Status Message: )?(?:[^\s'\"]*/)?[\w.-]+\.(?:cc|cpp|cu|h|hpp|inl):\d+ ")
_NAME = re.compile(r"[\w~]+(?:\(\))? ")
_BEHIND_PARAMETERS = re.compile(r"(?: const| noexcept|::<lambda)|(?=\()| (?=\[with )")
_CONDITION = re.compile(r"^(?:(?!\. ).)*? was false\. (?=\S)")


def message_of(error: Exception) -> str:
    """Return the message of an error of ONNX Runtime on one line.

    Leaves out the prefix, the paths, functions and conditions of its source code, and sentences that would
    not end within _MOST_SAID characters.
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from \S+ failed: ?", "", text)
    text = re.sub(r" Name:''", "", text)
    while found := _SOURCE.search(text):
        text = text[: found.start()] + _CONDITION.sub("", _without_function(text[found.end() :]))
    if len(text) > _MOST_SAID:
        whole = max(text.rfind(end, 0, _MOST_SAID) for end in (". ", "; "))
        text = text[:whole] if whole > 0 else text[:_MOST_SAID].rpartition(" ")[0] + " ..."
    return text.strip() or type(error).__name__


def _without_function(text: str) -> str:
    """Return the text after the function name, and its parameters if any, with which it begins."""
    name, parenthesis, _ = text.partition("(")
    if not parenthesis or "::" not in name or ". " in name:
        return _NAME.sub("", text, count=1)
    at = _closing_index(text, len(name))
    while found := _BEHIND_PARAMETERS.match(text, at):
        opening = next((n for n in range(found.end(), len(text)) if text[n] in "([<"), len(text))
        bracketed = not found.group() or found.group() in ("::<lambda", " ")
        at = _closing_index(text, opening) if bracketed else found.end()
    return text[at:].lstrip(" >")


def _closing_index(text: str, opening: int) -> int:
    """Return the index after the bracket that closes the one at `opening`, or the end of the text."""
    depth = 0
    for n in range(opening, len(text)):
        depth += (text[n] in "([") - (text[n] in ")]")
        if depth == 0:
            return n + 1
    return len(text)


def allowance(*, same_cores: bool) -> float:
    """Return how many times as long as the CPU engine a compiled model may take and still serve.

    With `same_cores` (a processor under OpenCL) a compiled model frees no core for apps, so it must be as
    fast.
    """
    return 1.0 if same_cores else TIE


def can_compiled_serve(compiled: float, cpu: float, *, same_cores: bool) -> bool:
    """Return whether a compiled model is fast enough to serve, by its time and the CPU engine's."""
    return compiled <= allowance(same_cores=same_cores) * cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimits:
    """Limits of partitions: threads of one run (0: one for each big core) and memory in MiB (0: no limit)."""

    threads: int = 0
    memory_mib: int = 0


UNLIMITED = PartLimits()
