"""What the doctor makes of machines: boards in each state users meet, PCs, and nothing at all."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from honed.jobs.priorfile import PriorFile
from honed.tool.doctor import checks
from honed.tool.doctor.checks import Finding, has_failures
from honed.tool.doctor.readings import Daemon, Package, Readings

from .doctor_trees import (
    ANSWERING,
    LIBMALI,
    MALI,
    POCL,
    RUSTICL,
    Answers,
    Tree,
    bare,
    kbase,
    opencl,
    panthor,
    pc,
)


def judge(readings: Readings) -> list[Finding]:
    return [
        *checks.check_opencl(readings),
        *checks.check_machine(readings),
        *checks.check_service(dataclasses.replace(readings, packages=())),
    ]


def about(findings: list[Finding], *parts: str) -> Finding:
    """The one finding whose text has all these parts."""
    fitting = [f for f in findings if all(part in f"{f.what} {f.remedy}" for part in parts)]
    assert len(fitting) == 1, (parts, findings)
    return fitting[0]


def wrong(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.level != "ok"]


def forbid(readings: Readings, mode: int, group: str) -> Readings:
    """The same machine with device nodes this user may not open."""
    nodes = tuple(
        dataclasses.replace(node, mode=mode, uid=0, gid=4242, owner="root", group=group, openable=False)
        for node in readings.machine.nodes
    )
    return dataclasses.replace(readings, machine=dataclasses.replace(readings.machine, nodes=nodes))


@pytest.mark.parametrize(
    ("machine", "answers"),
    [
        (kbase, Answers(opencl(LIBMALI))),
        (panthor, Answers(opencl(RUSTICL))),
        (pc, Answers(opencl(POCL))),
    ],
)
def test_healthy_machines_have_nothing_to_mend(
    tmp_path: Path, machine: Callable[[Path], Tree], answers: Answers
) -> None:
    findings = judge(machine(tmp_path).readings(answers))
    assert wrong(findings) == []
    assert not has_failures(findings)


def test_kbase_is_described(tmp_path: Path) -> None:
    findings = judge(kbase(tmp_path).readings(Answers(opencl(LIBMALI))))
    about(findings, "Radxa ROCK 5B", "8 CPUs", "7.8 GiB", "5.10.110-rockchip")
    about(findings, "fb000000.gpu", "arm,mali-valhall-csf", "kbase (mali)")
    about(findings, "/dev/mali0", ":render 0660", "ada may open it")
    about(findings, "300 MHz", "300 to 1000 MHz", "simple_ondemand", "first runs take longer")
    about(findings, "47 °C")
    about(findings, "GPU Mali-G610 r0p0 on ARM Platform", "4 compute units", "8192 MiB", "fp16", "driver 3.0")
    assert not any("renderD129" in f.what for f in findings), "the NPU's node is none of ours"


def test_a_mali_by_its_internal_name(tmp_path: Path) -> None:
    named = dataclasses.replace(MALI, name="Mali-LODX r0p0")
    findings = judge(
        kbase(tmp_path).readings(Answers(opencl(dataclasses.replace(LIBMALI, devices=(named,)))))
    )
    about(findings, "GPU Mali-LODX r0p0, a Mali-G610, on ARM Platform")


def test_libmali_under_panthor(tmp_path: Path) -> None:
    tree = panthor(tmp_path)
    (tmp_path / "etc/OpenCL/vendors/rusticl.icd").unlink()
    tree.icd("mali", "libmali.so.1")
    findings = judge(tree.readings(Answers(opencl())))
    mismatch = about(findings, "the ICD file is libmali's", "panthor")
    assert mismatch.level == "fail"
    assert "mesa-opencl-icd" in mismatch.remedy
    cause = about(findings, "no OpenCL device (0 platforms)")
    assert cause.level == "fail"
    assert "mesa-opencl-icd" in cause.remedy


def test_rusticl_under_kbase(tmp_path: Path) -> None:
    tree = kbase(tmp_path)
    (tmp_path / "etc/OpenCL/vendors/mali.icd").unlink()
    tree.icd("rusticl", "libRusticlOpenCL.so.1")
    empty = dataclasses.replace(RUSTICL, devices=())
    findings = judge(tree.readings(Answers(opencl(empty)), RUSTICL_ENABLE="panfrost"))
    mismatch = about(findings, "the ICD file is rusticl's", "kbase")
    assert mismatch.level == "fail"
    assert "libmali" in mismatch.remedy
    assert "libmali" in about(findings, "no OpenCL device (platform rusticl has no device)").remedy
    about(findings, "RUSTICL_ENABLE=panfrost", "change what is found")


def test_both_stacks_installed_is_no_mismatch(tmp_path: Path) -> None:
    tree = panthor(tmp_path)
    tree.icd("mali", "libmali.so.1")
    answers = Answers(opencl(RUSTICL), {"libmali.so.1": ("failed", "cannot open shared object file")})
    findings = judge(tree.readings(answers))
    assert [f.level for f in wrong(findings)] == ["warn"]
    about(findings, "mali.icd names libmali.so.1, which does not load", "cannot open shared object file")


def test_pocl_and_rusticl_can_crash_a_program_that_loads_both(tmp_path: Path) -> None:
    tree = panthor(tmp_path)
    tree.icd("pocl", "libpocl.so.2")
    told = about(judge(tree.readings(Answers(opencl(POCL, RUSTICL)))), "PoCL and rusticl are both installed")
    assert told.level == "warn"
    assert "OCL_ICD_VENDORS=/etc/OpenCL/vendors/pocl.icd" in told.remedy
    broken = Answers(opencl(RUSTICL), {"libpocl.so.2": ("failed", "no such file")})
    assert not any("both installed" in f.what for f in judge(tree.readings(broken)))


def test_rusticl_without_its_variable(tmp_path: Path) -> None:
    empty = dataclasses.replace(RUSTICL, devices=())
    findings = judge(panthor(tmp_path).readings(Answers(opencl(empty))))
    assert about(findings, "no OpenCL device", "RUSTICL_ENABLE").level == "fail"


@pytest.mark.parametrize(
    ("version", "needed"),
    [("25.0.7-2", True), ("26.1.6-1~bpo13+1", True), ("26.2.0-1", False), ("1:27.0.1-1", False), ("", True)],
)
def test_mesa_enables_rusticl_by_itself_from_26_2_on(tmp_path: Path, version: str, needed: bool) -> None:
    tree = panthor(tmp_path)
    tree.file(
        "var/lib/dpkg/status",
        "Package: mesa-libgallium\nStatus: install ok installed\nVersion: 99.0-1\n\n"
        + f"Package: mesa-opencl-icd\nStatus: install ok installed\nVersion: {version}\n\n" * bool(version)
        + "Package: zlib1g\nVersion: 1:1.3-1\n",
    )
    findings = judge(tree.readings(Answers(opencl(dataclasses.replace(RUSTICL, devices=())))))
    told = about(findings, "no OpenCL device")
    assert told.level == "fail"
    assert ("RUSTICL_ENABLE" in told.what) == needed
    if not needed:
        assert "rusticl loads but finds no device" in told.what
        assert "dmesg" in told.remedy


@pytest.mark.parametrize(
    ("library", "kernel", "told"),
    [
        ("libmali-valhall-g610-g24p0-x11.so", "g18p0-01eac0 (UK version 11.40)", True),
        ("libmali-valhall-g610-g13p1-x11.so", "g13p0-01eac0", True),
        ("libmali-valhall-g610-g24p0-x11.so", "g29p1-12eac0", False),
        ("libmali-valhall-g610-g24p0-x11.so", "g24p0-00eac0", False),
        ("libmali-valhall-g610-g24p0-x11.so", "", False),  # the kernel does not say
        ("libmali.so.1", "g18p0-01eac0", False),  # nor does the library's name
    ],
)
def test_a_libmali_newer_than_the_kernels_driver(
    tmp_path: Path, library: str, kernel: str, told: bool
) -> None:
    tree = kbase(tmp_path)
    tree.icd("mali", library)
    if kernel:
        tree.file("sys/module/bifrost_kbase/version", f"{kernel}\n")
    findings = judge(tree.readings(Answers(opencl())))
    mismatch = [f for f in findings if "newer than the kernel's" in f.what]
    assert bool(mismatch) == told
    if told:
        own, release = library.split("-")[3], kernel.partition("-")[0]
        assert all(own in f.what and release in f.what for f in mismatch)
        assert f"libmali of {release} or older" in about(mismatch, "no OpenCL device").remedy


def test_the_library_itself_says_of_which_release_it_is(tmp_path: Path) -> None:
    tree = kbase(tmp_path)
    tree.file("sys/module/mali_kbase/version", "g6p0-01eac0\n")
    findings = judge(tree.readings(Answers(opencl(LIBMALI))))  # v1.g13p0
    assert about(findings, "libmali is g13p0, newer than the kernel's driver, g6p0").level == "warn"


def test_a_gpu_that_the_kernel_ties_to_850_mhz_is_told_and_no_fault(tmp_path: Path) -> None:
    tree = panthor(tmp_path)
    tree.file("sys/class/devfreq/fb000000.gpu/max_freq", "850000000\n")
    told = about(judge(tree.readings(Answers(opencl(RUSTICL)))), "300 to 850 MHz")
    assert told.level == "ok"
    assert "ties it to 850 MHz, where it can reach 1000" in told.what


@pytest.mark.parametrize("machine", [kbase, panthor])
def test_no_permission_on_the_node(tmp_path: Path, machine: Callable[[Path], Tree]) -> None:
    readings = machine(tmp_path).readings(Answers(opencl()), RUSTICL_ENABLE="panfrost")
    findings = judge(forbid(readings, 0o660, "render"))
    assert "ada may not open /dev/" in about(findings, "no OpenCL device").what
    remedy = about(findings, "root:render 0660", "ada may not open it")
    assert remedy.level == "fail"
    assert "usermod -aG render ada" in remedy.remedy
    assert "usermod -aG render honed" in about(findings, "the service's user honed may not open it").remedy


def test_a_node_only_root_may_open_needs_a_rule(tmp_path: Path) -> None:
    readings = forbid(kbase(tmp_path).readings(Answers(opencl())), 0o600, "root")
    remedy = about(judge(readings), "root:root 0600", "ada may not open it").remedy
    assert 'SUBSYSTEM=="misc", KERNEL=="mali0", GROUP="render"' in remedy


def test_the_services_user_outside_the_group(tmp_path: Path) -> None:
    tree = kbase(tmp_path)
    tree.accounts("")
    findings = judge(tree.readings(Answers(opencl(LIBMALI))))
    assert [f.level for f in wrong(findings)] == ["fail"]
    about(findings, "/dev/mali0", "user honed may not open it", "usermod -aG render honed")


def test_a_driver_without_its_node(tmp_path: Path) -> None:
    tree = kbase(tmp_path)
    (tmp_path / "dev/mali0").unlink()
    findings = judge(tree.readings(Answers(opencl())))
    assert "there is no /dev/mali0" in about(findings, "no OpenCL device").what
    assert sum("there is no /dev/mali0" in f.what for f in findings) == 2


def test_libmali_of_another_build(tmp_path: Path) -> None:
    findings = judge(kbase(tmp_path).readings(Answers(opencl())))
    assert "valhall-g610" in about(findings, "no OpenCL device", "not the build for this GPU").remedy


def test_own_priors_are_named_and_those_that_are_not_used_told(tmp_path: Path) -> None:
    tree = kbase(tmp_path)
    made = PriorFile(family="mali", knows_rules=True, model=b"{}")
    tree.file("etc/honed/priors/mali.prior").write_bytes(made.to_bytes())
    tree.file("home/u/.config/honed/priors/cpu.prior", "nonsense")
    findings = judge(tree.readings(Answers(opencl(LIBMALI)), HOME="/home/u"))
    assert about(findings, "/etc/honed/priors/mali.prior", made.digest).level == "ok"
    told = about(findings, "cpu.prior is no prior of honed")
    assert (told.level, "remove it" in told.remedy) == ("warn", True)


def test_no_icd_file(tmp_path: Path) -> None:
    tree = kbase(tmp_path)
    (tmp_path / "etc/OpenCL/vendors/mali.icd").unlink()
    cause = about(judge(tree.readings(Answers(opencl()))), "no OpenCL device")
    assert "no ICD file names a working driver for mali" in cause.what
    assert "/etc/OpenCL/vendors/mali.icd" in cause.remedy


def test_an_icd_file_without_its_library(tmp_path: Path) -> None:
    tree = pc(tmp_path)
    tree.icd("empty", "")
    answers = Answers(opencl(), {"libpocl.so.2.10.0": ("failed", "no such file")})
    findings = judge(tree.readings(answers))
    assert about(findings, "pocl.icd names", "no such file").level == "warn"
    assert about(findings, "empty.icd is empty").level == "warn"
    about(findings, "no OpenCL device", "none of the ICD files names a library that loads", "pocl-opencl-icd")


@pytest.mark.parametrize(
    ("ended", "error"), [("crashed", "it died of SIGSEGV"), ("hung", "it did not answer")]
)
def test_a_driver_that_kills_or_hangs(tmp_path: Path, ended: str, error: str) -> None:
    answers = Answers(
        opencl(ended=ended, error=error),  # type: ignore[arg-type]
        {"libmali.so.1": (ended, error)},  # type: ignore[dict-item]
    )
    findings = judge(kbase(tmp_path).readings(answers))
    assert about(findings, "mali.icd", "kills the process", error).level == "fail"
    assert "move /etc/OpenCL/vendors/mali.icd away" in about(findings, "listing the OpenCL platforms").remedy


def test_no_kernel_driver_and_no_firmware(tmp_path: Path) -> None:
    tree = panthor(tmp_path)
    (tmp_path / "sys/devices/platform/fb000000.gpu/driver").unlink()
    (tmp_path / "sys/class/drm/renderD128/device/driver").unlink()
    (tmp_path / "lib/firmware/arm/mali/arch10.8/mali_csffw.bin").unlink()
    findings = judge(tree.readings(Answers(opencl())))
    gpu = about(findings, "GPU fb000000.gpu", "has no driver")
    assert gpu.level == "fail"
    assert "mali_csffw.bin" in gpu.remedy
    assert "mali_csffw.bin" in about(findings, "no OpenCL device", "no driver for fb000000.gpu").remedy


def test_the_gpu_left_out_beside_pocl(tmp_path: Path) -> None:
    tree = panthor(tmp_path)
    (tmp_path / "etc/OpenCL/vendors/rusticl.icd").unlink()
    tree.icd("pocl", "libpocl.so.2")
    findings = judge(tree.readings(Answers(opencl(POCL))))
    assert about(findings, "OpenCL does not see the GPU fb000000.gpu", "mesa-opencl-icd").level == "warn"
    assert not has_failures(findings)


def test_a_device_without_compiler(tmp_path: Path) -> None:
    lame = dataclasses.replace(LIBMALI, devices=(dataclasses.replace(MALI, usable=False),))
    findings = judge(kbase(tmp_path).readings(Answers(opencl(lame))))
    assert about(findings, "no compiler").level == "warn"
    assert has_failures(findings)


def test_nothing_at_all(tmp_path: Path) -> None:
    answers = Answers(opencl(), {"libOpenCL.so.1": ("failed", "cannot open shared object file")})
    answers.listed = dataclasses.replace(answers.listed, loader="")
    findings = judge(bare(tmp_path).readings(answers))
    assert about(findings, "libOpenCL.so.1 does not load", "ocl-icd-libopencl1").level == "fail"
    about(findings, "no OpenCL device (0 platforms)", "no ICD file in /etc/OpenCL/vendors", "pocl-opencl-icd")
    about(findings, "the kernel shows no GPU")


def test_pyopencl_missing(tmp_path: Path) -> None:
    answers = Answers(
        opencl(ended="failed", error="pyopencl cannot be imported (No module named 'pyopencl')")
    )
    about(judge(pc(tmp_path).readings(answers)), "OpenCL cannot be used", "apt install python3-pyopencl")


def test_slow_hot_and_short_of_memory(tmp_path: Path) -> None:
    tree = kbase(tmp_path)
    tree.file("sys/class/devfreq/fb000000.gpu/governor", "powersave\n")
    tree.file("sys/class/thermal/thermal_zone4/temp", "91000\n")
    tree.file("proc/meminfo", "MemTotal: 4000000 kB\nMemAvailable: 204800 kB\n")
    findings = judge(tree.readings(Answers(opencl(LIBMALI))))
    about(findings, "powersave", "/sys/class/devfreq/fb000000.gpu/governor")
    about(findings, "91 °C", "throttled from 85 °C")
    about(findings, "200 MiB of memory", "hone compile --profile")
    assert [f.level for f in wrong(findings)] == ["warn"] * 3


@pytest.mark.parametrize(
    ("change", "level", "parts"),
    [
        (
            {"state": "absent", "error": "the socket is not there"},
            "warn",
            ["no service answers", "systemctl start"],
        ),
        (
            {"state": "refused", "error": "Connection refused"},
            "warn",
            ["Connection refused", "systemctl start"],
        ),
        (
            {"state": "refused", "unit": "honed.service has failed (exit-code): max_queue is 'many'"},
            "fail",
            ["max_queue is 'many'", "systemctl restart honed"],
        ),
        ({"state": "forbidden"}, "fail", ["ada may not connect", "usermod -aG honed ada"]),
        (
            {"state": "silent", "error": "timed out"},
            "fail",
            ["does not answer: timed out", "journalctl -u honed"],
        ),
        (
            {"may_infer": False, "error": "not in group"},
            "warn",
            ["ada may not run models", "usermod -aG honed ada"],
        ),
        ({"worker": "starting"}, "warn", ["still starting"]),
        ({"worker": "failed", "worker_reason": "no device"}, "fail", ["worker does not run: no device"]),
        ({"lost": ("PoCL/x (gone)",)}, "warn", ["no worker on PoCL/x (gone)", "hone status"]),
        ({"cpu_engine": False}, "warn", ["it has no CPU engine", "apps can bring none", "honed-cpu"]),
    ],
)
def test_the_service(tmp_path: Path, change: dict[str, object], level: str, parts: list[str]) -> None:
    daemon: Daemon = dataclasses.replace(ANSWERING, **change)  # type: ignore[arg-type]
    findings = judge(pc(tmp_path).readings(Answers(opencl(POCL)), daemon))
    assert [f.level for f in wrong(findings)] == [level]
    about(findings, *parts)


def test_folders(tmp_path: Path) -> None:
    readings = pc(tmp_path).readings(Answers(opencl(POCL)))
    folder = dataclasses.replace(
        readings.folders[0], path="/var/lib/honed", writable=False, free_bytes=5 << 20
    )
    findings = judge(dataclasses.replace(readings, folders=(folder,)))
    about(findings, "/var/lib/honed (it would have to be made) cannot be written", "chown honed:")
    about(findings, "has only 5 MiB free")
    assert {f.level for f in wrong(findings)} == {"warn", "fail"}


def test_software(tmp_path: Path) -> None:
    readings = pc(tmp_path).readings(Answers(opencl(POCL)))
    packages = (
        Package(name="numpy", part="runtime", version=None, wanted=""),
        Package(name="systemd-python", part="daemon", version=None, wanted=""),
        Package(name="apache-tvm-ffi", part="tuner", version="0.1.15", wanted="0.1.14.post1"),
    )
    readings = dataclasses.replace(readings, packages=packages, venv=False)
    findings = checks.check_service(readings)
    assert about(findings, "numpy is missing", "apt install python3-numpy").level == "fail"
    assert about(findings, "systemd-python is missing", "python3-systemd").level == "warn"
    assert about(findings, "apache-tvm-ffi is 0.1.15", "0.1.14.post1").level == "warn"
    absent = dataclasses.replace(packages[2], version=None)
    findings = checks.check_service(dataclasses.replace(readings, packages=(absent,)))
    about(findings, "apache-tvm-ffi missing", "apt install honed-tuner")
    findings = checks.check_service(
        dataclasses.replace(readings, packages=(*packages[:2], absent), venv=True)
    )
    about(findings, "numpy is missing", f"install honed[all] into {sys.prefix}")
    about(findings, "systemd-python is missing", "install honed[systemd] into ")
    about(findings, "apache-tvm-ffi missing", "install honed[all] into ")


def test_every_finding_that_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    silent = Answers(opencl(), {"libOpenCL.so.1": ("crashed", "it died of SIGILL")})
    for machine in (kbase, panthor, pc, bare):
        folder = tmp_path / machine.__name__
        folder.mkdir()
        for finding in judge(machine(folder).readings(silent)):
            assert finding.remedy if finding.level != "ok" else not finding.remedy, finding
            assert "\n" not in finding.what + finding.remedy
            assert not finding.what.endswith(".")
