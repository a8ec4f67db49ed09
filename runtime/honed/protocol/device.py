"""Who a device is, and what it was measured to reach at most."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """Who the device is; compiled models and tuning records are kept per identity."""

    platform: str
    vendor: str
    name: str
    driver_version: str
    kernel_driver: str  # "kbase", "panthor", "panfrost", "nvidia", or "" where there is none

    @property
    def key(self) -> str:
        """SHA-256 of the identity as canonical JSON, without the driver's version."""
        identity = asdict(self)
        del identity["driver_version"]
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


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
