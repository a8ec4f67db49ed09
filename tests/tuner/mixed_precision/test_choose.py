"""What `--precision auto` takes, says, and keeps to."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser

from honed.machine.devices import Device
from honed.machine.profile import DevicePeaks, DeviceProfile
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import PrecisionChoice
from honed.runtime.errors import InvalidArgument, ModelRefused, NotFound
from honed.runtime.execution.verification import Difference
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler import verification
from honed.tuner.frontend import StaticTensorSpec, normalise
from honed.tuner.mixed_precision import choose
from honed.tuner.mixed_precision.choose import why_not_half
from honed.tuner.tune.extract import extract
from honed.tuner.verify import levels
from honed.tuner.verify.confined import DEFAULT_LIMITS
from honed.valhall.bench import bench_profile
from tests.tuner.graph.graphs import SAME, TOWERS, parsed

pytestmark = pytest.mark.tvm
MALI = bench_profile("mali-g610")


def _peaks(half: float | None) -> DevicePeaks:
    return DevicePeaks(fp32_gflops=100.0, fp16_gflops=half, bandwidth_gbs=10.0, launch_us=1.0)


def _named(name: str, peaks: DevicePeaks | None) -> DeviceProfile:
    return replace(MALI, identity=replace(MALI.identity, name=name), peaks=peaks)


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        (MALI, ""),
        (_named("GPU", _peaks(125.0)), ""),
        (_named("GPU", _peaks(110.0)), "1.10 times as fast"),
        (_named("GPU", None), "not measured"),
        (_named("Mali-LODX r0p0", None), ""),
        (replace(MALI, limits=replace(MALI.limits, fp16=False)), "no fp16 arithmetic"),
    ],
)
def test_fp16_pays_where_the_device_computes_it_faster(profile: DeviceProfile, why: str) -> None:
    found = why_not_half(profile)
    assert why in found
    assert bool(found) == bool(why)


def _model(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]>\n{text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v, np.float32), name) for name, v in constants.items()
    )
    return model


WEIGHTS = np.eye(16, 8, dtype=np.float32) / 2  # no sums, so that little is lost
DENSE = _model("f (float[4,16] x) => (float[4,8] y) { a = MatMul(x, w) y = Tanh(a) }", w=WEIGHTS)
# What it gives depends on the size of x: of numbers about 1 fp16 can tell no two apart 1e-4 from each other.
SMALL = _model(
    "f (float[4,16] x) => (float[4,8] y) { d = Sub(x, o) s = Mul(d, f) a = MatMul(s, w) y = Tanh(a) }",
    o=1.0, f=1e4, w=WEIGHTS,
)  # fmt: skip


def _decide(
    model: onnx.ModelProto, profile: DeviceProfile = MALI, calibration: Path | None = None
) -> PrecisionChoice:
    return choose.decide(model, normalise(model), profile, calibration=calibration)


def test_a_model_that_errs_little_is_computed_in_fp16() -> None:
    found = _decide(DENSE)
    assert found.half
    assert (found.single, found.wide) == ((), ())
    assert "on 3 made-up inputs, 0.002 is allowed" in found.why
    assert "0 of 2 operators kept in float32, 0 of 1 products added up in float32" in found.why
    assert choose.apply(found, normalise(DENSE)).precision == "fp16"


def test_other_types_and_slow_devices_keep_the_models_own() -> None:
    half = _model("f (float16[4] x) => (float16[4] y) { y = Tanh(x) }")
    assert "own types" in _decide(half).why
    slow = _decide(DENSE, _named("GPU", _peaks(100.0)))
    assert not slow.half
    assert "1.00 times as fast" in slow.why


def test_the_form_for_onnx_runtime_is_right_and_looks_like_the_model() -> None:
    form, precision = choose.onnx_form(DENSE)
    onnx.checker.check_model(form, full_check=True)
    assert precision == "fp16"
    assert (form.graph.input, form.graph.output) == (DENSE.graph.input, DENSE.graph.output)
    assert [node.op_type for node in form.graph.node] == ["Cast", "MatMul", "Tanh", "Cast"]
    assert [each.data_type for each in form.graph.initializer] == [TensorProto.FLOAT16]
    found = levels.highest(DENSE, {}, DEFAULT_LIMITS, (form, precision))
    assert (found.checked, found.level, found.why) == (True, "all", "")
    bounded = _model("f (float[4,16] x) => (float[4,8] y) { a = MatMul(x, w) y = Clip(a, l, h) }",
                     w=WEIGHTS, l=0.0, h=6.0)  # fmt: skip
    assert [node.op_type for node in choose.onnx_form(bounded)[0].graph.node] == [
        "Cast",
        "MatMul",
        "Clip",
        "Cast",
    ]
    form.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.float16(1.1) * np.eye(16, 8, dtype=np.float16), "w")
    )
    spoilt = levels.highest(DENSE, {}, DEFAULT_LIMITS, (form, precision))
    assert not spoilt.checked
    assert "output 'y'" in spoilt.why


def test_there_is_no_form_of_a_model_of_other_types() -> None:
    with pytest.raises(ModelRefused, match="own types"):
        choose.onnx_form(_model("f (float16[4] x) => (float16[4] y) { y = Tanh(x) }"))
    with pytest.raises(ModelRefused, match="sums of products stay in float32"):
        choose.onnx_form(_model("f (float[4] x) => (float[4] y) { y = Tanh(x) }"))


def _sets(folder: Path, *values: np.ndarray) -> Path:
    folder.mkdir(exist_ok=True)
    for number, value in enumerate(values):
        np.savez(folder / f"{number}.npz", x=value)
    return folder


def test_the_users_inputs_decide(tmp_path: Path) -> None:
    near = 1 + np.random.standard_normal((4, 16)).astype(np.float32) / 1e4
    found = _decide(SMALL, calibration=_sets(tmp_path / "near", near, near))
    assert "on 2 given inputs" in found.why
    assert found.half
    assert found.single == ("d/Sub",)
    far = 1 + np.random.standard_normal((4, 16)).astype(np.float32) * 3e2
    assert _decide(SMALL, calibration=_sets(tmp_path / "far", far)).single == ()


SPECS = (StaticTensorSpec(name="x", dtype="float32", shape=(4, 16)),)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"z": np.zeros((4, 16), np.float32)}, r"a\.npz has no 'x'; give one array for each input: 'x'"),
        ({"x": np.zeros((4, 16), np.float32), "z": np.zeros(1)}, r"a\.npz has 'z', no input of the model"),
        (
            {"x": np.zeros((4, 15), np.float32)},
            r"'x' is float32\[4, 15\] and the model takes float32\[4, 16\]",
        ),
        ({"x": np.zeros((4, 16))}, r"'x' is float64\[4, 16\] and the model takes float32"),
        ({"x": np.full((4, 16), np.nan, np.float32)}, "'x' holds NaN or infinity"),
        ({"x": np.full((4, 16), None)}, r"'x' is object\[4, 16\] and the model takes float32"),
    ],
    ids=["missing", "unknown", "shape", "type", "NaN", "objects"],
)
def test_a_set_that_does_not_fit_is_refused(arrays: dict[str, np.ndarray], said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InvalidArgument, match=said):
        choose.calibration_sets(tmp_path, SPECS)


def test_a_folder_without_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no folder"):
        choose.calibration_sets(tmp_path / "none", SPECS)
    with pytest.raises(InvalidArgument, match=r"holds no \.npz file"):
        choose.calibration_sets(tmp_path, SPECS)
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04nothing")
    with pytest.raises(InvalidArgument, match="damaged"):
        choose.calibration_sets(tmp_path, SPECS)
    for number in range(17):
        (tmp_path / f"{number}.npz").touch()
    with pytest.raises(InvalidArgument, match="holds 18 sets of inputs; give at most 16"):
        choose.calibration_sets(tmp_path, SPECS)


def _request(
    folder: Path,
    profile: DeviceProfile = MALI,
    device: Device | None = None,
    model: onnx.ModelProto = DENSE,
) -> compiling.CompileRequest:
    onnx.save(model, folder / "m.onnx")
    return compiling.CompileRequest(
        path=folder / "m.onnx",
        output=folder / "m.honed",
        profile=profile,
        device=device,
        shapes={},
        precision="auto",
        filename="m.onnx",
    )


def _compiled(request: compiling.CompileRequest) -> compiling.CompileResult:
    return compiling.compile_file(request, lambda _stage, _fraction, _text: None)


def test_the_file_says_what_was_chosen_and_others_keep_to_it(tmp_path: Path) -> None:
    request = _request(tmp_path)
    first = _compiled(request)
    assert modelfile.read(request.output).model == first.model
    source = first.model.source
    assert source.precision == "fp16"
    assert source.choice == _decide(DENSE)
    # Without its peaks nobody would take fp16 on this device.
    unknown = replace(
        request, profile=_named("GPU", None), output=tmp_path / "n.honed", existing_build=request.output
    )
    again = _compiled(unknown)
    assert again.model.source.choice == source.choice
    tasks = {kernel.task for kernel in first.model.kernels}
    assert tasks == {kernel.task for kernel in again.model.kernels}
    found = extract(request.path, {}, "auto", unknown.profile, existing_build=request.output).tasks
    assert {one.task.key for one in found} == tasks


def test_a_choice_is_of_the_graph_that_passes_made(tmp_path: Path) -> None:
    """Twins have one name then, in the file, for who compiles again and for who tunes."""
    towers = parsed(TOWERS, **SAME)
    assert {one.name: one.times for one in normalise(towers).applied}["twins"]
    request = _request(tmp_path, model=towers)
    first = _compiled(request)
    choice = first.model.source.choice
    assert choice is not None
    assert choice.half
    assert any(name.endswith("/twins") for name in choice.single)
    again = _compiled(replace(request, output=tmp_path / "n.honed", existing_build=request.output))
    tasks = {kernel.task for kernel in first.model.kernels}
    assert tasks == {kernel.task for kernel in again.model.kernels}
    found = extract(request.path, {}, "auto", MALI, existing_build=request.output).tasks
    assert {one.task.key for one in found} == tasks


def test_where_another_version_named_operators_otherwise_it_is_chosen_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = parsed(TOWERS, **SAME)
    with monkeypatch.context() as earlier:  # a version that knew of no passes
        module = sys.modules["honed.tuner.frontend.normalise"]
        earlier.setattr(module, "improve", lambda graph, _passes: (graph, ()))
        request = _request(tmp_path, model=towers)
        before = _compiled(request).model.source.choice
    now = _compiled(
        replace(request, output=tmp_path / "n.honed", existing_build=request.output)
    ).model.source.choice
    assert before is not None
    assert now is not None
    assert now.half
    assert now.single != before.single


def test_a_file_whose_precision_was_not_chosen_keeps_the_models_own(tmp_path: Path) -> None:
    request = _request(tmp_path)
    fixed = _compiled(replace(request, precision="fp32"))
    assert fixed.model.source.choice is None
    again = _compiled(replace(request, output=tmp_path / "n.honed", existing_build=request.output))
    assert again.model.source.precision == "fp32"


def test_a_choice_for_another_model_is_refused() -> None:
    choice = PrecisionChoice(half=True, why="", single=("no such value",))
    with pytest.raises(InvalidArgument, match="chosen for another model"):
        choose.apply(choice, normalise(DENSE))


def test_wrong_answers_in_fp16_give_way_to_the_models_own_types(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def probed(
        _device: object, draft: verification.VerificationResult, _expected: object
    ) -> verification.VerificationResult:
        precision = draft.model.source.precision
        asked.append(precision)
        error = 1.0 if precision == "fp16" else 0.0
        found = Difference(output="y", error=error, tolerance=0.1, index=(0, 0), expected=0.0, found=1.0)
        return replace(draft, results=(found,))

    monkeypatch.setattr(verification, "_probe", probed)
    told: list[float] = []
    made = compiling.compile_file(
        _request(tmp_path, device=device), lambda _stage, fraction, _text: told.append(fraction)
    )
    assert asked[-1] == made.model.source.precision == "fp32"
    assert made.model.source.choice is not None
    assert "fp16 gave wrong answers on" in made.model.source.choice.why
    assert told == sorted(told), "progress goes on while it is compiled again"


def test_a_product_added_up_in_float32_gives_what_follows_fp16() -> None:
    keep = PrecisionChoice(half=True, why="", wide=(normalise(DENSE).model.graph.node[0].output[0],))
    halved = choose.apply(keep, normalise(DENSE))
    kinds = {i.name: i.type.tensor_type.elem_type for i in halved.model.graph.value_info}
    product, cast, function = halved.model.graph.node
    assert kinds[product.output[0]] == TensorProto.FLOAT
    assert kinds[cast.output[0]] == TensorProto.FLOAT16
    assert function.input[0] == cast.output[0]
    assert halved.precision == "mixed"
