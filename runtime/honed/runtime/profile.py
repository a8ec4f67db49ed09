"""Device profile: what differs between devices, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .families import FAMILIES, DeviceFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """Who the device is; compiled models and tuning records are kept per identity."""

    platform: str
    vendor: str
    name: str
    driver_version: str
    kernel_driver: str  # "kbase", "panthor", "panfrost", "nvidia", or "" where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What the device can hold and run, as its driver reports it."""

    compute_units: int
    max_work_group_size: int  # work-items
    max_work_item_sizes: tuple[int, int, int]
    local_mem_bytes: int
    global_mem_bytes: int
    max_alloc_bytes: int
    base_align_bytes: int  # of sub-buffers
    fp16: bool  # cl_khr_fp16
    fp64: bool  # cl_khr_fp64
    host_unified: bool  # host and device share memory: map instead of copying


Figure = Literal["fp32_gflops", "fp16_gflops", "bandwidth_gbs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """What no kernel on the device passes: the best of several microbenchmarks, and of the kernels that were
    proven faster than those (docs/devices.md). `bounds` computes with them.
    """

    fp32_gflops: float
    fp16_gflops: float | None  # None without cl_khr_fp16
    bandwidth_gbs: float  # GB/s beyond all caches, reading and writing counted together
    launch_us: float  # from one empty kernel to the next in a long queue, which the host may be what limits
    # What moves faster because caches hold it: bytes of a working set, rising, and the GB/s it moves at.
    # Empty where it was not measured.
    caches_gbs: tuple[tuple[int, float], ...] = ()
    # Figures that kernels have passed: what stands for them is a bound from below only. "bandwidth_gbs"
    # speaks for the caches too.
    raised: tuple[Figure, ...] = ()
    empty_us: float | None = None  # END - START of an empty kernel, at the least; None: not measured
    busy: float | None = None  # share of the CPUs' time that others took meanwhile; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRules:
    """What the compiler must know to write good kernels for the device.

    Mali-G610's figures: Arm's Mali GPU best-practice guides and facts measured by others (docs/devices.md).
    """

    family: str  # the name of a row of `families`
    max_threads: int  # work-items per work-group the schedules may use
    local_memory: bool  # False where local memory is ordinary memory and copying into it buys nothing
    max_vector_bytes: int  # widest load that pays
    max_unroll: int
    max_source_bytes: int  # of one kernel's OpenCL C, so that the driver's compiler survives it
    max_queued_launches: int  # before the executor waits for earlier ones; 0: no cap


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
