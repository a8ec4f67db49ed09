from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.machine.families import FAMILIES
from honed.machine.profile import DeviceIdentity, DevicePeaks, DeviceProfile
from honed.protocol import strict
from honed.protocol.errors import NotFound, ProfileError
from tests.runtime.builder import PROFILE

PEAKS = DevicePeaks(fp32_gflops=470.5, fp16_gflops=910.0, bandwidth_gbs=27.2, launch_us=4.0)
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
FIGURE = st.floats(1e-6, 1e9)


@given(
    st.builds(DeviceIdentity, platform=TEXT, vendor=TEXT, name=TEXT, driver_version=TEXT, kernel_driver=TEXT),
    st.none()
    | st.builds(
        DevicePeaks,
        fp32_gflops=FIGURE,
        fp16_gflops=st.none() | FIGURE,
        bandwidth_gbs=FIGURE,
        launch_us=FIGURE,
        caches_gbs=st.dictionaries(st.integers(1, 1 << 30), FIGURE, max_size=3).map(
            lambda rates: tuple(sorted(rates.items()))
        ),
        raised=st.sets(st.sampled_from(["fp32_gflops", "bandwidth_gbs"])).map(
            lambda names: (*sorted(names),)
        ),
        empty_us=st.none() | st.floats(0, 1e6),
        busy=st.none() | st.floats(0, 1),
    ),
)
def test_toml_gives_the_profile_back(identity: DeviceIdentity, peaks: DevicePeaks | None) -> None:
    profile = replace(PROFILE, identity=identity, peaks=peaks)
    assert DeviceProfile.from_dict(tomllib.loads(profile.dumps())) == profile
    assert DeviceProfile.from_dict(profile.to_dict()) == profile


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(replace(PROFILE, peaks=PEAKS).dumps())
    assert DeviceProfile.load(path).peaks == PEAKS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "lacks the key 'identity'"),
        (b"[identity", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (b"x = 1", "unknown key 'x'"),
        (b"#" * 70_000, "larger than"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "board.toml"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        DeviceProfile.load(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"board\.toml"):
        DeviceProfile.load(tmp_path / "board.toml")
    with pytest.raises(ProfileError, match="cannot be read"):
        DeviceProfile.load(tmp_path)


CHANGES: list[tuple[str, str, Any, str]] = [
    ("limits", "compute_units", 0, "compute_units is 0"),
    ("limits", "compute_units", "4", "instead of an integer"),
    ("limits", "base_align_bytes", 48, "power of two"),
    ("limits", "local_mem_bytes", -1, "must not be negative"),
    ("limits", "fp16", 1, "instead of true or false"),
    ("limits", "max_work_item_sizes", [1, 1], "2 items instead of 3"),
    ("rules", "max_threads", 257, "must not exceed"),
    ("rules", "family", "tpu", f"one of {', '.join(FAMILIES)}"),
    ("peaks", "fp32_gflops", 0.0, "positive"),
    ("peaks", "bandwidth_gbs", float("nan"), "positive"),
    ("peaks", "launch_us", float("inf"), "positive"),
    ("peaks", "busy", 1.5, "a share from 0 to 1"),
    ("peaks", "empty_us", -1.0, "not negative"),
    ("peaks", "caches_gbs", [[65536, 0.0]], "no positive number"),
    ("peaks", "caches_gbs", [[65536, 9.0], [4096, 9.0]], "must be positive and rise"),
    ("peaks", "caches_gbs", [[0, 9.0]], "must be positive and rise"),
    ("peaks", "raised", ["launch_us"], "instead of one of fp32_gflops"),
]


def test_peaks_of_an_older_version(tmp_path: Path) -> None:
    """They had these four keys, in profile files as in the headers of compiled models."""
    older = ("fp32_gflops", "fp16_gflops", "bandwidth_gbs", "launch_us")
    plain = replace(PROFILE, peaks=PEAKS).to_dict()
    plain["peaks"] = {key: plain["peaks"][key] for key in older}
    assert DeviceProfile.from_dict(plain) == replace(PROFILE, peaks=PEAKS)
    assert strict.from_plain(DevicePeaks, plain["peaks"], where="peaks") == PEAKS


@pytest.mark.parametrize(("table", "key", "value", "message"), CHANGES)
def test_impossible_figures(table: str, key: str, value: object, message: str) -> None:
    plain = replace(PROFILE, peaks=PEAKS).to_dict()
    plain[table][key] = value
    with pytest.raises(ProfileError, match=message):
        DeviceProfile.from_dict(plain)


def test_whole_numbers_do_for_peaks() -> None:
    plain = replace(PROFILE, peaks=PEAKS).to_dict()
    plain["peaks"]["fp32_gflops"] = 470
    found: DeviceProfile = DeviceProfile.from_dict(plain)
    assert found.peaks == replace(PEAKS, fp32_gflops=470.0)
