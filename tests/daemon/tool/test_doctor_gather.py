"""Reading the machine: trees of files, and real children that answer, crash, hang and chatter."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from honed.machine import vendors
from honed.tool.doctor import gather, probe
from honed.tool.doctor.gather import explain, read_daemon, read_machine, read_names
from tests.daemon.running import wait_for_end

from .doctor_trees import POCL, RUSTICL, Answers, Tree, kbase, opencl, panthor, pc


def test_icd_files_are_found_as_the_loader_finds_them(tmp_path: Path) -> None:
    tree = pc(tmp_path)
    tree.icd("aaa", "# comment\n\nliba.so")
    tree.file("etc/OpenCL/vendors/other.txt", "libno.so")
    tree.file("opt/vendors/b.icd", "libb.so\n")
    files = vendors.icd_files(tmp_path, {})
    assert files == [
        ("/etc/OpenCL/vendors/aaa.icd", "liba.so"),
        ("/etc/OpenCL/vendors/pocl.icd", "libpocl.so.2.10.0"),
    ]
    only_b = [("/opt/vendors/b.icd", "libb.so")]
    assert vendors.icd_files(tmp_path, {"OCL_ICD_VENDORS": "/opt/vendors"}) == only_b
    assert vendors.icd_files(tmp_path, {"OCL_ICD_VENDORS": "/opt/vendors/b.icd"}) == only_b
    assert vendors.icd_files(tmp_path, {"OPENCL_VENDOR_PATH": "/opt/vendors"}) == only_b
    assert vendors.icd_files(tmp_path, {"OCL_ICD_VENDORS": "aaa.icd"}) == files[:1]
    assert vendors.icd_files(tmp_path, {"OCL_ICD_VENDORS": "libx.so"}) == [("$OCL_ICD_VENDORS", "libx.so")]
    extra = vendors.icd_files(tmp_path, {"OCL_ICD_FILENAMES": "libx.so:liby.so"})
    assert extra == [*files, ("$OCL_ICD_FILENAMES", "libx.so"), ("$OCL_ICD_FILENAMES", "liby.so")]
    assert vendors.icd_files(tmp_path / "nowhere", {}) == []


def test_an_icd_file_that_is_missing_names_no_library(tmp_path: Path) -> None:
    assert vendors.icd_files(tmp_path, {"OCL_ICD_VENDORS": "/no.icd"}) == [("/no.icd", "")]
    readings = Tree(tmp_path).readings(Answers(opencl()), OCL_ICD_VENDORS="/no.icd")
    assert [(icd.ended, icd.library) for icd in readings.icds] == [("failed", "")]


def test_stacks_are_known_by_their_libraries() -> None:
    names = ["/usr/lib/aarch64-linux-gnu/libMaliOpenCL.so.1", "libmali-valhall-g610-g13p0-x11.so"]
    assert {vendors.stack_of(name) for name in names} == {"libmali"}
    assert vendors.stack_of("libRusticlOpenCL.so.1") == "rusticl"
    assert vendors.stack_of("/usr/lib/libnvidia-opencl.so.1") == "nvidia"
    assert vendors.stack_of("libpocl.so.2") == "pocl"
    assert vendors.stack_of("/opt/pocl/libother.so") == "other"


def test_a_board_with_kbase(tmp_path: Path) -> None:
    machine = read_machine(kbase(tmp_path).root, read_names(tmp_path))
    (gpu,) = machine.gpus
    assert (gpu.name, gpu.driver, gpu.nodes) == ("fb000000.gpu", "mali", ("/dev/mali0",))
    assert [(node.path, node.mode, node.group) for node in machine.nodes] == [("/dev/mali0", 0o660, "render")]
    (clock,) = machine.clocks
    assert (clock.current, clock.maximum, clock.governor) == (300_000_000, 1_000_000_000, "simple_ondemand")
    assert machine.gpu_celsius == pytest.approx(47.153)
    assert (machine.cpus, machine.memory_bytes) == (8, 8131000 * 1024)


def test_a_board_with_panthor_seen_through_the_bus(tmp_path: Path) -> None:
    """On other chips the GPU hangs under soc/, and only the bus lists it; newer kernels add a suffix."""
    tree = panthor(tmp_path)
    hidden = tmp_path / "sys/devices/platform/soc"
    hidden.mkdir()
    (tmp_path / "sys/devices/platform/fb000000.gpu").rename(hidden / "fb000000.gpu-panthor")
    tree.link(
        "sys/bus/platform/devices/fb000000.gpu-panthor", "../../../devices/platform/soc/fb000000.gpu-panthor"
    )
    machine = read_machine(tmp_path, read_names(tmp_path))
    assert [(g.name, g.driver, g.nodes) for g in machine.gpus] == [
        ("fb000000.gpu-panthor", "panthor", ("/dev/dri/renderD128",))
    ]
    assert machine.panthor_firmware


def test_a_pc_with_gpus(tmp_path: Path) -> None:
    tree = pc(tmp_path)
    for address, driver, node in (("0000:01:00.0", "nvidia", ""), ("0000:02:00.0", "amdgpu", "renderD128")):
        folder = f"sys/bus/pci/devices/{address}"
        tree.file(f"{folder}/class", "0x030000\n")
        tree.link(f"{folder}/driver", f"../../../../bus/pci/drivers/{driver}")
        if node:
            tree.file(f"{folder}/drm/{node}/dev", "226:128\n")
    tree.file("sys/bus/pci/devices/0000:03:00.0/class", "0x020000\n")
    for node in ("dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm", "dev/dri/renderD128"):
        tree.node(node, 0o666)
    machine = read_machine(tmp_path, read_names(tmp_path))
    assert machine.model == "OptiPlex 7010"
    assert [(g.driver, g.nodes) for g in machine.gpus] == [
        ("nvidia", ("/dev/nvidia0", "/dev/nvidiactl")),
        ("amdgpu", ("/dev/dri/renderD128",)),
    ]
    assert len(machine.nodes) == 3


def test_sensors_that_say_nonsense_are_passed_over(tmp_path: Path) -> None:
    tree = kbase(tmp_path)
    tree.file("sys/class/thermal/thermal_zone4/temp", "N/A\n")
    tree.file("sys/class/devfreq/fb000000.gpu/cur_freq", "\n")
    machine = read_machine(tmp_path, read_names(tmp_path))
    assert machine.gpu_celsius is None
    assert machine.clocks[0].current == 0


def test_this_machine_can_be_read() -> None:
    """Whatever it is, without a failure, and as what it is."""
    machine = read_machine(Path("/"), read_names(Path("/")))
    assert machine.cpus >= 1
    assert machine.memory_bytes > machine.available_bytes > 0
    assert machine.kernel == os.uname().release
    assert read_names(Path("/")).user(0) == "root"


def test_a_library_loads_or_says_why() -> None:
    good = probe.load_library("libc.so.6", os.environ)
    assert (good.ended, Path(good.path).name) == ("ok", "libc.so.6")
    bad = probe.load_library("libnothere.so.7", os.environ)
    assert bad.ended == "failed"
    assert "libnothere.so.7: cannot open shared object file" in bad.error


@pytest.mark.opencl
def test_this_machines_platforms_are_listed() -> None:
    import pyopencl as cl

    listed = probe.list_platforms(os.environ)
    assert listed.ended == "ok", listed.error
    assert "libOpenCL" in listed.loader
    seen = sorted((p.name, len(p.devices)) for p in listed.platforms)
    assert seen == sorted((p.name, len(p.get_devices())) for p in cl.get_platforms())
    assert all(d.compute_units > 0 and d.memory_bytes > 0 for p in listed.platforms for d in p.devices)


def test_no_driver_is_no_platform(tmp_path: Path) -> None:
    pytest.importorskip("pyopencl")
    listed = probe.list_platforms(os.environ | {"OCL_ICD_VENDORS": str(tmp_path)})
    assert (listed.ended, listed.platforms) == ("ok", ())


def stub(folder: Path, body: str) -> dict[str, str]:
    """An environment whose pyopencl is this code: a driver's bad manners in a real process."""
    (folder / "pyopencl.py").write_text(body)
    return dict(os.environ) | {"PYTHONPATH": str(folder)}


