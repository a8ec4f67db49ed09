"""The profile of a device: all that honed needs to know of it, also as a TOML file, and what its peaks allow.

Files serve to compile for another machine, and to store measured peaks.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from honed.protocol import strict
from honed.protocol.errors import NotFound, ProfileError
from honed.protocol.values import DeviceIdentity, DevicePeaks, Figure

from .families import FAMILIES, DeviceFamily, DriverClass, driver_class

_MANY_UNITS = 64  # Compute units of a large GPU; an H200 has 132
MAX_FILE_BYTES = 64 << 10
# Bytes of a working set that no cache of the devices at hand holds: `bandwidth_gbs` applies from here on.
_BEYOND_CACHES = 64 << 20
# Share of CPU time that other programs may use while peaks are measured, before the peaks are doubted.
_BUSY = 0.1
__all__ = [
    "DeviceIdentity",
    "DeviceLimits",
    "DevicePeaks",
    "DeviceProfile",
    "Figure",
    "ScheduleRules",
    "higher_peaks",
    "is_lower_bound",
    "launch_seconds",
    "least_seconds",
    "measured_while_busy",
    "peak_gbs",
    "peak_gflops",
    "raise_peaks",
    "with_traffic",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """The limits and abilities of a device, as its driver reports them."""

    compute_units: int
    max_work_group_size: int  # Work-items
    max_work_item_sizes: tuple[int, int, int]
    local_mem_bytes: int
    global_mem_bytes: int
    max_alloc_bytes: int
    base_align_bytes: int  # Alignment of sub-buffers in bytes
    fp16: bool  # Extension cl_khr_fp16
    fp64: bool  # Extension cl_khr_fp64
    int8_dots: bool  # Has instructions for dot products of four bytes (`opencl.accelerates_dots`)
    host_unified: bool  # Host and device share memory: map instead of copying

    def allows_group(self, block: Sequence[int]) -> bool:
        """Return whether the device runs work-groups of so many work-items along each axis."""
        along_axes = zip(block, self.max_work_item_sizes, strict=True)
        return math.prod(block) <= self.max_work_group_size and all(n <= most for n, most in along_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRules:
    """The rules for schedules on a device.

    Mali-G610's figures: Arm's Mali GPU best-practice guides and facts measured by others (`families`).
    """

    family: str  # The name of a row of `families`
    max_threads: int  # Work-items per work-group that schedules may use
    local_memory: bool  # False if local memory is ordinary memory and copying to it gains nothing
    max_vector_bytes: int  # Widest load that is faster
    max_unroll: int
    max_source_bytes: int  # Source of one kernel, as larger ones may crash the driver's compiler
    max_queued_launches: int  # Launches in flight before the executor waits; 0: no cap


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The identity, limits, rules and peaks of a device. `peaks` is None until measured."""

    identity: DeviceIdentity
    limits: DeviceLimits
    rules: ScheduleRules
    peaks: DevicePeaks | None

    @property
    def family(self) -> DeviceFamily:
        """The family of the device, as `rules` name it."""
        return FAMILIES[self.rules.family]

    @property
    def driver(self) -> DriverClass:
        """The class of the device's driver."""
        return driver_class(self.identity.platform, self.identity.driver_version)

    @property
    def is_large_gpu(self) -> bool:
        """Return whether this is a GPU of so many compute units that products of 128 rows leave some idle."""
        return not self.family.processor and self.limits.compute_units >= _MANY_UNITS

    @property
    def costly_addresses(self) -> bool:
        """Return whether the driver's compiler takes four instructions to add a constant to an address."""
        return self.family.by_driver_class and self.driver is DriverClass.MESA_26

    @property
    def pairs_in_turns(self) -> bool:
        """Return whether the compiler pairs halves within an iteration of a loop, but not across them."""
        return self.family.by_driver_class and self.driver is DriverClass.MESA

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceProfile:
        """Return the profile in a TOML file; raise NotFound or ProfileError."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError as error:
            raise NotFound(
                f"there is no profile file {path}; write one with `hone doctor --profile`"
            ) from error
        except OSError as error:
            raise ProfileError(
                f"profile file {path} cannot be read ({error.strerror}); check its permissions"
            ) from error
        if len(data) > MAX_FILE_BYTES:
            raise ProfileError(
                f"profile file {path} is larger than {MAX_FILE_BYTES} bytes; give a device profile"
            )
        try:
            return cls.from_dict(tomllib.loads(data.decode()))
        except ValueError as error:  # UnicodeDecodeError or TOMLDecodeError
            raise ProfileError(
                f"profile file {path} is not TOML ({error}); see docs/dev/devices.md"
            ) from error
        except ProfileError as error:
            raise ProfileError(f"profile file {path}: {error}") from error

    def dumps(self) -> str:
        """Return the profile as TOML, one table for each of its parts."""
        lines: list[str] = []
        for table, values in self.to_dict().items():
            lines += [f"[{table}]", *(f"{key} = {_value(value)}" for key, value in values.items()), ""]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the profile as plain maps, without the fields that are None."""
        plain: dict[str, dict[str, Any]] = strict.to_plain(self, omit_none=True)
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> DeviceProfile:
        """Return a profile; raise ProfileError for unknown, missing or impossible figures."""
        try:
            profile = strict.from_plain(cls, plain, where="profile", none_omitted=True)
        except strict.SchemaError as error:
            raise ProfileError(f"{error}; see docs/dev/devices.md for what a profile holds") from error
        profile.check()
        return profile

    def check(self) -> None:
        """Raise ProfileError if a figure is impossible for any device."""
        limits, rules = self.limits, self.rules
        at_least_one = {
            "limits.compute_units": limits.compute_units,
            "limits.max_work_group_size": limits.max_work_group_size,
            **{f"limits.max_work_item_sizes[{i}]": size for i, size in enumerate(limits.max_work_item_sizes)},
            "limits.global_mem_bytes": limits.global_mem_bytes,
            "limits.max_alloc_bytes": limits.max_alloc_bytes,
            "limits.base_align_bytes": limits.base_align_bytes,
            "rules.max_threads": rules.max_threads,
            "rules.max_vector_bytes": rules.max_vector_bytes,
            "rules.max_unroll": rules.max_unroll,
            "rules.max_source_bytes": rules.max_source_bytes,
        }
        for name, value in at_least_one.items():
            if value < 1:
                raise ProfileError(f"{name} is {value}; it must be at least 1")
        if limits.local_mem_bytes < 0 or rules.max_queued_launches < 0:
            raise ProfileError("limits.local_mem_bytes and rules.max_queued_launches must not be negative")
        if limits.base_align_bytes & (limits.base_align_bytes - 1):
            raise ProfileError(
                f"limits.base_align_bytes is {limits.base_align_bytes}; it must be a power of two"
            )
        if rules.max_threads > limits.max_work_group_size:
            raise ProfileError(
                f"rules.max_threads is {rules.max_threads}; it must not exceed limits.max_work_group_size, "
                f"{limits.max_work_group_size}"
            )
        if rules.family not in FAMILIES:
            raise ProfileError(f"rules.family is {rules.family!r}; it must be one of {', '.join(FAMILIES)}")
        if self.peaks is not None:
            _check_peaks(self.peaks)


