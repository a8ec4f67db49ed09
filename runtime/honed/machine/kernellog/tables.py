"""The tables of all drivers whose faults are known, and how their records begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .drivers import (
    amdgpu,
    i915,
    kbase,
    kbase_csf,
    kbase_jm,
    kernel,
    lima,
    msm,
    nvidia,
    panfrost,
    panthor,
    rockchip,
    xe,
)
from .fault import Driver
from .pattern import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTable:
    """What a driver writes when something goes wrong: its records, the one tried first first."""

    driver: Driver
    patterns: tuple[Pattern, ...]
    words: tuple[str, ...] = ()  # names of the driver before its device
    functions: tuple[str, ...] = ()  # module, or how its functions' names begin, in DRM_ERROR
    openings: tuple[str, ...] = ()  # of records that name no device
    inner: str = ""  # expression for what it writes before every message


TABLES: Final = (
    RecordTable(
        driver=Driver.KBASE,
        words=("mali",),
        patterns=(*kbase_jm.PATTERNS, *kbase_csf.PATTERNS, *kbase.PATTERNS),
    ),
    RecordTable(driver=Driver.PANTHOR, words=("panthor",), functions=("panthor",), patterns=panthor.PATTERNS),
    RecordTable(
        driver=Driver.PANFROST, words=("panfrost",), functions=("panfrost",), patterns=panfrost.PATTERNS
    ),
    RecordTable(driver=Driver.LIMA, words=("lima",), functions=("lima",), patterns=lima.PATTERNS),
    RecordTable(driver=Driver.ROCKET, words=("rocket",), patterns=rockchip.ROCKET),
    RecordTable(
        driver=Driver.RKNPU,
        words=("RKNPU",),
        openings=("RKNPU: ",),
        inner="RKNPU: ",
        patterns=rockchip.RKNPU,
    ),
    RecordTable(
        driver=Driver.AMDGPU,
        words=("amdgpu",),
        functions=("amdgpu", "gfx", "gmc", "sdma"),
        openings=("amdgpu: ",),
        inner=r"(?:amdgpu: )?(?:\{\d{1,20}\})?",  # the number of a RAS event
        patterns=(*amdgpu.PATTERNS, *kernel.DRM),
    ),
    RecordTable(
        driver=Driver.I915,
        words=("i915",),
        functions=("i915", "intel"),
        openings=i915.OPENINGS,
        inner=r"(?:GT\d{1,3}: )?(?:GUC: )?",
        patterns=(*i915.PATTERNS, *kernel.DRM),
    ),
    RecordTable(
        driver=Driver.XE,
        words=("xe",),
        functions=("xe",),
        inner=r"(?:Tile\d{1,3}: )?(?:GT\d{1,3}: )?",
        patterns=(*xe.PATTERNS, *kernel.DRM),
    ),
    RecordTable(
        driver=Driver.MSM,
        words=("msm", "msm_dpu", "msm_mdp", "msm_mdss", "mdp4", "adreno"),
        functions=("msm", "adreno", "a2xx", "a3xx", "a4xx", "a5xx", "a6xx", "a8xx"),
        openings=msm.OPENINGS,
        patterns=msm.PATTERNS,
    ),
    RecordTable(driver=Driver.NVIDIA, openings=nvidia.OPENINGS, patterns=nvidia.PATTERNS),
    RecordTable(driver=Driver.KERNEL, openings=kernel.OPENINGS, patterns=kernel.OUT_OF_MEMORY),
)
