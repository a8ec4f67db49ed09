"""`python -m honed.tuner compile` as a child: its events, exit statuses and limits."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from honed.machine.devices import Device
from honed.runtime.compiled import modelfile
from honed.runtime.errors import Internal, ModelRefused
from honed.runtime.execution.executor import load
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler.compile import STAGES
from honed.tuner.compiler.verification import run_model
from honed.tuner.lower import plan
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.plan import Lifetime
from honed.tuner.lower.schedule import default_kernels
from tests.tuner.requests import request_for

pytestmark = pytest.mark.tvm
SECONDS = 120
MODEL = (
    '<ir_version: 9, opset_import: ["": 20]> f (float[4,8] x, float[8,16] w) => (float[4,16] y)'
    "{ a = MatMul(x, w) y = Gelu(a) }"
)


def _saved(folder: Path, text: str = MODEL) -> Path:
    path = folder / "m.onnx"
    onnx.save(parser.parse_model(text), path)
    return path


def _tuner(*arguments: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, events and standard error."""
    command = [sys.executable, "-m", "honed.tuner", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.slow
def test_done_after_every_stage_in_order(device: Device, tmp_path: Path) -> None:
    file, output = _saved(tmp_path), tmp_path / "m.honed"
    status, events, errors = _tuner(
        "compile", file, "-o", output, "--device", device.spec, "--name", "shown.onnx"
    )
    assert status == 0, errors
    *stages, done = events
    assert {e["event"] for e in stages} == {"stage"}
    assert tuple(dict.fromkeys(e["stage"] for e in stages)) == STAGES
    fractions = [e["fraction"] for e in stages]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] <= fractions[-1] <= 1
    assert done["event"] == "done"
    assert done["output"] == str(output)
    assert done["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert done["notes"] == []
    assert done["kernels"] >= 1
    assert done["launches"] >= done["kernels"]
    assert 0 < done["seconds"] < SECONDS
    assert done["proof"]["device"] == device.profile.identity.name
    assert done["proof"]["error"]["y"] <= done["proof"]["tolerance"]["y"]
    model = modelfile.read(output).model
    assert model.source.filename == "shown.onnx"
    assert len(model.kernels) == done["kernels"]


def test_what_was_written_runs(device: Device, tmp_path: Path) -> None:
    status, _, errors = _tuner(
        "compile", _saved(tmp_path), "-o", tmp_path / "m.honed", "--memory-mib", "6144"
    )
    assert status == 0, errors
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (4, 8)), ("w", (8, 16)))}
    with load(tmp_path / "m.honed", device.spec) as executor:
        found = executor.run(given)["y"]
    product = given["x"] @ given["w"]
    np.testing.assert_allclose(found, run_model(parser.parse_model(MODEL), given, device)["y"], rtol=1e-6)
    assert (found >= -0.2).all()
    np.testing.assert_allclose(found[product > 4], product[product > 4], rtol=1e-3)


# Prints digests of a model as it was normalised and of its compiled file.
_DIGESTS = """
import hashlib, sys
from pathlib import Path
from honed.machine.profile import DeviceProfile
from honed.tuner import frontend
from honed.tuner.compiler import compile as compiling
path, output, profile = (Path(one) for one in sys.argv[1:4])
request = compiling.CompileRequest(
    path=path, output=output, profile=DeviceProfile.load(profile), device=None, shapes={}, precision="auto",
    filename="m.onnx", processes=int(sys.argv[4]),
)
compiling.compile_file(request, lambda stage, done, text: None)
normalised = compiling.prepare(frontend.load(path), {}, "auto", request.profile).normalised
for made in (normalised.model.SerializeToString(), output.read_bytes()):
    print(hashlib.sha256(made).hexdigest())
"""


@pytest.mark.slow
def test_a_model_compiles_to_the_same_file_in_every_process(device: Device, tmp_path: Path) -> None:
    """Neither the order of sets nor that in which forked processes are done is in what is written."""
    layers = " ".join(f"a{n} = MatMul(y{n}, w) b{n} = Softmax(a{n}) y{n + 1} = Tanh(b{n})" for n in range(3))
    head = '<ir_version: 9, opset_import: ["": 20]> f (float[4,8] x, float[8,8] w) => (float[4,8] y)'
    file = _saved(tmp_path, f"{head} {{ y0 = Gelu(x) {layers} y = Neg(y3) }}")
    profile = tmp_path / "board.toml"
    profile.write_text(device.profile.dumps())
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGESTS, file, tmp_path / f"{processes}.honed", profile, str(processes)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": str(processes)},
        )
        for processes in (0, 2)
    ]
    one, other = (child.communicate(timeout=SECONDS)[0].split() for child in children)
    assert one == other
    assert len(one) == 2


@pytest.mark.slow
def test_a_profile_compiles_for_a_device_that_is_not_here(device: Device, tmp_path: Path) -> None:
    profile = tmp_path / "board.toml"
    profile.write_text(device.profile.dumps())
    status, events, errors = _tuner(
        "compile", _saved(tmp_path), "-o", tmp_path / "m.honed", "--profile", profile
    )
    assert status == 0, errors
    assert events[-1]["proof"]["device"] is None
    assert events[-1]["proof"]["error"] == {}


@pytest.mark.slow
def test_a_model_of_doubles_is_written_and_read(device: Device, tmp_path: Path) -> None:
    if not device.profile.limits.fp64:
        pytest.skip("the device has no doubles")
    file = _saved(
        tmp_path,
        '<ir_version: 9, opset_import: ["": 20]> f (double[4] x) => (double[4] y) { y = Tan(x) }',
    )
    status, events, errors = _tuner("compile", file, "-o", tmp_path / "m.honed", "--device", device.spec)
    assert (status, events[-1]["event"]) == (0, "done"), errors
    assert modelfile.read(tmp_path / "m.honed").model.source.precision == "fp64"
    x = np.linspace(-1, 1, 4)
    with load(tmp_path / "m.honed", device.spec) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], np.tan(x), rtol=1e-12)