def _check_peaks(peaks: DevicePeaks) -> None:
    figures = {
        "fp32_gflops": peaks.fp32_gflops,
        "fp16_gflops": peaks.fp16_gflops,
        "bandwidth_gbs": peaks.bandwidth_gbs,
        "launch_us": peaks.launch_us,
    }
    for name, value in figures.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ProfileError(f"peaks.{name} is {value}; it must be a positive number")
    if peaks.busy is not None and not 0 <= peaks.busy <= 1:
        raise ProfileError(f"peaks.busy is {peaks.busy}; it must be a share from 0 to 1")
    if peaks.empty_us is not None and not (math.isfinite(peaks.empty_us) and peaks.empty_us >= 0):
        raise ProfileError(f"peaks.empty_us is {peaks.empty_us}; it must be a number that is not negative")
    sizes = [size for size, _ in peaks.caches_gbs]
    if sizes != sorted(set(sizes)) or min(sizes, default=1) < 1:
        raise ProfileError(f"peaks.caches_gbs has the sizes {sizes}; they must be positive and rise")
    if not all(math.isfinite(rate) and rate > 0 for _, rate in peaks.caches_gbs):
        raise ProfileError("peaks.caches_gbs has a rate that is no positive number")


def _value(value: object) -> str:
    """Return a value as TOML.

    JSON's strings, numbers, booleans and lists are valid TOML, except for DEL in strings.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def measured_while_busy(peaks: DevicePeaks) -> bool:
    """Return whether other programs were busy while the peaks were measured, so that they may be too low."""
    return peaks.busy is not None and peaks.busy > _BUSY


def is_lower_bound(peaks: DevicePeaks, figure: Figure) -> bool:
    """Return whether a figure may be too low: a kernel has exceeded it, or the machine was busy."""
    return figure in peaks.raised or measured_while_busy(peaks)


def peak_gflops(peaks: DevicePeaks, *, half: bool) -> float:
    """Return the peak of arithmetic in GFLOP/s at half or single precision.

    If a device has no peak for half precision, returns that of single precision.
    """
    return (peaks.fp16_gflops if half else None) or peaks.fp32_gflops


def peak_gbs(peaks: DevicePeaks, nbytes: int) -> float:
    """Return the highest rate in GB/s at which a working set of `nbytes` moves.

    It is the best rate of all measured sizes from the nearest smaller one on: a smaller working set may be
    faster because of a cache too small for this one.
    """
    sizes = [size for size, _ in peaks.caches_gbs]
    least = max((size for size in sizes if size <= nbytes), default=0)
    cached = [] if nbytes >= _BEYOND_CACHES else [rate for size, rate in peaks.caches_gbs if size >= least]
    return max([peaks.bandwidth_gbs, *cached])


def least_seconds(peaks: DevicePeaks, flops: float, nbytes: int, *, half: bool) -> float:
    """Return the least seconds for `flops` operations and `nbytes` bytes by Williams' roofline.

    The launch is not included.
    """
    return max(flops / (peak_gflops(peaks, half=half) * 1e9), nbytes / (peak_gbs(peaks, nbytes) * 1e9))


def launch_seconds(peaks: DevicePeaks) -> float:
    """Return the least seconds of any kernel by the device's clock, whatever it does."""
    return 1e-6 * (peaks.launch_us if peaks.empty_us is None else peaks.empty_us)


