"""Measures the time of an inference by kernel, and how near each comes to the device's peaks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from honed.machine.opencl import event_seconds
from honed.machine.profile import DevicePeaks, least_seconds
from honed.protocol.values import ProfiledRow
from honed.runtime.compiled.model import CompiledModel, Kernel


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A command or a host call of a timed inference.

    `what` is the kernel's number, "copy", or the function of a host call, which has no `event`. The host
    enqueued the command, or ran the host call, from `began` to `done`, in seconds.
    """

    what: int | str
    began: float
    done: float
    event: Any


@dataclass(slots=True)
class Timeline:
    """The record of a timed inference; the host's times are those of time.perf_counter."""

    queue: Any  # Profiling queue in which it runs
    calls: list[TimedCall] = field(default_factory=list)

    def add(self, what: int | str, began: float, event: Any = None) -> None:
        """Note a call that the host is done with now."""
        self.calls.append(TimedCall(what, began, time.perf_counter(), event))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A command or a host call in time, in microseconds since the inference began.

    `name` is that of its row in the profile. `host_us` to `host_end_us` is the host call, or the host's time
    to enqueue the command; the device computed the command from `device_us` to `device_end_us` (None for a
    host call). The clocks are aligned at the time when the first command was enqueued.
    """

    name: str
    host_us: float
    host_end_us: float
    device_us: float | None
    device_end_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceProfile:
    """The times of one inference: `kernels` by falling time, their sum, and the wall time on the host.

    The excess of `whole_us` over `sum_us` is gaps between launches, and the host's work at both ends.
    """

    kernels: tuple[ProfiledRow, ...]
    launches: int
    sum_us: float
    whole_us: float
    spans: tuple[Span, ...]  # Sorted by start on the host


@dataclass(slots=True)
class _TimedRow:
    kernel: Kernel | None
    kind: Literal["kernel", "copy", "host"]
    count: int = 0
    seconds: float = 0.0


def summarise(
    timeline: Timeline, model: CompiledModel, peaks: DevicePeaks | None, began: float, whole_s: float
) -> InferenceProfile:
    """Return the profile of a finished inference, begun at `began` (s), whose events are all complete."""
    rows: dict[str, _TimedRow] = {}
    for call in timeline.calls:
        kernel = model.kernels[call.what] if isinstance(call.what, int) else None
        command: Literal["kernel", "copy"] = "kernel" if kernel else "copy"
        row = rows.setdefault(_name(call, model), _TimedRow(kernel, command if call.event else "host"))
        row.count += 1
        row.seconds += event_seconds(call.event) if call.event else call.done - call.began
    total = sum(row.seconds for row in rows.values())
    timings = [_timing(name, row, total, peaks) for name, row in rows.items()]
    return InferenceProfile(
        kernels=tuple(sorted(timings, key=lambda timing: -timing.us)),
        launches=sum(isinstance(call.what, int) for call in timeline.calls),
        sum_us=total * 1e6,
        whole_us=whole_s * 1e6,
        spans=tuple(_spans(timeline, model, began)),
    )


def _name(call: TimedCall, model: CompiledModel) -> str:
    """Return the name of a call's row in the profile."""
    return f"({call.what})" if isinstance(call.what, str) else model.kernels[call.what].name


def _spans(timeline: Timeline, model: CompiledModel, began: float) -> list[Span]:
    """Return the spans of all commands and host calls, by start on the host."""

    def since(seconds: float) -> float:
        return (seconds - began) * 1e6

    first = next((call for call in timeline.calls if call.event), None)
    offset = since(first.began) - first.event.profile.queued * 1e-3 if first is not None else 0.0
    found = [
        Span(
            name=_name(call, model),
            host_us=since(call.began),
            host_end_us=since(call.done),
            device_us=call.event.profile.start * 1e-3 + offset if call.event else None,
            device_end_us=call.event.profile.end * 1e-3 + offset if call.event else None,
        )
        for call in timeline.calls
    ]
    return sorted(found, key=lambda span: span.host_us)


def roofline_seconds(kernel: Kernel, peaks: DevicePeaks) -> float:
    """Return the least time in seconds that one launch can take by the device's peaks; 0 for unknown work."""
    half = any(arg.dtype == "float16" for arg in kernel.args)
    return least_seconds(peaks, kernel.flops, kernel.bytes, half=half)


def _timing(name: str, row: _TimedRow, total: float, peaks: DevicePeaks | None) -> ProfiledRow:
    kernel, taken = row.kernel, row.seconds
    known = kernel is not None and taken > 0
    least = roofline_seconds(kernel, peaks) * row.count if kernel and peaks and known else 0.0
    return ProfiledRow(
        name=name,
        kind=row.kind,
        task=kernel.task if kernel else "",
        schedule=kernel.schedule if kernel else "",
        count=row.count,
        us=taken * 1e6,
        share=taken / total if total else 0.0,
        gflops=kernel.flops * row.count / taken * 1e-9 if kernel and known else None,
        gbs=kernel.bytes * row.count / taken * 1e-9 if kernel and known else None,
        peak_share=least / taken if least else None,
    )
