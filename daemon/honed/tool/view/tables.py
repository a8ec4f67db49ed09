"""Formats the devices of a service and the partitions and variants of a model for commands."""

from __future__ import annotations

import pwd
from collections.abc import Iterator, Sequence
from typing import Final

from honed.daemon.idle.signals import value_text
from honed.protocol.results import ModelPlacement, ShownVariant
from honed.protocol.service import DeviceStatus, IdleStatus, LeaseStatus, WorkerStatus
from honed.protocol.values import (
    DeviceIdentity,
    PartitionInfo,
    SpecialisationInfo,
    TensorMetadata,
    engine_name,
)
from honed.tool.output import Table, bytes_text, clean, seconds_text, shape_text, table


def device_text(device: DeviceIdentity | None) -> str:
    """Return a device's name, platform and driver."""
    if device is None:
        return "none yet"
    return f"{device.name} ({device.platform}), driver {device.driver_version}"


def worker_text(worker: WorkerStatus) -> str:
    """Return the state of a device's worker, its restarts, and the reason."""
    restarts = f", restarted {worker.restarts} times" if worker.restarts else ""
    reason = f": {worker.reason}" if worker.reason else ""
    return f"{worker.state}{restarts}{reason}"


def device_name(device: DeviceStatus) -> str:
    """Return a device's full name, or what it is called in the configuration."""
    return str(device.spec or device.name or "the best device")


def devices_table(devices: Sequence[DeviceStatus]) -> Table:
    """Return a table of devices with their workers and models; `devices` as in ServerStatus."""
    rows = []
    for each in devices:
        part = "default" if each.default else "stands in" if each.stand_in else ""
        away = (f"{name} (elsewhere until it is back)" for name in each.away)
        waiting, models = str(each.queue.waiting), ", ".join([*each.models, *away])
        engine = engine_name(each.engine)
        rows.append((device_name(each), engine, part, worker_text(each.worker), waiting, models))
    return table(("device", "engine", "", "worker", ">waiting", "models"), rows)


def placement_text(placement: ModelPlacement) -> str:
    """Return the engine and device that serve a model, and why."""
    why = placement.away or placement.why
    return f"{engine_name(placement.engine)} on {placement.served_by}{f' ({why})' if why else ''}"


def lease_rows(lease: LeaseStatus, idle: IdleStatus) -> list[tuple[str, str]]:
    """Return rows on idleness and the lease: its holder, its grants, and how fast tuners released it."""
    rows = [("idle", "yes" if idle.idle else f"no: {idle.why}"), ("lease", _lease_text(lease))]
    if lease.granted:
        late = f", {lease.overdue} too late" if lease.overdue else ""
        rows.append(
            ("", f"{seconds_text(lease.seconds)} in all; granted {lease.granted} times, "
                 f"revoked {lease.revoked} times{late}")
        )  # fmt: skip
    left = lease.release
    if left.count:
        rows.append(
            ("", f"left {left.count} times for a request, after {left.p50_ms:.1f} ms (median), "
                 f"{left.p99_ms:.1f} ms (p99), {left.max_ms:.1f} ms at most")
        )  # fmt: skip
    return rows


def _lease_text(lease: LeaseStatus) -> str:
    holder = lease.holder
    waiting = f"; {lease.waiting} waiting for it" if lease.waiting else ""
    if holder is None:
        return f"free{waiting}"
    since = seconds_text(holder.since_seconds)
    who = f"held by process {holder.pid} of {_user(holder.uid)} for {since}"
    bound = f"{holder.candidate_seconds:g} s"
    if lease.state == "granted":
        return f"{who}, which leaves within {bound}{waiting}"
    leaving = f"told to leave {holder.revoked_seconds:.1f} s ago ({holder.why})"
    return f"{who}, {leaving}{f', overdue: it promised {bound}' if lease.state == 'overdue' else ''}{waiting}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def signals(idle: IdleStatus) -> Table:
    """Return a table of the signals with their values and verdicts."""
    return table(
        ("signal", ">value", "verdict", ""),
        [(r.signal, value_text(r.value, r.unit), r.verdict, r.text) for r in idle.readings],
    )


def in_parts(parts: Sequence[PartitionInfo]) -> Iterator[tuple[str, str]]:
    """Yield rows of a partitioned model: the share compiled, then each CPU partition and why it is one."""
    if not parts:
        return
    compiled = [part for part in parts if part.engine == "gpu"]
    nodes = sum(part.nodes for part in compiled), sum(part.nodes for part in parts)
    flops = sum(part.flops for part in compiled), sum(part.flops for part in parts)
    yield "in parts", compiled_share(nodes, flops)
    for number, part in enumerate(part for part in parts if part.engine == "cpu"):
        where = "behind that" if part.last else "in between"
        handed = f"of {_tensors(part.inputs)} makes {_tensors(part.outputs)}"
        yield "", f"part {number} runs {where} in the CPU engine: {part.nodes} nodes, {handed}"
        yield from (("", f"because of {clean(why)}") for why in part.why)
        if part.sized:
            yield from (("", _form(form)) for form in part.forms)
            yield "", "it is compiled for the sizes that it meets often, when the machine is idle"


def _form(form: SpecialisationInfo) -> str:
    sizes = ", ".join(map(str, form.sizes))
    if form.why:
        return f"not compiled for size {sizes}: {clean(form.why)}"
    if form.compiled_us is None or form.cpu_us is None:
        return f"compiled for size {sizes}"
    return (
        f"compiled for size {sizes}: {form.compiled_us / 1e3:.3g} ms where the CPU engine took "
        f"{form.cpu_us / 1e3:.3g} ms"
    )


def compiled_share(nodes: tuple[int, int], flops: tuple[int, int]) -> str:
    """Return how much of a model is compiled; each pair is (compiled, all)."""
    return (
        f"{nodes[0]} of {nodes[1]} nodes and {flops[0] / max(1, flops[1]):.1%} of the operations are compiled"
    )


def _tensors(tensors: Sequence[TensorMetadata]) -> str:
    return ", ".join(f"{clean(t.name)} {shape_text(t.datatype, t.shape)}" for t in tensors) or "nothing"


NO_MODELS: Final = "There are no models yet; add one with 'hone add FILE'."
VARIANT_HEADINGS: Final = (
    "other shapes",
    ">asked",
    ">answered",
    ">version",
    "engine",
    ">size",
    "state",
    "why",
)


def variant_rows(variants: Sequence[ShownVariant]) -> Iterator[tuple[ShownVariant, tuple[str, ...]]]:
    """Yield each compiled shape variant with its row, the most requested first."""
    for each in sorted(variants, key=lambda each: (-each.requests, each.name)):
        yield (
            each,
            (
                each.name.partition("@")[2] + (" (by hand)" if each.by_hand else ""),
                f"{each.requests:.0f}",
                f"{each.answered:,}",
                str(each.version or "-"),
                engine_name(each.engine),
                bytes_text(each.bytes),
                each.state.lower(),
                each.why,
            ),
        )


def engine_text(engine: str, pinned: str, variants: int) -> str:
    """Return the engine that serves a model, whether it is pinned, and the number of variants."""
    return f"{engine_name(engine)}{', pinned' if pinned else ''}{f' +{variants}' if variants else ''}"