def test_a_driver_that_crashes(tmp_path: Path) -> None:
    body = "import os, sys\nprint('mali: bad DDK', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 11)"
    listed = probe.list_platforms(stub(tmp_path, body))
    assert listed.ended == "crashed"
    assert "SIGSEGV" in listed.error
    assert "mali: bad DDK" in listed.error


def test_a_driver_that_exits(tmp_path: Path) -> None:
    listed = probe.list_platforms(stub(tmp_path, "import os\nos._exit(3)"))
    assert listed.ended == "crashed"
    assert "ended with status 3" in listed.error


def test_a_driver_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    body = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(marker)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    answer = probe.ask(["platforms"], stub(tmp_path, body), deadline=10)
    assert answer.ended == "hung"
    assert "within 10 s" in answer.error
    wait_for_end(int(marker.read_text()))


def test_a_driver_that_prints_on_stdout_does_not_disturb(tmp_path: Path) -> None:
    body = (
        "import os\nos.write(1, b'hello from the driver')\n"
        "class Error(Exception):\n    pass\n"
        "def get_platforms():\n    print('and again')\n    return []"
    )
    listed = probe.list_platforms(stub(tmp_path, body))
    assert (listed.ended, listed.platforms, listed.error) == ("ok", (), "")


def test_a_service_that_is_not_there(tmp_path: Path) -> None:
    reading, status = read_daemon(str(tmp_path / "honed.sock"))
    assert (reading.state, status) == ("absent", None)
    assert "its folder" in read_daemon(str(tmp_path / "no" / "honed.sock"))[0].error


