"""Machines as file trees, the way boards and PCs look, and what OpenCL says on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from honed.tool.doctor import gather, probe
from honed.tool.doctor.probe import ProbeAnswer
from honed.tool.doctor.readings import Daemon, Ended, OpenCL, OpenCLDevice, Platform, Readings

ANSWERING = Daemon(
    socket="/run/honed/honed.sock",
    state="answers",
    error="",
    version="0.1.0",
    may_infer=True,
    worker="ready",
    worker_reason="",
    device="Mali-G610 r0p0 (ARM Platform)",
)
MALI = OpenCLDevice(
    name="Mali-G610 r0p0",
    kind="GPU",
    driver_version="3.0",
    fp16=True,
    compute_units=4,
    memory_bytes=8 << 30,
    usable=True,
)
POCL = Platform(
    name="Portable Computing Language",
    version="OpenCL 3.0 PoCL 3.1",
    devices=(
        OpenCLDevice(
            name="pthread-cortex-a76",
            kind="CPU",
            driver_version="3.1",
            fp16=False,
            compute_units=8,
            memory_bytes=8 << 30,
            usable=True,
        ),
    ),
)
LIBMALI = Platform(name="ARM Platform", version="OpenCL 3.0 v1.g13p0", devices=(MALI,))
RUSTICL = Platform(name="rusticl", version="OpenCL 3.0", devices=(MALI,))


def opencl(*platforms: Platform, ended: Ended = "ok", error: str = "") -> OpenCL:
    return OpenCL(ended=ended, error=error, loader="/usr/lib/libOpenCL.so.1", platforms=platforms)


@dataclass
class Answers:
    """What the drivers of a machine we do not have would say to the doctor's children."""

    listed: OpenCL
    libraries: dict[str, tuple[Ended, str]] = field(default_factory=dict)  # that do not simply load

    def library(self, library: str, _environ: Mapping[str, str]) -> ProbeAnswer:
        ended, error = self.libraries.get(library, ("ok", ""))
        return ProbeAnswer(ended=ended, path=f"/usr/lib/{library}" if ended == "ok" else "", error=error)

    def platforms(self, _environ: Mapping[str, str]) -> OpenCL:
        return self.listed


@dataclass
class Tree:
    """A root folder."""

    root: Path

    def file(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def node(self, path: str, mode: int = 0o660) -> None:
        self.file(path).chmod(mode)

    def icd(self, name: str, library: str) -> None:
        self.file(f"etc/OpenCL/vendors/{name}.icd", f"{library}\n")

    def linux(self, model: str = "", available_mib: int = 4096, kernel: str = "6.1.0") -> None:
        """What every system has; the group of this tree's nodes is called render, and honed is in it."""
        if model:
            self.file("proc/device-tree/model", f"{model}\0")
        self.file("proc/sys/kernel/osrelease", f"{kernel}\n")
        self.file("proc/meminfo", f"MemTotal:   8131000 kB\nMemAvailable:   {available_mib * 1024} kB\n")
        for cpu in range(8):
            (self.root / f"sys/devices/system/cpu/cpu{cpu}").mkdir(parents=True)
        (self.root / "sys/devices/system/cpu/cpufreq").mkdir()
        self.accounts("honed")

    def accounts(self, members: str) -> None:
        self.file(
            "etc/passwd",
            "root:x:0:0::/root:/bin/sh\nada:x:54321:54321::/home/ada:/bin/sh\n"
            "honed:x:54320:54320::/nonexistent:/bin/false\nbroken line\n",
        )
        self.file(
            "etc/group", f"render:x:{os.getgid()}:{members}\nhoned:x:54320:\nada:x:54321:\nvideo:x:44:\n"
        )

    def mali_gpu(self, driver: str) -> None:
        """RK3588's GPU and its sensors."""
        gpu = "sys/devices/platform/fb000000.gpu"
        self.file(f"{gpu}/uevent", "OF_NAME=gpu\nOF_COMPATIBLE_0=arm,mali-valhall-csf\n")
        if driver:
            self.link(f"{gpu}/driver", f"../../../bus/platform/drivers/{driver}")
        clock = "sys/class/devfreq/fb000000.gpu"
        figures = {"cur_freq": 300000000, "min_freq": 300000000, "max_freq": 1000000000}
        for name, value in figures.items():
            self.file(f"{clock}/{name}", f"{value}\n")
        self.file(f"{clock}/governor", "simple_ondemand\n")
        self.file("sys/class/thermal/thermal_zone0/type", "soc-thermal\n")
        self.file("sys/class/thermal/thermal_zone0/temp", "99000\n")
        self.file("sys/class/thermal/thermal_zone4/type", "gpu-thermal\n")
        self.file("sys/class/thermal/thermal_zone4/temp", "47153\n")

    def readings(
        self, answers: Answers, daemon: Daemon = ANSWERING, uid: int = 54321, **environ: str
    ) -> Readings:
        with (
            patch.object(probe, "load_library", answers.library),
            patch.object(gather, "list_platforms", answers.platforms),
        ):
            return gather.gather(
                root=self.root,
                environ=environ,
                uid=uid,
                gids={54321},
                folders=[("models", self.root / "var/lib/honed")],
                daemon=daemon,
            )


def kbase(root: Path) -> Tree:
    """A board with the vendor's kernel: kbase and libmali. Its NPU has a render node that is no GPU's."""
    tree = Tree(root)
    tree.linux("Radxa ROCK 5B", kernel="5.10.110-rockchip")
    tree.mali_gpu("mali")
    tree.link("sys/class/misc/mali0", "../../devices/platform/fb000000.gpu/misc/mali0")
    tree.file("sys/devices/platform/fb000000.gpu/misc/mali0/dev", "10:124\n")
    tree.node("dev/mali0")
    tree.link("sys/class/drm/renderD129/device/driver", "../../../../bus/platform/drivers/RKNPU")
    tree.node("dev/dri/renderD129")
    tree.icd("mali", "libmali.so.1")
    return tree


def panthor(root: Path) -> Tree:
    """A board with a mainline kernel: panthor and Mesa's rusticl."""
    tree = Tree(root)
    tree.linux("Radxa ROCK 5B", kernel="6.12.0")
    tree.mali_gpu("panthor")
    tree.file("sys/devices/platform/fb000000.gpu/drm/renderD128/dev", "226:128\n")
    tree.link("sys/class/drm/renderD128/device/driver", "../../../../bus/platform/drivers/panthor")
    tree.link("sys/class/drm/card0/device/driver", "../../../../bus/platform/drivers/rockchip-drm")
    tree.node("dev/dri/renderD128")
    tree.file("lib/firmware/arm/mali/arch10.8/mali_csffw.bin")
    tree.icd("rusticl", "libRusticlOpenCL.so.1")
    return tree


def pc(root: Path) -> Tree:
    """A PC without a GPU the kernel knows, with PoCL."""
    tree = Tree(root)
    tree.linux()
    tree.file("sys/class/dmi/id/product_name", "OptiPlex 7010\n")
    tree.icd("pocl", "libpocl.so.2.10.0")
    return tree


def bare(root: Path) -> Tree:
    """Nothing at all, not even /etc."""
    return Tree(root)