ROOTS = '<ir_version: 9, opset_import: ["": 20]> f (float[64] x) => (float[64] y) { a = Abs(x) y = Sqrt(a) }'


def planted(*given: Any, **_: Any) -> tuple[str, Lowered, list[str]]:
    """Kernels that take no root, as if the driver had made something else of them."""
    _, lowered, passed_over = default_kernels(*given)
    return "planted", replace(lowered, source=lowered.source.replace("sqrt(", "fabs(")), passed_over


@pytest.fixture
def roots(device: Device, tmp_path: Path) -> compiling.CompileRequest:
    return request_for(_saved(tmp_path, ROOTS), device)


def test_wrong_schedules_give_way_to_default_rules(
    device: Device, roots: compiling.CompileRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "untuned_kernels", planted)
    told: list[float] = []
    made = compiling.compile_file(roots, lambda _stage, fraction, _text: told.append(fraction))
    assert told == sorted(told), "progress goes on while it is compiled again"
    assert "gave wrong answers on" in made.fell_back
    assert made.fell_back in " ".join(made.model.source.notes)
    assert made.reasons == (made.fell_back,)
    assert "planted" not in {kernel.schedule for kernel in made.model.kernels}
    x = np.linspace(1, 9, 64, dtype=np.float32)
    with load(roots.output, device.spec) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], np.sqrt(x), rtol=1e-6)


@pytest.mark.slow
def test_where_default_rules_are_wrong_too_the_node_is_named(
    roots: compiling.CompileRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "untuned_kernels", planted)
    monkeypatch.setattr(compiling, "default_kernels", planted)
    with pytest.raises(ModelRefused, match=r"does not give the reference's answers .* \(Sqrt\)"):
        compiling.compile_file(roots, lambda _stage, _fraction, _text: None)
    assert not roots.output.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '<ir_version: 9, opset_import: ["": 20]> f (float[4] x) => (int64[1,n] y) { y = NonZero(x) }',
            "NonZero",
        ),
        pytest.param(
            '<ir_version: 9, opset_import: ["": 20]> f (float[n] x) => (float[n] y) { y = Relu(x) }',
            "--shape",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["operator", "open shape"],
)
def test_refused_with_every_reason_and_nothing_written(
    text: str, reason: str, device: Device, tmp_path: Path
) -> None:
    status, events, _ = _tuner("compile", _saved(tmp_path, text), "-o", tmp_path / "m.honed")
    assert status == 1
    assert [e["event"] for e in events if e["event"] != "stage"] == ["refused"]
    assert reason in " ".join([events[-1]["message"], *events[-1]["reasons"]])
    assert "external_data" not in events[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.slow
def test_missing_data_beside_the_model_is_named(device: Device, tmp_path: Path) -> None:
    file = _saved(tmp_path)
    model = onnx.load(file)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((8, 16), np.float32), "w"))
    onnx.save(model, file, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    status, events, _ = _tuner("compile", file, "-o", tmp_path / "m.honed")
    assert status == 1
    assert events[-1]["event"] == "refused"
    assert events[-1]["external_data"] == ["weights.bin"]


@pytest.mark.parametrize(
    "options", [("--device", "no such device"), pytest.param(("--shape", "nonsense"), marks=pytest.mark.slow)]
)
def test_an_error_is_one_event(options: tuple[str, ...], device: Device, tmp_path: Path) -> None:
    status, events, _ = _tuner("compile", _saved(tmp_path), "-o", tmp_path / "m.honed", *options)
    assert status == 1
    assert [e["event"] for e in events if e["event"] != "stage"] == ["error"]
    assert events[-1]["message"]
    assert events[-1]["code"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("compile",),
        ("compile", "m.onnx"),
        ("compile", "m.onnx", "-o", "x", "--precision", "fp8"),
        ("bake",),
    ],
)
def test_wrong_usage_is_2_and_says_nothing_on_standard_output(arguments: tuple[str, ...]) -> None:
    status, events, errors = _tuner(*arguments)
    assert (status, events) == (2, [])
    assert "usage:" in errors


def test_a_fault_of_the_compiler_is_told_as_ours(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(given: Sequence[Lifetime], _alignment: int) -> tuple[list[int], int]:
        return [0] * len(given), max(one.nbytes for one in given)

    monkeypatch.setattr(plan, "place", careless)
    text = MODEL.replace("y = Gelu(a)", "b = MatMul(a, v) y = MatMul(b, u)").replace(
        "[8,16] w)", "[8,16] w, float[16,16] v, float[16,16] u)"
    )
    given = {"x": (4, 8), "w": (8, 16), "v": (16, 16), "u": (16, 16)}
    inputs = {name: np.zeros(shape, np.float32) for name, shape in given.items()}
    with pytest.raises(Internal, match=r"share scratch bytes .* report it with the ONNX file") as told:
        run_model(parser.parse_model(text), inputs, device)
    assert "compile the model again" not in str(told.value)


LIMITED = """
import resource
from honed.process.limits import limit_data
{before}
limit_data(512 << 20)
print(resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20, resource.getrlimit(resource.RLIMIT_AS)[0])
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", 512), ("resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 400 << 20))", 400)],
)
def test_memory_is_limited_and_address_space_is_not(before: str, expected: int) -> None:
    source = LIMITED.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert done.stdout.split() == [str(expected), str(space)]
