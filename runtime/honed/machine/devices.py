"""The OpenCL devices of this machine and their profiles.

python -m honed.machine.devices lists them, for processes that must not load their drivers
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.process.children import answering, python, run
from honed.protocol.errors import DeviceError, NotFound

from .families import DeviceFamily, family_of
from .files import gpu_hz
from .opencl import accelerates_dots, cl, driver_call
from .profile import DeviceIdentity, DeviceLimits, DeviceProfile, ScheduleRules
from .vendors import driver_environments

PLATFORM_NOT_FOUND = -1001  # CL_PLATFORM_NOT_FOUND_KHR: the loader found no driver
_LISTING_SECONDS = 30.0  # Seconds for one driver to list its devices
_KERNEL_DRIVERS = {"mali": "kbase", "panthor": "panthor", "panfrost": "panfrost", "nvidia": "nvidia"}


@dataclass(frozen=True, slots=True)
class Device:
    """A usable OpenCL device. `spec` selects it again on this machine, also after a reboot."""

    profile: DeviceProfile
    spec: str
    cl: Any  # A pyopencl.Device

    @property
    def kind(self) -> str:
        """The driver's word for it: "GPU", "accelerator" or "CPU"."""
        if self.cl.type & cl.device_type.GPU:
            return "GPU"
        return "accelerator" if self.cl.type & cl.device_type.ACCELERATOR else "CPU"

    def clock_hz(self) -> int | None:
        """Return the present clock in Hz; None for a processor, or if it cannot be read."""
        return None if self.profile.family.processor else gpu_hz()


def discover() -> list[Device]:
    """Return every device that can compile and run kernels, ordered by platform name, then device name.

    It loads all drivers that this process sees: `select` restricts it to one if PoCL is installed beside
    another. Raises DeviceError if the loader itself fails; no device at all is an empty list.
    """
    found: list[tuple[DeviceProfile, Any]] = []
    for platform in _platforms():
        with driver_call(f"list the devices of {_text(platform.name)}"):
            found += [
                (profile_of(d), d) for d in platform.get_devices() if d.available and d.compiler_available
            ]
    found.sort(key=lambda pair: (pair[0].identity.platform, pair[0].identity.name))
    names = [f"{profile.identity.platform}/{profile.identity.name}" for profile, _ in found]
    return [Device(profile, _number_name(names, i), device) for i, (profile, device) in enumerate(found)]


def select(spec: str | None = None) -> Device:
    """Return the device that `spec` names, or $HONED_DEVICE, or else the best: a GPU, an accelerator, a CPU.

    `spec` is a number (of `discover`'s order), a kind ("gpu", "accelerator" or "cpu": the first of it), or
    part of "platform/device", ignoring case. Raises NotFound if it fits none or several, DeviceError if there
    is no device at all.

    If PoCL is installed beside another driver, this process and its children load only this device's driver
    from now on.
    """
    spec = spec or os.environ.get("HONED_DEVICE") or None
    if len(views := driver_environments(os.environ)) > 1:
        spec = _see_one_driver(spec, views)
    devices = discover()
    return devices[_choose(spec, [(device.spec, device.kind) for device in devices])]


def _choose(spec: str | None, devices: Sequence[tuple[str, str]]) -> int:
    """Return the index of the device that a spec names among names and kinds; raise as `select`."""
    if not devices:
        raise DeviceError("there is no usable OpenCL device on this machine; run `hone doctor` to see why")
    names, kinds = [name for name, _ in devices], [kind.casefold() for _, kind in devices]
    if spec is None:
        return min(range(len(kinds)), key=lambda i: ("gpu", "accelerator", "cpu").index(kinds[i]))
    of_kind = [i for i, kind in enumerate(kinds) if kind == spec.casefold()]
    fitting = of_kind[:1] or matching(spec, names)
    if len(fitting) != 1:
        listed = "; ".join(f"{i}: {names[i]}" for i in (fitting or range(len(names))))
        problem = "fits several devices" if fitting else "fits no device"
        raise NotFound(f"device {spec!r} {problem}; use one of {listed}, or see `hone doctor`")
    return fitting[0]


def _see_one_driver(spec: str | None, views: Sequence[Mapping[str, str]]) -> str:
    """Restrict this process to the driver of the device that `spec` names; return the device's name.

    Lists the devices of each of the `views`, variables that load one driver, in a process of its own, until
    `spec` is the whole name of a device.
    """
    found: list[tuple[str, str, str, Mapping[str, str]]] = []
    for view in views:
        found += [(*device, view) for device in _list_driver_devices(view)]
        if any(f"{platform}/{name}" == spec for platform, name, _, _ in found):
            break
    found.sort(key=lambda device: device[:2])
    names = [f"{platform}/{name}" for platform, name, _, _ in found]
    devices = [(_number_name(names, i), kind) for i, (_, _, kind, _) in enumerate(found)]
    chosen = _choose(spec, devices)
    os.environ.update(found[chosen][3])
    return devices[chosen][0]


