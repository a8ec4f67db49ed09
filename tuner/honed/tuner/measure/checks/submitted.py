"""Checks of a candidate of which the device knows nothing yet."""

from __future__ import annotations

from dataclasses import dataclass

from honed.machine.profile import DeviceLimits, DeviceProfile
from honed.tuner.lower.barriers import divergent_barriers
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.measure.limits import MeasureLimits
from honed.tuner.verdict import Outcome

from .row import Refusal, VerdictCheck


def source_size(source: str, limit: int) -> Refusal | None:
    """Refuse a source longer than the profile's bound (bytes)."""
    size = len(source.encode())
    if size <= limit:
        return None
    return Refusal(Outcome.BUILD, f"its source has {size} bytes and the device's profile allows {limit}")


def barriers(source: str) -> Refusal | None:
    """Refuse a barrier that some work-items of a group may not reach."""
    found = divergent_barriers(source)
    return Refusal(Outcome.BARRIER, str(found[0])) if found else None


def sound(workload: Workload, candidate: Candidate, limits: DeviceLimits) -> Refusal | None:
    """Refuse launches whose arguments or geometry cannot be right."""
    sizes = [value.nbytes for value in (*workload.parameters, *candidate.inner)]
    for launch in candidate.launches:
        if any(not 0 <= index < len(sizes) for index in launch.args):
            return Refusal(Outcome.BUILD, f"launch {launch.entry} names a buffer that does not exist")
        for index, kind in zip(launch.args, launch.arg_types, strict=True):
            if kind.nbytes > sizes[index]:
                return Refusal(
                    Outcome.BUILD,
                    f"launch {launch.entry} needs {kind.nbytes} bytes of buffer {index}, "
                    f"which has {sizes[index]}",
                )
        items = launch.block[0] * launch.block[1] * launch.block[2]
        fits = items <= limits.max_work_group_size and all(
            n <= most for n, most in zip(launch.block, limits.max_work_item_sizes, strict=True)
        )
        if not fits or min(*launch.grid, *launch.block) < 1:
            return Refusal(
                Outcome.BUILD,
                f"launch {launch.entry} has work-groups of {list(launch.block)} and the device takes "
                f"{limits.max_work_group_size} work-items",
            )
    return None


def memory(nbytes: int, limit: int) -> Refusal | None:
    """Refuse buffers that take more than `limit` bytes together."""
    if nbytes <= limit:
        return None
    return Refusal(Outcome.MEMORY, f"its buffers need {nbytes >> 20} MiB and {limit >> 20} MiB are allowed")


def private_memory(name: str, each: int, items: int, units: int, limit: int) -> Refusal | None:
    """Refuse a kernel whose work-items need more private memory than `limit`, with a group on every unit.

    `each` is what the driver says of one work-item (bytes), `items` how many a group has.
    """
    need = each * items * units
    if need <= limit:
        return None
    return Refusal(
        Outcome.MEMORY,
        f"kernel {name} needs {each} bytes of private memory for each work-item, {need >> 20} MiB on the "
        f"whole device, and {limit >> 20} MiB are allowed",
    )


@dataclass(frozen=True, slots=True)
class Submitted:
    """A candidate of which the device knows nothing yet."""

    workload: Workload
    candidate: Candidate
    profile: DeviceProfile
    limits: MeasureLimits


def _memory(seen: Submitted) -> Refusal | None:
    values = (*seen.workload.parameters, *seen.candidate.inner)
    return memory(sum(value.nbytes for value in values), seen.limits.memory_bytes)


# Before anything is given to the device.
SUBMITTED: tuple[VerdictCheck[Submitted], ...] = (
    VerdictCheck(
        "source", lambda seen: source_size(seen.candidate.source, seen.profile.rules.max_source_bytes)
    ),
    VerdictCheck("barriers", lambda seen: barriers(seen.candidate.source)),
    VerdictCheck("sound", lambda seen: sound(seen.workload, seen.candidate, seen.profile.limits)),
    VerdictCheck("memory", _memory),
)
