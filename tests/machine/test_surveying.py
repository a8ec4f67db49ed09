"""Looking at a device in another process, with drivers that misbehave."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from honed.machine import peaks
from honed.machine.devices import Device
from honed.machine.peaks import survey
from honed.machine.profile import DeviceProfile
from honed.runtime.errors import DeviceError, HonedError, NotFound

pytestmark = pytest.mark.opencl


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only driver there is; C that runs while it is loaded goes into this file with `build`."""
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    library = tmp_path / "libdriver.so"
    (vendors / "test.icd").write_text(f"{library}\n")
    for name in ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH"):
        monkeypatch.setenv(name, str(vendors))
    return library


def build(library: Path, does: str) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None
    headers = "".join(f"#include <{name}.h>\n" for name in ("stdio", "stdlib", "unistd"))
    code = f"{headers}__attribute__((constructor)) void f(void) {{ {does} }}"
    subprocess.run([compiler, "-shared", "-fPIC", "-xc", "-", "-o", library], input=code.encode(), check=True)


@pytest.mark.slow
def test_the_device_as_this_process_sees_it(device: Device, tmp_path: Path) -> None:
    found = survey(device.spec, tmp_path)
    assert found.spec == device.spec
    assert found.profile.identity == device.profile.identity
    assert found.profile.rules == device.profile.rules
    assert found.require_peaks().peaks is not None
    assert survey(device.spec, tmp_path) == found, "peaks are measured once"
    assert DeviceProfile.from_dict(found.profile.to_dict()) == found.profile


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="'abacus' fits no device"):
        survey("abacus", tmp_path)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ('fputs("no firmware\\n", stderr); abort();', "ended by signal SIGABRT; it said last: no firmware"),
        ("_exit(3);", "ended with status 3"),
        ('puts("hello");', "no usable OpenCL device"),
        ("pause();", "did not answer within 1 s"),
    ],
)
def test_drivers_that_misbehave(driver: Path, tmp_path: Path, does: str, told: str) -> None:
    build(driver, does)
    with pytest.raises(DeviceError, match=told):
        survey(None, tmp_path, seconds=1.0 if "pause" in does else None)


def test_a_device_without_peaks(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose peaks cannot be measured is found all the same."""

    def fail(*_: object, **__: object) -> None:
        raise DeviceError("no clock")

    monkeypatch.setattr(peaks, "load_or_measure", fail)
    _, answer = peaks._answers(device, str(tmp_path), again=False)
    assert answer["spec"] == device.spec
    found = peaks.Survey(device.spec, device.profile, str(answer["no_peaks"]))
    with pytest.raises(HonedError, match=r"peaks cannot be measured: no clock"):
        found.require_peaks()


def test_a_device_that_is_too_slow_for_its_peaks(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found, and is served by: an emulated board takes minutes for what others do in seconds."""
    found = next(peaks._answers(device, str(tmp_path), again=False))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat <<'EOF'\n{json.dumps(found)}\nEOF\nexec sleep 3600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for seconds in (1, 4, 16, 64):  # a busy machine may not have started it in less
        try:
            late = survey(None, tmp_path, seconds=seconds)
            break
        except DeviceError as error:
            assert f"did not answer within {seconds} s" in str(error)  # noqa: PT017 - it has not begun
    assert (late.spec, late.profile) == (device.spec, device.profile)
    with pytest.raises(DeviceError, match=rf"not measured within {seconds} s: it is too slow, or too busy"):
        late.require_peaks()
