from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from honed.machine import devices
from honed.machine.devices import Device
from honed.machine.families import FAMILIES, DriverClass, driver_class, family_of
from honed.machine.files import gpu_hz
from honed.machine.vendors import driver_environments
from honed.runtime.errors import NotFound
from honed.valhall.bench import bench_profile
from tests.pocl import ALL, ONE, two_drivers
from tests.runtime.builder import PROFILE

NAMES = ["ARM Platform/Mali-G610 r0p0", "PoCL/cortex-a76 #0", "PoCL/cortex-a76 #1"]


@pytest.mark.parametrize(
    ("spec", "fitting"),
    [
        ("0", [0]),
        ("2", [2]),
        ("3", []),
        ("mali", [0]),
        ("arm platform/MALI", [0]),
        ("pocl", [1, 2]),
        ("PoCL/cortex-a76 #1", [2]),
        ("#0", [1]),
        ("PoCL/cortex-a76", [1]),
        ("ARM Platform/Mali-G610 r0p0 #0", [0]),
        ("ARM Platform/Mali-G610 r0p0 #1", []),
        ("nvidia", []),
        ("", [0, 1, 2]),
        ("²", []),
    ],
)
def test_specs(spec: str, fitting: list[int]) -> None:
    assert devices.matching(spec, NAMES) == fitting


def test_a_device_is_found_again_by_its_spec(device: Device) -> None:
    assert devices.select(device.spec).cl == device.cl
    assert devices.select(device.spec.upper()).cl == device.cl
    specs = [d.spec for d in devices.discover()]
    assert len(set(specs)) == len(specs)
    assert devices.select(str(specs.index(device.spec))).cl == device.cl


def test_a_kind_is_its_first_device(device: Device) -> None:
    kinds = [d.kind for d in devices.discover()]
    assert devices.select(device.kind.lower()).cl == devices.discover()[kinds.index(device.kind)].cl
    if "accelerator" not in kinds:
        with pytest.raises(NotFound, match="'accelerator' fits no device"):
            devices.select("accelerator")


