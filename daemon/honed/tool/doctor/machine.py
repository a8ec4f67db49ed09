"""Reads the hardware and the kernel from /sys, /proc and /dev beneath a root folder; judges nothing.

Paths: the kernel's ABI documentation (sysfs-class-devfreq, drm render nodes) and Arm's kbase driver, which
makes /dev/mali0 as a misc device. Links are followed by name only, so that any root will do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from honed.daemon.idle.signals import temperatures
from honed.machine import sysfs

from .accounts import AccountNames
from .readings import Clock, DeviceNode, GpuHardware, Hardware

_GPU_DRIVERS = {"amdgpu", "i915", "nouveau", "nvidia", "panfrost", "panthor", "radeon", "xe"}
_FIRMWARE = "lib/firmware/arm/mali/arch10.8/mali_csffw.bin"
_DISPLAY_CLASS = "0x03"  # PCI base class of display controllers


def read_machine(root: Path, names: AccountNames) -> Hardware:
    """Everything `readings.Machine` holds, for the system whose root folder is `root`."""
    memory = _meminfo(_text(root / "proc/meminfo"))
    gpus = (*_platform_gpus(root), *_pci_gpus(root))
    paths = sorted({node for gpu in gpus for node in gpu.nodes} | _loose_nodes(root))
    return Hardware(
        model=_text(root / "proc/device-tree/model").strip("\0 ") or _text(root / _DMI_NAME),
        kernel=_text(root / "proc/sys/kernel/osrelease"),
        cpus=sum(1 for p in _glob(root, "sys/devices/system/cpu/cpu[0-9]*") if p.name[3:].isdigit()),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        gpus=gpus,
        nodes=tuple(_node(root, path, names) for path in paths if os.path.exists(root / path.lstrip("/"))),
        clocks=tuple(map(_clock, sysfs.gpu_clocks(root))),
        gpu_celsius=temperatures(root).get("gpu-thermal"),
        panthor_firmware=any(os.path.exists(root / f"{_FIRMWARE}{end}") for end in ("", ".xz", ".zst")),
    )


_DMI_NAME = "sys/class/dmi/id/product_name"


def _platform_gpus(root: Path) -> tuple[GpuHardware, ...]:
    """GPUs of a system on chip: platform devices that the device tree calls something.gpu."""
    places = ("sys/bus/platform/devices", "sys/devices/platform")
    folders = {
        p.name: p for place in places for end in (".gpu", ".gpu-*") for p in _glob(root, f"{place}/*{end}")
    }
    found = []
    for _, folder in sorted(folders.items()):
        driver = _link_name(folder / "driver")
        compatible = re.search(r"^OF_COMPATIBLE_0=(.*)$", _text(folder / "uevent"), re.MULTILINE)
        nodes = {f"/dev/dri/{p.name}" for p in _glob(folder, "drm/renderD*")}
        nodes |= {f"/dev/{p.name}" for p in _glob(folder, "misc/mali*")}
        if driver == "mali":
            nodes |= {f"/dev/{p.name}" for p in _glob(root, "sys/class/misc/mali[0-9]*")}
        if driver in _GPU_DRIVERS:
            nodes |= {
                f"/dev/dri/{p.name}"
                for p in _glob(root, "sys/class/drm/renderD*")
                if _link_name(p / "device/driver") == driver
            }
        found.append(
            GpuHardware(
                name=folder.name,
                driver=driver,
                compatible=compatible[1] if compatible else "",
                nodes=tuple(sorted(nodes)),
            )
        )
    return tuple(found)


def _pci_gpus(root: Path) -> tuple[GpuHardware, ...]:
    found = []
    for folder in _glob(root, "sys/bus/pci/devices/*"):
        if not _text(folder / "class").startswith(_DISPLAY_CLASS):
            continue
        nodes = {f"/dev/dri/{p.name}" for p in _glob(folder, "drm/renderD*")}
        driver = _link_name(folder / "driver")
        if driver == "nvidia":
            nodes |= {f"/dev/{p.name}" for p in _glob(root, "dev/nvidia[0-9]*")} | {"/dev/nvidiactl"}
        found.append(GpuHardware(name=folder.name, driver=driver, compatible="", nodes=tuple(sorted(nodes))))
    return tuple(found)


def _loose_nodes(root: Path) -> set[str]:
    """Nodes of GPU drivers whose device was not found above, as in containers that hide parts of /sys."""
    return {"/dev/mali0"} | {
        f"/dev/dri/{p.name}"
        for p in _glob(root, "sys/class/drm/renderD*")
        if _link_name(p / "device/driver") in _GPU_DRIVERS
    }


def _node(root: Path, path: str, names: AccountNames) -> DeviceNode:
    place = root / path.lstrip("/")
    status = place.stat()
    return DeviceNode(
        path=path,
        owner=names.user(status.st_uid),
        uid=status.st_uid,
        group=names.group(status.st_gid),
        gid=status.st_gid,
        mode=status.st_mode & 0o7777,
        openable=os.access(place, os.R_OK | os.W_OK),
    )


def _clock(folder: Path) -> Clock:
    return Clock(
        name=folder.name,
        current=sysfs.number(folder / "cur_freq") or 0,
        minimum=sysfs.number(folder / "min_freq") or 0,
        maximum=sysfs.number(folder / "max_freq") or 0,
        governor=_text(folder / "governor"),
    )


def _meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    return {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _glob(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


def _link_name(link: Path) -> str:
    """The last part of where a link points, "" where there is none."""
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""


def _text(path: Path) -> str:
    """A small file's text, "" where it cannot be read: hidden and absent files are the same to the doctor."""
    return sysfs.read(path) or ""


def lines(path: Path) -> Iterable[str]:
    """The lines of a text file that are neither empty nor comments."""
    return [line for line in map(str.strip, _text(path).splitlines()) if line and not line.startswith("#")]
