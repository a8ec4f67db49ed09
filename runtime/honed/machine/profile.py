"""The profile of a device: all that honed needs to know of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from honed.protocol.results import DeviceIdentity, DevicePeaks, Figure

from .families import FAMILIES, DeviceFamily, DriverClass, driver_class

__all__ = ["DeviceIdentity", "DeviceLimits", "DevicePeaks", "DeviceProfile", "Figure", "ScheduleRules"]


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
    def costly_addresses(self) -> bool:
        """Return whether the driver's compiler takes four instructions to add a constant to an address."""
        return self.family.by_driver_class and self.driver is DriverClass.MESA_26

    @property
    def pairs_in_turns(self) -> bool:
        """Return whether the compiler pairs halves within an iteration of a loop, but not across them."""
        return self.family.by_driver_class and self.driver is DriverClass.MESA
