"""Reads and writes device profiles as TOML, to compile for another machine and to store measured peaks."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any

from honed.protocol import strict
from honed.protocol.errors import NotFound, ProfileError

from .families import FAMILIES
from .profile import DeviceProfile

MAX_FILE_BYTES = 64 << 10


def load(path: str | os.PathLike[str]) -> DeviceProfile:
    """Return the profile in a TOML file; raise NotFound or ProfileError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFound(f"there is no profile file {path}; write one with `hone doctor --profile`") from error
    except OSError as error:
        raise ProfileError(
            f"profile file {path} cannot be read ({error.strerror}); check its permissions"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise ProfileError(
            f"profile file {path} is larger than {MAX_FILE_BYTES} bytes; give a device profile"
        )
    try:
        return from_dict(tomllib.loads(data.decode()))
    except ValueError as error:  # UnicodeDecodeError or TOMLDecodeError
        raise ProfileError(f"profile file {path} is not TOML ({error}); see docs/dev/devices.md") from error
    except ProfileError as error:
        raise ProfileError(f"profile file {path}: {error}") from error


def dumps(profile: DeviceProfile) -> str:
    """Return `profile` as TOML, one table for each of its parts."""
    lines: list[str] = []
    for table, values in to_dict(profile).items():
        lines += [f"[{table}]", *(f"{key} = {_value(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def to_dict(profile: DeviceProfile) -> dict[str, dict[str, Any]]:
    """Return `profile` as plain maps, without the fields that are None."""
    plain: dict[str, dict[str, Any]] = strict.to_plain(profile, omit_none=True)
    return plain


def from_dict(plain: dict[str, Any]) -> DeviceProfile:
    """Return the profile `plain` describes; raise ProfileError for unknown, missing or impossible figures."""
    try:
        profile = strict.from_plain(DeviceProfile, plain, where="profile", none_omitted=True)
    except strict.SchemaError as error:
        raise ProfileError(f"{error}; see docs/dev/devices.md for what a profile holds") from error
    check(profile)
    return profile


def check(profile: DeviceProfile) -> None:
    """Raise ProfileError if a figure is impossible for any device."""
    limits, rules = profile.limits, profile.rules
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
        raise ProfileError(f"limits.base_align_bytes is {limits.base_align_bytes}; it must be a power of two")
    if rules.max_threads > limits.max_work_group_size:
        raise ProfileError(
            f"rules.max_threads is {rules.max_threads}; it must not exceed limits.max_work_group_size, "
            f"{limits.max_work_group_size}"
        )
    if rules.family not in FAMILIES:
        raise ProfileError(f"rules.family is {rules.family!r}; it must be one of {', '.join(FAMILIES)}")
    _check_peaks(profile)


def _check_peaks(profile: DeviceProfile) -> None:
    peaks = profile.peaks
    if peaks is None:
        return
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
