"""File trees of /proc and /sys as machines have them, for the signals of idleness."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PANTHOR_FDINFO = """pos:\t0
flags:\t02400002
mnt_id:\t29
ino:\t491
drm-driver:\tpanthor
drm-client-id:\t{client}
drm-engine-panthor:\t{ns} ns
drm-cycles-panthor:\t94439687187
drm-maxfreq-panthor:\t1000000000 Hz
drm-curfreq-panthor:\t300000000 Hz
drm-total-memory:\t16480 KiB
"""
PANFROST_FDINFO = """pos:\t0
drm-driver:\tpanfrost
drm-client-id:\t{client}
drm-engine-fragment:\t{fragment} ns
drm-cycles-fragment:\t1424359409
drm-maxfreq-fragment:\t799999987 Hz
drm-engine-vertex-tiler:\t{tiler} ns
"""


def write(root: Path, files: Mapping[str, str]) -> None:
    """Files with their text; kernel files end in a newline."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text if text.endswith("\n") else f"{text}\n")


def pressure(some: float) -> str:
    return (
        f"some avg10={some:.2f} avg60=3.10 avg300=1.02 total=98213344\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )


def zone(number: int, kind: str, temp: int, trips: Mapping[str, int]) -> dict[str, str]:
    """A thermal zone: trip point types with millidegrees."""
    folder = f"sys/class/thermal/thermal_zone{number}"
    files = {f"{folder}/type": kind, f"{folder}/temp": str(temp), f"{folder}/mode": "enabled"}
    for i, (name, at) in enumerate(trips.items()):
        files |= {f"{folder}/trip_point_{i}_type": name, f"{folder}/trip_point_{i}_temp": str(at)}
    return files


def _common(cores: str, load: str) -> dict[str, str]:
    return {
        "proc/pressure/cpu": pressure(1.25),
        "proc/pressure/memory": pressure(0.0),
        "proc/pressure/io": pressure(0.5),
        "proc/loadavg": f"{load} 0.52 0.44 1/412 20113",
        "sys/devices/system/cpu/online": cores,
        "proc/1/stat": "1 (systemd) S 0 1 1 0 -1 4194560 1 2 3 4 100 200 300 400 20 0 1 0 5 6 7",
    }


def rk3588_kbase(root: Path) -> None:
    """The vendor's kernel (5.10, 6.1): mali0, load in devfreq, seven thermal zones, a dumb power supply."""
    gpu = "sys/devices/platform/fb000000.gpu"
    devfreq = f"{gpu}/devfreq/fb000000.gpu"
    write(
        root,
        {
            **_common("0-7", "0.64"),
            f"{gpu}/utilisation": "7",
            f"{gpu}/power/runtime_status": "active",
            f"{devfreq}/load": "3@300000000Hz",
            f"{devfreq}/cur_freq": "300000000",
            f"{devfreq}/min_freq": "300000000",
            f"{devfreq}/max_freq": "1000000000",
            f"{devfreq}/governor": "simple_ondemand",
            f"{devfreq}/available_frequencies": "1000000000 900000000 800000000 700000000 600000000 "
            "500000000 400000000 300000000 ",
            "sys/class/devfreq/dmc/cur_freq": "2112000000",
            "sys/class/devfreq/dmc/load": "41@2112000000Hz",
            "sys/class/devfreq/fdab0000.npu/load": "55@1000000000Hz",
            **zone(0, "soc-thermal", 46230, {"passive": 75000, "passive ": 85000, "critical": 115000}),
            **zone(1, "bigcore0-thermal", 91000, {"critical": 115000}),
            **zone(5, "gpu-thermal", 44384, {"critical": 115000}),
            **zone(6, "npu-thermal", 99000, {"critical": 115000}),
            "sys/class/power_supply/tcpm-source-psy-4-0022/type": "USB",
            "sys/class/power_supply/tcpm-source-psy-4-0022/online": "1",
        },
    )
    _link(root / "sys/class/devfreq/fb000000.gpu", root / devfreq)
    _link(root / devfreq / "device", root / gpu)
    _link(root / "sys/class/misc/mali0/device", root / gpu)


def rk3588_panthor(root: Path) -> None:
    """The mainline kernel: no load in devfreq, engines counted in fdinfo if profiling is on."""
    gpu = "sys/devices/platform/fb000000.gpu"
    devfreq = f"{gpu}/devfreq/fb000000.gpu"
    write(
        root,
        {
            **_common("0-7", "0.20"),
            f"{gpu}/power/runtime_status": "active",
            f"{devfreq}/cur_freq": "300000000",
            f"{devfreq}/target_freq": "300000000",
            f"{devfreq}/min_freq": "300000000",
            f"{devfreq}/max_freq": "1000000000",
            f"{devfreq}/governor": "simple_ondemand",
            **zone(0, "package-thermal", 51000, {"critical": 115000}),
            **zone(4, "gpu-thermal", 49000, {"passive": 85000, "critical": 115000}),
            "sys/class/misc/autofs/uevent": "MAJOR=10",
        },
    )
    _link(root / "sys/class/devfreq/fb000000.gpu", root / devfreq)
    _link(root / devfreq / "device", root / gpu)


def render_client(root: Path, pid: int, fd: int, fdinfo: str) -> None:
    """A process that has a render node open."""
    link = root / f"proc/{pid}/fd/{fd}"
    if not link.is_symlink():
        _link(link, Path("/dev/dri/renderD128"))
    write(root, {f"proc/{pid}/fdinfo/{fd}": fdinfo})


def laptop_on_battery(root: Path) -> None:
    write(
        root,
        {
            **_common("0-3,6", "1.10"),
            **zone(0, "acpitz", 48000, {"critical": 105000, "active": 50000}),
            **zone(1, "INT3400 Thermal", 20000, {}),
            **zone(2, "x86_pkg_temp", 55000, {"passive": 0, "passive ": -274000}),
            **zone(3, "iwlwifi_1", 99000, {}),
            "sys/class/power_supply/AC/type": "Mains",
            "sys/class/power_supply/AC/online": "0",
            "sys/class/power_supply/BAT0/type": "Battery",
            "sys/class/power_supply/BAT0/status": "Discharging",
            "sys/class/power_supply/BAT0/scope": "System",
            "sys/class/power_supply/hidpp_battery_0/type": "Battery",
            "sys/class/power_supply/hidpp_battery_0/status": "Discharging",
            "sys/class/power_supply/hidpp_battery_0/scope": "Device",
        },
    )


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, link)