def test_a_socket_nobody_listens_at(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert read_daemon(str(path))[0].state == "refused"
    assert read_daemon("/" + "x" * 200)[0].state == "refused"


def test_a_service_that_hangs_up(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # no longer listening
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        reading, _ = read_daemon(str(path))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert reading.state == "silent"
    assert reading.error


def test_packages_are_read_without_importing_them() -> None:
    code = (
        "import sys; from honed.tool.doctor import gather; gather.packages(); "
        "sys.exit(bool({'tvm', 'onnx', 'pyopencl'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    found = {package.name: package for package in gather.packages()}
    assert found["numpy"].version
    assert found["apache-tvm-ffi"].wanted == "0.1.14.post1"


@pytest.mark.parametrize(
    ("unit", "sentence"),
    [
        ({"ActiveState": "active", "SubState": "running", "Result": "success", "StatusText": "Serving"}, ""),
        ({"ActiveState": "inactive", "SubState": "dead", "Result": "success"}, ""),
        (
            {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "StatusText": "x is 3"},
            "honed.service has failed (exit-code): x is 3",
        ),
        (
            {"ActiveState": "activating", "SubState": "auto-restart", "Result": "signal"},
            "honed.service has failed (signal)",
        ),
        ({}, ""),
    ],
)
def test_why_systemd_has_no_service(unit: dict[str, str], sentence: str) -> None:
    assert explain(unit) == sentence


def test_drivers_that_clash_are_listed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    views = [{"OCL_ICD_VENDORS": "/a.icd"}, {"OCL_ICD_VENDORS": "/b.icd"}]
    listed = {"/a.icd": opencl(POCL), "/b.icd": opencl(RUSTICL)}
    monkeypatch.setattr(gather, "driver_environments", lambda environ: views)
    monkeypatch.setattr(probe, "list_platforms", lambda environ: listed[environ["OCL_ICD_VENDORS"]])
    assert gather.list_platforms({"PATH": ""}).platforms == (POCL, RUSTICL)
    listed["/a.icd"] = opencl(ended="crashed", error="SIGSEGV")
    found = gather.list_platforms({})
    assert (found.ended, found.error, found.platforms) == ("crashed", "SIGSEGV", (RUSTICL,))
