"""An inference as a trace that Perfetto and Chrome show: what the host enqueued, what the device computed.

The format is Chrome's ("Trace Event Format"): times in microseconds; X is an event with a duration, M names
a process or a thread, s and f are the ends of an arrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from honed.protocol.results import ModelProfile, ModelShown, ProfiledRow, ShownKernel

_PROCESS, _HOST, _DEVICE = 1, 1, 2
_ROWS = {_HOST: "host", _DEVICE: "device"}
Event = dict[str, Any]  # or a part of one


def trace(profile: ModelProfile, shown: ModelShown) -> Event:
    """The trace of a profile with a timeline (ModelProfile) of a model (ModelShow)."""
    device = profile.device
    events = [
        _metadata("process_name", _HOST, profile.name),
        *(_metadata("thread_name", row, name) for row, name in _ROWS.items()),
        *(_metadata("thread_sort_index", row, row) for row in _ROWS),
        _event("inference", "host", _HOST, (0.0, profile.whole_us), {}),
        *_commands(profile, shown),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "model": profile.name,
            "sha256": shown.sha256,
            "device": device.name,
            "driver": device.driver_version,
            "clocks": "the device's clock is set to the host's by when the first command was enqueued",
        },
    }


def _commands(profile: ModelProfile, shown: ModelShown) -> Iterator[Event]:
    rows = {row.name: row for row in profile.rows}
    kernels = {kernel.name: kernel for kernel in shown.kernels}
    for number, (name, begin, end, computed, completed) in enumerate(profile.timeline or ()):
        kind, arguments = rows[name].kind, _arguments(rows[name], kernels.get(name))
        if computed is None or completed is None:
            yield _event(name, kind, _HOST, (begin, end), arguments)
            continue
        yield _event(f"enqueue {name}", "enqueue", _HOST, (begin, end), {})
        yield _event(name, kind, _DEVICE, (computed, completed), arguments)
        arrow = {"name": "enqueue", "cat": "enqueue", "id": number, "pid": _PROCESS}
        yield {**arrow, "ph": "s", "tid": _HOST, "ts": begin}
        yield {**arrow, "ph": "f", "bp": "e", "tid": _DEVICE, "ts": max(begin, computed)}


def _arguments(row: ProfiledRow, kernel: ShownKernel | None) -> Event:
    """What is known of a command besides its times."""
    if kernel is None:
        return {}
    told = {"task": row.task, "schedule": row.schedule, "share of peak": row.peak_share}
    geometry = {"groups": "x".join(map(str, kernel.grid)), "items": "x".join(map(str, kernel.block))}
    return told | geometry | {"operations": kernel.flops, "bytes": kernel.bytes}


def _event(name: str, kind: str, row: int, span: tuple[float, float], arguments: Event) -> Event:
    begin, end = span
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": begin,
        "dur": end - begin,
        "pid": _PROCESS,
        "tid": row,
        "args": arguments,
    }


def _metadata(kind: str, row: int, value: str | int) -> Event:
    key = "sort_index" if kind == "thread_sort_index" else "name"
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": row, "ts": 0, "args": {key: value}}
