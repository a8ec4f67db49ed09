"""Runs the compiler in a child process with limits of time and memory, and reads what it reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime.errors import HonedError, ModelRefused, ResourceExhausted
from honed.runtime.protocol import MissingFiles, error_from_map

from . import tunerprocess
from .children import describe_exit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Progress: `fraction` of the whole compilation, 0 to 1."""

    stage: str
    fraction: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The compiled file is written."""


Report = Stage | Done | HonedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to compile, for which device, within which limits."""

    model: Path
    output: Path
    shown_name: str
    shapes: Mapping[str, Sequence[int]]
    precision: str
    profile: Path
    device: str
    seconds: float
    memory_mib: int
    check: bool = False  # only find out whether it can be compiled
    calibration: Path | None = None  # a folder of inputs that errors in fp16 are measured on
    records: Path | None = None  # what tuning has recorded, for the best schedules known of this device

    @property
    def arguments(self) -> list[str]:
        """For `python -m honed.tuner`."""
        shapes = [f"--shape={name}={','.join(map(str, shape))}" for name, shape in self.shapes.items()]
        return [
            "compile",
            str(self.model),
            "-o",
            str(self.output),
            *shapes,
            f"--precision={self.precision}",
            f"--profile={self.profile}",
            f"--device={self.device}",
            f"--memory-mib={self.memory_mib}",
            f"--name={self.shown_name}",
            *((f"--calibration={self.calibration}",) if self.calibration else ()),
            *((f"--records={self.records}",) if self.records else ()),
            *(("--check",) if self.check else ()),
        ]


async def compile_model(task: Task, progress: Callable[[Stage], None]) -> None:
    """Compile, or only check; a compiled file is there when this returns. Cancelling ends the child.

    Raises ModelRefused with every reason, MissingFiles, ResourceExhausted where a limit was reached,
    Unavailable without a compiler, or another error the compiler reports.
    """
    last: Report | None = None

    def heard(line: bytes) -> None:
        nonlocal last
        report = parse(line)
        if isinstance(report, Stage):
            progress(report)
        elif report is not None:
            last = report

    try:
        status = await tunerprocess.run(
            task.arguments, heard, memory_mib=task.memory_mib, seconds=task.seconds, niceness=0
        )
    except TimeoutError as error:
        raise ResourceExhausted(
            f"compiling took longer than {task.seconds:g} s; raise compile_seconds in the configuration, "
            "or use a smaller model"
        ) from error
    if isinstance(last, HonedError):
        raise last
    if last is None or status != 0:
        raise ModelRefused(
            f"the compiler stopped without a result ({describe_exit(status)}); it may have needed more than "
            f"the {task.memory_mib} MiB of compile_memory_mib, the service's log says more"
        )


def parse(line: bytes) -> Report | None:
    """What one line of the compiler's standard output says; None where it is no report."""
    try:
        event: Any = json.loads(line)
        kind = event["event"]
    except (ValueError, TypeError, KeyError):
        _log.warning("the compiler wrote what is no report: %.200r", line)
        return None
    match kind:
        case "stage":
            fraction = event.get("fraction")
            return Stage(
                stage=str(event.get("stage", "")),
                fraction=min(1.0, max(0.0, float(fraction))) if isinstance(fraction, int | float) else 0.0,
                text=str(event.get("text", ""))[:1000],
            )
        case "done":
            return Done()
        case "error":
            return error_from_map({"message": "the compiler gave no reason", **event})
        case "refused":
            message = str(event.get("message", "the compiler gave no reason"))
            reasons = _strings(event.get("reasons"))
            files = _strings(event.get("external_data"))
            return MissingFiles(message, reasons, files) if files else ModelRefused(message, reasons)
        case _:
            return None


def _strings(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