def test_the_environment_chooses(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONED_DEVICE", device.spec)
    assert devices.select().cl == device.cl
    monkeypatch.setenv("HONED_DEVICE", "no such device")
    with pytest.raises(NotFound, match="no such device"):
        devices.select()
    assert devices.select(device.spec).cl == device.cl
    monkeypatch.setenv("HONED_DEVICE", "")
    assert devices.select().kind in ("GPU", "accelerator", "CPU")


def test_a_spec_that_fits_nothing_is_told_what_there_is(device: Device) -> None:
    with pytest.raises(NotFound) as caught:
        devices.select("abacus")
    assert device.spec in str(caught.value)
    assert "hone doctor" in str(caught.value)


@pytest.mark.opencl
def test_a_machine_without_drivers(tmp_path: Path) -> None:
    code = """
from honed.machine import devices
from honed.runtime.errors import DeviceError
print(devices.discover())
try:
    devices.select()
except DeviceError as error:
    print(error)
"""
    environment = {**os.environ, "OCL_ICD_VENDORS": str(tmp_path), "OPENCL_VENDOR_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.startswith("[]\nthere is no usable OpenCL device")


def test_the_profile_is_the_devices(device: Device) -> None:
    limits, rules = device.profile.limits, device.profile.rules
    assert limits.max_work_group_size == device.cl.max_work_group_size
    assert limits.base_align_bytes * 8 == device.cl.mem_base_addr_align
    assert limits.fp16 == ("cl_khr_fp16" in device.cl.extensions)
    assert rules.max_threads <= limits.max_work_group_size
    assert device.cl.driver_version in device.profile.identity.driver_version


@pytest.mark.parametrize(
    ("name", "is_cpu", "family"),
    [
        ("Mali-LODX r0p0", False, "mali"),
        ("Mali-G610 MC4 (Panfrost)", False, "mali"),
        ("Mali-G999 r0p0", False, "mali"),
        ("Immortalis-G715 r0p0", False, "mali"),
        ("llvmpipe (LLVM 19)", False, "cpu"),
        ("pthread-cortex-a76", True, "cpu"),
        ("NVIDIA H100", False, "gpu"),
    ],
)
def test_families(name: str, is_cpu: bool, family: str) -> None:
    assert family_of(name, is_cpu=is_cpu).name == family


@pytest.mark.parametrize(
    ("platform", "version", "driver"),
    [
        ("ARM Platform", "3.0; OpenCL 3.0 v1.g13p0-01eac0", DriverClass.ARM),
        ("ARM Platform", "26.2; OpenCL 3.0 v1.g29p1", DriverClass.ARM),
        ("rusticl", "25.0.7-2; OpenCL 3.0 ", DriverClass.MESA),
        ("rusticl", "26.0.8-1ubuntu1; OpenCL 3.0 ", DriverClass.MESA),
        ("rusticl", "26.1.6-1~bpo13+1; OpenCL 3.0 ", DriverClass.MESA_26),
        ("rusticl", "26.2.6; OpenCL 3.0 ", DriverClass.MESA_26),
        ("rusticl", "27.0.0-devel (git-0a1b2c3d4e); OpenCL 3.0 ", DriverClass.MESA_26),
        ("rusticl", "no version", DriverClass.MESA),
    ],
)
def test_drivers_of_malis_are_told_apart_by_what_they_report(
    platform: str, version: str, driver: DriverClass
) -> None:
    assert driver_class(platform, version) is driver
    identity = replace(PROFILE.identity, platform=platform, driver_version=version)
    assert replace(PROFILE, identity=identity).driver is driver


def test_benches_stand_for_a_class_of_drivers() -> None:
    assert bench_profile("mali-g610").driver is DriverClass.ARM
    assert bench_profile("mali-g610", "25.0").driver is DriverClass.MESA
    assert bench_profile("mali-g610", "26.2").driver is DriverClass.MESA_26


def test_the_clock_is_that_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hz in {"dmc": "2112000000", "fb000000.gpu": "850000000"}.items():
        folder = tmp_path / "sys/class/devfreq" / name
        folder.mkdir(parents=True)
        (folder / "cur_freq").write_text(f"{hz}\n")
    assert gpu_hz(tmp_path) == 850_000_000
    assert gpu_hz(tmp_path / "nowhere") is None
    monkeypatch.setattr(devices, "gpu_hz", lambda: 850_000_000)
    for family, expected in {"mali": 850_000_000, "cpu": None}.items():
        profile = replace(PROFILE, rules=replace(PROFILE.rules, family=family))
        assert Device(profile, "", None).clock_hz() == expected


def test_mali_rules() -> None:
    rules = devices.rules_for(FAMILIES["mali"], PROFILE.limits)
    assert (rules.local_memory, rules.max_vector_bytes, rules.max_threads) == (False, 16, 256)
    assert (rules.max_unroll, rules.max_source_bytes, rules.max_queued_launches) == (16, 65536, 512)


@pytest.mark.parametrize(
    ("link", "family", "platform", "vendor", "expected"),
    [
        (
            "class/misc/mali0/device/driver -> bus/platform/drivers/mali",
            "mali",
            "ARM Platform",
            "ARM",
            "kbase",
        ),
        (
            "class/drm/renderD128/device/driver -> bus/platform/drivers/panthor",
            "mali",
            "rusticl",
            "Arm",
            "panthor",
        ),
        (
            "class/drm/card0/device/driver -> bus/platform/drivers/panfrost",
            "mali",
            "rusticl",
            "Arm",
            "panfrost",
        ),
        ("class/drm/card0/device/driver -> bus/platform/drivers/panthor", "mali", "ARM Platform", "ARM", ""),
        (
            "class/drm/card0/device/driver -> bus/pci/drivers/nvidia",
            "gpu",
            "NVIDIA CUDA",
            "NVIDIA Corporation",
            "nvidia",
        ),
        ("class/drm/card0/device/driver -> bus/pci/drivers/nvidia", "cpu", "PoCL", "AuthenticAMD", ""),
        ("class/drm/card0/device/driver -> bus/pci/drivers/i915", "gpu", "Intel", "Intel", ""),
    ],
)
def test_kernel_drivers(
    tmp_path: Path, link: str, family: str, platform: str, vendor: str, expected: str
) -> None:
    at, to = (tmp_path / part for part in link.split(" -> "))
    to.mkdir(parents=True)
    at.parent.mkdir(parents=True)
    at.symlink_to(to)
    assert devices.kernel_driver(FAMILIES[family], platform, vendor, tmp_path) == expected


def test_the_client_needs_no_opencl() -> None:
    code = """
import sys
sys.modules["pyopencl"] = None
import honed.runtime, honed.runtime.compiled.modelfile, honed.runtime.compiled.validate
import honed.machine.profile
from honed.runtime.errors import DeviceError
try:
    honed.runtime.load
except DeviceError as error:
    print(error)
try:
    honed.runtime.nothing
except AttributeError:
    print("no such name")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pyopencl cannot be imported")
    assert done.stdout.endswith("no such name\n")


def test_no_code_asks_for_a_family_by_name() -> None:
    """What is meant is a field of its row: another family may do the same."""
    asked = re.compile(r"""family\b[^#"]*(==|!=|\bin) *[({\[]?["']""")
    root = Path(__file__).parents[2]
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for part in ("runtime", "tuner", "daemon")
        for path in (root / part).rglob("*.py")
        for line in path.read_text().splitlines()
        if asked.search(line)
    ]
    assert found == []


@pytest.fixture(scope="module")
def clashing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with both."""
    return two_drivers(tmp_path_factory.mktemp("vendors"))


def python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_the_two_drivers_of_these_tests_clash(clashing: dict[str, str]) -> None:
    done = python("import pyopencl; pyopencl.get_platforms()", clashing)
    assert done.returncode == -signal.SIGABRT


@pytest.mark.parametrize(
    ("spec", "name", "driver"),
    [
        (ONE, ONE, "basic"),
        ("1", ALL, "pthread"),
        pytest.param(ALL, ALL, "pthread", marks=pytest.mark.slow),
    ],
)
def test_drivers_that_clash_never_meet_in_a_process(
    clashing: dict[str, str], spec: str, name: str, driver: str
) -> None:
    code = f"""
import os
from honed.machine.devices import select
device = select({spec!r})
print(device.spec)
print(os.environ["OCL_ICD_VENDORS"])
assert select(device.spec).spec == device.spec  # once more, in a process that sees one driver
"""
    done = python(code, clashing)
    assert done.returncode == 0, done.stderr
    chosen, file = done.stdout.splitlines()
    assert chosen.startswith(f"Portable Computing Language/{name}")
    assert file.endswith(f"{driver}.icd")


def test_a_whole_name_is_looked_for_in_no_more_drivers_than_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looked: list[str] = []

    def shown(view: dict[str, str]) -> list[tuple[str, str, str]]:
        looked.append(Path(view["OCL_ICD_VENDORS"]).stem)
        return [("P", looked[-1], "GPU")]

    monkeypatch.setattr(devices, "_list_driver_devices", shown)
    monkeypatch.setattr(devices, "discover", lambda: [Device(PROFILE, "P/mali", SimpleNamespace(type=4))])
    for driver in ("mali", "pocl"):
        (tmp_path / f"{driver}.icd").write_text(f"lib{driver}.so\n")
    for spec, expected in (("P/mali", ["mali"]), ("mali", ["mali", "pocl"])):
        monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path))
        assert devices.select(spec).spec == "P/mali"
        assert looked == expected
        looked.clear()


def test_the_devices_of_all_drivers_are_told(clashing: dict[str, str]) -> None:
    code = """
from honed.machine.devices import select
from honed.protocol.errors import NotFound
try:
    select("mali")
except NotFound as error:
    print(error)
"""
    done = python(code, clashing)
    assert done.returncode == 0, done.stderr
    assert "fits no device; use one of 0: Portable Computing Language/" + ONE in done.stdout
    assert "; 1: Portable Computing Language/" + ALL in done.stdout


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pocl": "libpocl.so.2"}, [{}]),
        (
            {"mali": "libmali.so.1", "pocl": "libpocl.so.2"},
            [
                {"OCL_ICD_VENDORS": "/etc/OpenCL/vendors/mali.icd"},
                {"OCL_ICD_VENDORS": "/etc/OpenCL/vendors/pocl.icd"},
            ],
        ),
        ({"mesa": "libRusticlOpenCL.so.1", "nvidia": "libnvidia-opencl.so.1"}, [{}]),
        (
            {"pocl": "libpocl.so.2", "rusticl": "libRusticlOpenCL.so.1"},
            [
                {"OCL_ICD_VENDORS": "/etc/OpenCL/vendors/pocl.icd"},
                {"OCL_ICD_VENDORS": "/etc/OpenCL/vendors/rusticl.icd"},
            ],
        ),
    ],
)
def test_pocl_is_kept_apart_from_other_drivers(
    tmp_path: Path, files: dict[str, str], expected: list[dict[str, str]]
) -> None:
    folder = tmp_path / "etc/OpenCL/vendors"
    folder.mkdir(parents=True)
    for name, library in files.items():
        (folder / f"{name}.icd").write_text(f"{library}\n")
    assert driver_environments({}, tmp_path) == expected


def test_a_process_that_sees_one_driver_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "etc/OpenCL/vendors"
    folder.mkdir(parents=True)
    for name, library in {"pocl": "libpocl.so.2", "rusticl": "libRusticlOpenCL.so.1"}.items():
        (folder / f"{name}.icd").write_text(f"{library}\n")
    assert driver_environments({"OCL_ICD_VENDORS": "/etc/OpenCL/vendors/pocl.icd"}, tmp_path) == [{}]
    both = {"OCL_ICD_VENDORS": "pocl.icd", "OCL_ICD_FILENAMES": "libRusticlOpenCL.so.1"}
    assert driver_environments(both, tmp_path) == [
        {"OCL_ICD_VENDORS": "/etc/OpenCL/vendors/pocl.icd", "OCL_ICD_FILENAMES": ""},
        {"OCL_ICD_VENDORS": "libRusticlOpenCL.so.1", "OCL_ICD_FILENAMES": ""},
    ]
    twice = {"OCL_ICD_FILENAMES": "libRusticlOpenCL.so.1:libpocl.so.2"}  # each has a file as well
    assert driver_environments(twice, tmp_path) == [
        {"OCL_ICD_VENDORS": f"/etc/OpenCL/vendors/{name}.icd", "OCL_ICD_FILENAMES": ""}
        for name in ("pocl", "rusticl")
    ]