def _list_driver_devices(view: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return platform, name and kind of the devices of one driver; none if it fails."""
    answers, _ = run(python(__name__), seconds=_LISTING_SECONDS, environment={**os.environ, **view})
    return [(each["platform"], each["name"], each["kind"]) for each in answers]


def matching(spec: str, names: Sequence[str]) -> list[int]:
    """Return the indices of the names that a spec fits: by number, else whole name, else part of a name.

    " #0" in a whole name is optional: a name has it only while a second device has the same name.
    """
    if spec.isascii() and spec.isdigit():
        return [int(spec)] if int(spec) < len(names) else []
    wanted = spec.casefold()
    first = wanted.removesuffix(" #0")
    exact = [i for i, name in enumerate(names) if name.casefold().removesuffix(" #0") == first]
    return exact or [i for i, name in enumerate(names) if wanted in name.casefold()]


def profile_of(device: Any) -> DeviceProfile:
    """Return identity, limits and rules of a pyopencl device, as its driver and /sys report them.

    The profile has no peaks.
    """
    limits = _limits(device)
    platform, name, vendor = (_text(s) for s in (device.platform.name, device.name, device.vendor))
    family = family_of(name, is_cpu=bool(device.type & cl.device_type.CPU))
    identity = DeviceIdentity(
        platform=platform,
        vendor=vendor,
        name=name,
        # Arm's CL_DRIVER_VERSION is just "3.0"; CL_DEVICE_VERSION has its release.
        driver_version=f"{_text(device.driver_version)}; {_text(device.version)}",
        kernel_driver=kernel_driver(family, platform, vendor),
    )
    return DeviceProfile(identity=identity, limits=limits, rules=rules_for(family, limits), peaks=None)


def rules_for(family: DeviceFamily, limits: DeviceLimits) -> ScheduleRules:
    """Return the schedule rules of a family, within the limits of one device."""
    return ScheduleRules(
        family=family.name,
        max_threads=min(family.max_threads, limits.max_work_group_size),
        local_memory=family.local_memory and limits.local_mem_bytes > 0,
        max_vector_bytes=family.max_vector_bytes,
        max_unroll=family.max_unroll,
        max_source_bytes=family.max_source_bytes,
        max_queued_launches=family.max_queued_launches,
    )


def kernel_driver(family: DeviceFamily, platform: str, vendor: str, sys: Path = Path("/sys")) -> str:
    """Return the name of the kernel driver bound to the device, as `sys` shows it.

    The name is "kbase", "panthor", "panfrost", "nvidia", or "" if none is found.
    """
    maker = f"{platform}/{vendor}".casefold()
    wanted = next((names for part, names in family.drivers if part in maker), ())
    bound = {
        _KERNEL_DRIVERS[link.resolve().name]
        for pattern in (
            "class/drm/*/device/driver",
            "class/misc/mali*/device/driver",
            "bus/pci/drivers/nvidia",
        )
        for link in sys.glob(pattern)
        if link.resolve().name in _KERNEL_DRIVERS
    }
    return next((name for name in wanted if name in bound), "")


def _platforms() -> list[Any]:
    try:
        return list(cl.get_platforms())
    except cl.Error as error:
        if error.code == PLATFORM_NOT_FOUND:
            return []
        with driver_call("list the OpenCL platforms"):
            raise


def _limits(device: Any) -> DeviceLimits:
    extensions = device.extensions.split()
    sizes = [*device.max_work_item_sizes, 1, 1][:3]
    return DeviceLimits(
        compute_units=device.max_compute_units,
        max_work_group_size=device.max_work_group_size,
        max_work_item_sizes=(sizes[0], sizes[1], sizes[2]),
        local_mem_bytes=device.local_mem_size,
        global_mem_bytes=device.global_mem_size,
        max_alloc_bytes=device.max_mem_alloc_size,
        base_align_bytes=max(1, device.mem_base_addr_align // 8),  # Reported in bits
        fp16="cl_khr_fp16" in extensions,
        fp64="cl_khr_fp64" in extensions,
        int8_dots=accelerates_dots(device),
        host_unified=bool(device.host_unified_memory),
    )


def _number_name(names: Sequence[str], i: int) -> str:
    """Return names[i], with a number if several devices share the name."""
    if names.count(names[i]) == 1:
        return names[i]
    return f"{names[i]} #{names[:i].count(names[i])}"


def _text(reported: str) -> str:
    """Return a driver's string without the padding and zero bytes that some drivers add."""
    return reported.replace("\0", "").strip()


if __name__ == "__main__":
    with answering() as say:
        for found in discover():
            identity = found.profile.identity
            say({"platform": identity.platform, "name": identity.name, "kind": found.kind})
