"""Device profile: what differs between devices, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from honed.protocol.results import DeviceIdentity, DevicePeaks, Figure

from .families import FAMILIES, DeviceFamily, DriverClass, driver_class

__all__ = ["DeviceIdentity", "DeviceLimits", "DevicePeaks", "DeviceProfile", "Figure", "ScheduleRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What the device can hold and run, as its driver reports it."""

    compute_units: int
    max_work_group_size: int  # Work-items
    max_work_item_sizes: tuple[int, int, int]
    local_mem_bytes: int
    global_mem_bytes: int
    max_alloc_bytes: int
    base_align_bytes: int  # Of sub-buffers
    fp16: bool  # cl_khr_fp16
    fp64: bool  # cl_khr_fp64
    int8_dots: bool  # It has instructions for dot products of four bytes (`opencl.accelerates_dots`)
    host_unified: bool  # Host and device share memory: map instead of copying


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRules:
    """What the compiler must know to write good kernels for the device.

    Mali-G610's figures: Arm's Mali GPU best-practice guides and facts measured by others (`families`).
    """

    family: str  # The name of a row of `families`
    max_threads: int  # Work-items per work-group the schedules may use
    local_memory: bool  # False where local memory is ordinary memory and copying into it buys nothing
    max_vector_bytes: int  # Widest load that pays
    max_unroll: int
    max_source_bytes: int  # Of one kernel's OpenCL C, so that the driver's compiler survives it
    max_queued_launches: int  # Before the executor waits for earlier ones; 0: no cap


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """All of it. `peaks` is None until they were measured."""

    identity: DeviceIdentity
    limits: DeviceLimits
    rules: ScheduleRules
    peaks: DevicePeaks | None

    @property
    def family(self) -> DeviceFamily:
        """What its devices can do, and what pays there."""
        return FAMILIES[self.rules.family]

    @property
    def driver(self) -> DriverClass:
        """Of which class its driver is."""
        return driver_class(self.identity.platform, self.identity.driver_version)

    @property
    def costly_addresses(self) -> bool:
        """Whether its compiler takes four instructions to add a constant to an address."""
        return self.family.by_driver_class and self.driver is DriverClass.MESA_26

    @property
    def pairs_in_turns(self) -> bool:
        """Whether its compiler pairs halves within a turn of a loop, but not those that the loop carries."""
        return self.family.by_driver_class and self.driver is DriverClass.MESA