def higher_peaks(one: DevicePeaks, other: DevicePeaks) -> DevicePeaks:
    """Return the best of two measurements, figure by figure.

    A figure that a kernel raised stays marked as raised if no benchmark reached it.
    """
    half = [rate for rate in (one.fp16_gflops, other.fp16_gflops) if rate is not None]
    load = [share for share in (one.busy, other.busy) if share is not None]
    empty = [us for us in (one.empty_us, other.empty_us) if us is not None]
    caches = {size: rate for peaks in (one, other) for size, rate in peaks.caches_gbs}
    for size, rate in (*one.caches_gbs, *other.caches_gbs):
        caches[size] = max(caches[size], rate)
    raised = {*_figures_unreached(one, other), *_figures_unreached(other, one)}
    return DevicePeaks(
        fp32_gflops=max(one.fp32_gflops, other.fp32_gflops),
        fp16_gflops=max(half, default=None),
        bandwidth_gbs=max(one.bandwidth_gbs, other.bandwidth_gbs),
        launch_us=min(one.launch_us, other.launch_us),
        caches_gbs=tuple(sorted(caches.items())),
        raised=tuple(sorted(raised)),
        empty_us=min(empty, default=None),
        busy=min(load, default=None),
    )


def with_traffic(peaks: DevicePeaks, nbytes: int, rate: float) -> DevicePeaks:
    """Return the peaks after a working set of `nbytes` moved at a measured `rate` in GB/s."""
    if rate <= peak_gbs(peaks, nbytes):
        return peaks
    if nbytes >= _BEYOND_CACHES:
        return replace(peaks, bandwidth_gbs=rate)
    sizes = [size for size, _ in peaks.caches_gbs]
    size = max((size for size in sizes if size <= nbytes), default=min(sizes, default=nbytes))
    return replace(peaks, caches_gbs=tuple(sorted({**dict(peaks.caches_gbs), size: rate}.items())))


def raise_peaks(peaks: DevicePeaks, flops: float, nbytes: int, seconds: float, *, half: bool) -> DevicePeaks:
    """Return the peaks after a verified kernel did `flops` operations and moved `nbytes` in `seconds`."""
    raised, rate, moved = set(peaks.raised), flops / seconds * 1e-9, nbytes / seconds * 1e-9
    if moved > peak_gbs(peaks, nbytes):
        raised.add("bandwidth_gbs")
        peaks = with_traffic(peaks, nbytes, moved)
    if rate > peak_gflops(peaks, half=half):
        figure: Figure = "fp16_gflops" if half and peaks.fp16_gflops else "fp32_gflops"
        raised.add(figure)
        if figure == "fp16_gflops":
            peaks = replace(peaks, fp16_gflops=rate)
        else:
            peaks = replace(peaks, fp32_gflops=rate)
    return replace(peaks, raised=tuple(sorted(raised)))


def _figures_unreached(one: DevicePeaks, other: DevicePeaks) -> list[Figure]:
    """Return the figures of `one` that kernels raised and no benchmark of `other` has reached."""
    ours, theirs = _rates(one), _rates(other)
    return [
        figure
        for figure in one.raised
        if figure in other.raised
        or any(rate > theirs[figure].get(size, 0.0) for size, rate in ours[figure].items())
    ]


def _rates(peaks: DevicePeaks) -> Mapping[Figure, dict[int, float]]:
    """Return the measured rates of each figure, by working set in bytes (0 for arithmetic)."""
    return {
        "fp32_gflops": {0: peaks.fp32_gflops},
        "fp16_gflops": {0: peaks.fp16_gflops or 0.0},
        "bandwidth_gbs": {**dict(peaks.caches_gbs), _BEYOND_CACHES: peaks.bandwidth_gbs},
    }
