"""Device profiles that users write: the example of docs/dev/devices.md compiles, and mistakes are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from honed.machine.families import FAMILIES
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled import modelfile
from honed.runtime.errors import ModelRefused
from honed.tool.main import main

from .changes.test_adding_onnx import WEIGHTS, X, dense
from .running import Service

DOCUMENT = Path(__file__).parents[2] / "docs" / "dev" / "devices.md"
Compile = Callable[..., tuple[int, str]]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The file that the document shows."""
    (text,) = re.findall(r"^```toml\n(\[identity\].*?)^```", DOCUMENT.read_text(), re.M | re.S)
    file = tmp_path / "board.toml"
    file.write_text(text)
    return file


@pytest.fixture
def compile_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compile:
    """Compiles a dense layer to `out.honed` for a profile: exit status and standard error."""

    def compile_(profile: Path, *options: str) -> tuple[int, str]:
        source = dense(tmp_path / "d.onnx")
        status = main(
            ["compile", str(source), "-o", str(tmp_path / "out.honed"), f"--profile={profile}", *options]
        )
        return status, capsys.readouterr().err

    return compile_


def changed(file: Path, *changes: tuple[str, str]) -> Path:
    text = file.read_text()
    for pattern, line in changes:
        text, count = re.subn(pattern, line, text, flags=re.M)
        assert count == 1, pattern
    file.write_text(text)
    return file


def device_of(file: Path) -> DeviceProfile:
    read = modelfile.read(file)
    read.close()
    return read.model.device


@pytest.mark.slow
@pytest.mark.tvm
@pytest.mark.opencl
@pytest.mark.service
def test_the_example_compiles_and_what_comes_of_it_runs_where_it_fits(
    example: Path, compile_for: Compile, tmp_path: Path, start_service: Callable[..., Service]
) -> None:
    status, error = compile_for(example, "--precision", "fp32")
    assert status == 0, error
    assert device_of(tmp_path / "out.honed").identity == DeviceProfile.load(example).identity
    read = modelfile.read(tmp_path / "out.honed")
    assert read.model.proof is not None
    assert read.model.proof.device is None, "it ran nowhere yet"
    read.close()
    service = start_service()
    with service.client() as client:
        client.add(tmp_path / "out.honed", name="d")
        np.testing.assert_allclose(client.infer("d", {"x": X})["y"], np.maximum(X @ WEIGHTS, 0), rtol=1e-5)
        shown = client.show("d")
        assert shown["device"]["name"] == "Mali-G610 r0p0"
        assert all(o["error"] <= o["tolerance"] for o in shown["checked"]["outputs"])
        if client.status()["device"]["platform"] == "Portable Computing Language":
            assert compile_for(example, "--precision", "fp16")[0] == 0
            with pytest.raises(ModelRefused, match="cannot run the model") as refused:
                client.add(tmp_path / "out.honed", name="half")
            assert "has no cl_khr_fp16" in refused.value.reasons[0]
            assert [m["name"] for m in client.models()] == ["d"]


@pytest.mark.slow
@pytest.mark.tvm
def test_a_profile_decides_what_is_allowed(example: Path, compile_for: Compile) -> None:
    status, error = compile_for(changed(example, (r"^fp16 = true.*", "fp16 = false")), "--precision", "fp16")
    assert status == 1
    assert "has no fp16" in error
    tiny = changed(example, (r"^max_alloc_bytes.*", "max_alloc_bytes = 16"))
    status, error = compile_for(tiny)
    assert status == 1
    assert "exceeds what the device can allocate at once" in error


@pytest.mark.parametrize(
    ("pattern", "line", "message"),
    [
        pytest.param(r"^fp64 = .*", "", "lacks the key 'fp64'", marks=pytest.mark.slow),
        pytest.param(
            r"^compute_units = .*", "compute_unit = 4", "unknown key 'compute_unit'", marks=pytest.mark.slow
        ),
        pytest.param(
            r"^max_threads = .*",
            "max_threads = 2048",
            "must not exceed limits.max_work_group_size",
            marks=pytest.mark.slow,
        ),
        (r"^family = .*", 'family = "vulkan"', f"must be one of {', '.join(FAMILIES)}"),
        pytest.param(
            r"^base_align_bytes = .*",
            "base_align_bytes = 100",
            "must be a power of two",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            r"^local_memory = .*", 'local_memory = "no"', "instead of true or false", marks=pytest.mark.slow
        ),
        pytest.param(
            r"^bandwidth_gbs = .*",
            "bandwidth_gbs = -1.0",
            "must be a positive number",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.tvm
def test_what_is_wrong_in_a_profile_is_named(
    example: Path, compile_for: Compile, pattern: str, line: str, message: str
) -> None:
    status, error = compile_for(changed(example, (pattern, line)))
    assert status == 1
    (said,) = [line for line in error.splitlines() if line.startswith("hone: ")]
    assert f"profile file {example}: " in said
    assert message in said
    assert error.endswith(f"{said}\n")
