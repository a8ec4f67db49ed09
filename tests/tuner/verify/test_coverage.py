"""A verification counts only where the reference says something: no NaN, no constant, nothing saturated."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from honed.machine.devices import Device
from honed.protocol.errors import ModelRefused
from honed.runtime.compiled import modelfile
from honed.tuner.compiler import compile as compiling
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.verify.probes import ReferenceProbes, choose, of_values
from tests.tuner.compiler.test_compile import planted
from tests.tuner.requests import request_for


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{text}')


def chosen(text: str, opset: int = 17) -> ReferenceProbes:
    found = choose(model(text, opset), 3, "fp32")
    assert isinstance(found, ReferenceProbes), found
    return found


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("values", "finite", "told"),
    [
        (np.full(20, np.nan, np.float32), 0, 0),
        (np.linspace(0, 1, 20, dtype=np.float32), 1, 1),
        (np.r_[np.linspace(0, 1, 5), [np.inf] * 15], 0.25, 0.25),
        (np.full(20, 7), 1, 0),
        (np.zeros(20, bool), 1, 0),
        (np.arange(20) % 2 == 0, 1, 1),
        (np.r_[np.ones(10), np.zeros(10)], 1, 0),  # saturated at both ends
        (np.maximum(np.random.default_rng(0).standard_normal(1000), 0), 1, 1),  # half are zero, and differ
        (np.zeros((0, 3)), 1, 1),
        (floats(0.5), 1, 1),
    ],
)
def test_what_a_value_says(values: np.ndarray, finite: float, told: float) -> None:
    found = of_values([values])
    assert found.finite == pytest.approx(finite)
    assert found.varied == pytest.approx(told)


def test_one_number_that_never_changes_says_nothing() -> None:
    assert of_values([floats(1), floats(1), floats(1)]).varied == 0
    assert of_values([floats(1), floats(2), floats(1.5)]).varied == 1


MASKED = "float[1,8,8] s, int64[1,8] m"
SOFT = "p = Softmax(h)"


@pytest.mark.parametrize(
    "how",
    [
        "u = Unsqueeze(m, one) c = Cast<to = 1>(u) r = Sub(unit, c) n = Mul(r, lowest) h = Add(s, n)",
        "u = Unsqueeze(m, one) c = Cast<to = 1>(u) r = Sub(unit, c) n = Mul(lowest, r) h = Add(n, s)",
        "u = Unsqueeze(m, one) c = Cast<to = 9>(u) h = Where(c, s, lowest)",
        "c = Cast<to = 1>(m) r = Sub(c, unit) a = Neg(r) n = Mul(a, lowest) u = Unsqueeze(n, one)"
        "h = Add(s, u)",
    ],
)
def test_a_mask_is_known_by_what_is_done_with_it(how: str) -> None:
    found = chosen(
        f"f ({MASKED}) => (float[1,8,8] p) <int64[1] one = {{1}}, float unit = {{1}}, "
        f"float lowest = {{-3.4028234663852886e38}}> {{ {how} {SOFT} }}"
    )
    marks = np.stack([each["m"] for each in found.inputs])
    assert set(np.unique(marks)) == {0, 1}
    assert marks.any(axis=-1).all()
    assert found.covered == (1.0,)
    assert not found.unproven


def test_lengths_that_make_a_mask_are_positive() -> None:
    found = chosen(
        "f (float[2,8] s, int64[2,1] n) => (float[2,8] p) <int64 zero = {0}, int64 eight = {8}, "
        "int64 one = {1}, float lowest = {-3.0e38}> { a = Range(zero, eight, one)"
        "k = Less(a, n) h = Where(k, s, lowest) p = Softmax(h) }"
    )
    lengths = np.stack([each["n"] for each in found.inputs])
    assert lengths.min() >= 1
    assert lengths.max() <= 8
    assert len(np.unique(lengths)) > 1


@pytest.mark.parametrize("name", ["sound_lens", "sound_len", "sound_lengths", "SOUND_length"])
def test_lengths_named_after_an_input_reach_along_its_axes(name: str) -> None:
    """What counts frames of a sound says nothing where it is at most a few samples."""
    found = chosen(
        f"f (float[1,1600] sound, int64[1] {name}) => (float[1,1600] s, int64[1] n)"
        f"<int64 hop = {{160}}> {{ s = Neg(sound) n = Div({name}, hop) }}"
    )
    lengths = np.stack([each[name] for each in found.inputs])
    assert lengths.min() >= 1
    assert 160 <= lengths.max() <= 1600
    assert not found.unproven


@pytest.mark.parametrize(
    ("text", "name", "low", "high"),
    [
        (
            "f (float[2,12] x, int64[2] n) => (float[2,12] y)"
            "{ y = ReverseSequence<batch_axis = 0, time_axis = 1>(x, n) }",
            "n", 0, 12,
        ),
        (
            "f (float[1,16] u, float[32,4] t) => (float[1,16,4] y) <float n = {31.9}>"
            "{ a = Mul(u, n) i = Cast<to = 7>(a) y = Gather(t, i) }",
            "u", -32 / 31.9, 31 / 31.9,
        ),
        (
            "f (int64[16] k, float[8,4] t) => (float[16,4] y) <int64 two = {2}>"
            "{ i = Sub(k, two) y = Gather(t, i) }",
            "k", -6, 9,
        ),
        (
            "f (float[1,40,4] b, float[1,1,40] s, float[1] iou, float[1] least, int64[1] most)"
            "=> (int64[n,3] y) { y = NonMaxSuppression(b, s, most, iou, least) }",
            "iou", 0, 1,
        ),
        ("f (float[64] x) => (float[64] y) <float one = {1}> { a = Add(x, one) y = Log(a) }", "x", -0.99, 99),
    ],
)  # fmt: skip
def test_ranges_are_followed_through_arithmetic(text: str, name: str, low: float, high: float) -> None:
    from tests.tuner.verify.parsing import generate

    values = np.concatenate([np.ravel(each[name]) for each in generate(model(text), 12)])
    assert values.min() >= low - 1e-6
    assert values.max() <= high + 1e-6
    assert len(np.unique(values)) > 3


def test_integers_meet_what_they_are_compared_with() -> None:
    found = chosen("f (int64[64] x) => (bool[64] y) <int64 pad = {77}> { y = Equal(x, pad) }")
    assert found.covered == (1.0,)
    assert 0.05 < np.mean([each["y"] for each in found.outputs]) < 0.5


def test_the_files_own_words_about_pixels_count() -> None:
    from tests.tuner.verify.parsing import generate

    made = model("f (float[1,3,8,8] x) => (float[1,3,8,8] y) { y = Relu(x) }")
    made.metadata_props.add(key="Image.NominalPixelRange", value="NominalRange_0_255")
    values = np.stack([each["x"] for each in generate(made, 3)])
    assert values.min() >= 0
    assert 100 < values.max() <= 255


def test_inputs_that_onnx_runtime_refuses_are_drawn_again_in_smaller_ranges() -> None:
    found = chosen(
        "f (float[40] x, float[2,4] t) => (float[40,4] y)"
        "{ a = Mul(x, x) i = Cast<to = 7>(a) y = Gather(t, i) }"
    )
    assert found.evaluator.startswith("onnxruntime ")
    assert all(each["x"].max() <= 1 for each in found.inputs)


def test_inputs_whose_answers_are_not_finite_are_drawn_again() -> None:
    found = chosen(
        "f (float[40] x) => (float[40] y) <float one = {1.0}> { a = Mul(x, x) b = Sub(one, a) y = Sqrt(b) }"
    )
    assert found.covered[0] >= 0.5
    found = chosen(
        "f (int32[40] x) => (float[40] y) { c = Cast<to = 1>(x) e = Exp(c) g = Exp(e) y = Exp(g) }"
    )
    assert found.covered[0] >= 0.5


def request(
    folder: Path, text: str, device: Device, calibration: Path | None = None
) -> compiling.CompileRequest:
    onnx.save(model(text), folder / "m.onnx")
    return request_for(folder / "m.onnx", device, calibration=calibration)


ROOT_OF_LESS = "<float much = {1000000}> { a = Mul(x, x) b = Sub(a, much) y = Sqrt(b) z = Neg(x) }"
NEEDS_LARGE = f"f (float[40] x) => (float[40] z, float[40] y) {ROOT_OF_LESS}"


def test_nan_everywhere_proves_nothing_and_real_inputs_do(tmp_path: Path, device: Device) -> None:
    with pytest.raises(ModelRefused, match=r"cannot be verified, .* NaN .* output 'y'; .*--calibration"):
        compiling.compile_file(request(tmp_path, NEEDS_LARGE, device), lambda *_: None)
    assert not (tmp_path / "m.honed").exists()
    sets = tmp_path / "sets"
    sets.mkdir()
    real = np.linspace(1500, 2500, 40, dtype=np.float32)
    np.savez(sets / "0.npz", x=real)
    compiling.compile_file(request(tmp_path, NEEDS_LARGE, device, sets), lambda *_: None)
    with modelfile.read(tmp_path / "m.honed") as file:
        assert file.model.proof is not None
        assert len(file.model.proof.covered) == 2
        assert min(file.model.proof.covered) >= 0.5
        np.testing.assert_array_equal(file.inputs(file.model.probes[0])["x"], real)


SATURATED = """f (float[64] x) => (float[64] y) <float far = {100}> {
  a = Abs(x) s = Sqrt(a) l = Add(s, far) y = Sigmoid(l) }"""


def test_what_saturates_is_verified_by_what_it_is_given(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is 1 whatever a kernel computes before."""
    found = chosen(SATURATED)
    assert found.hidden
    assert not found.unproven
    assert found.covered == (1.0,)
    monkeypatch.setattr(compiling, "untuned_kernels", planted)
    monkeypatch.setattr(compiling, "default_kernels", planted)
    with pytest.raises(ModelRefused, match="given the reference's own values at each step"):
        compiling.compile_file(request(tmp_path, SATURATED, device), lambda *_: None)


def test_constants_of_the_model_are_covered() -> None:
    found = chosen("f (float[4,5] x) => (float[4,5] y, int64[2] s) { y = Relu(x) s = Shape(x) }")
    assert found.covered == (1.0, 1.0)
    assert not found.unproven


ALWAYS = {
    "the only place": ("f (float[4,1] x) => (int64[4,1] y) { y = ArgMax<axis = 1>(x) }", 17),
    "moved out of view": (
        "f (float[1,1,4,4] x) => (float[1,1,4,4] y) <int64[8] p = {0,0,4,1,0,0,-4,-1}> { y = Pad(x, p) }", 19,
    ),
    "nothing before": (
        "f (float[1,2] x) => (float[1,2] y) <int64 a = {0}> { y = CumSum<exclusive = 1>(x, a) }", 17,
    ),
    "a share of one": ("f (float[6,1] x) => (float[6,1] y) { y = Softmax<axis = 1>(x) }", 17),
    "off its own mean": (
        "f (float[6,1] x) => (float[6,1] y) { m = ReduceMean<axes = [1]>(x) y = Sub(x, m) }", 17,
    ),
    "the largest of nothing": (
        "f (float[2,0] x, float[2] b) => (float[2] y)"
        "<int64[1] a = {1}> { m = ReduceMax<keepdims = 0>(x, a) y = Max(m, m, m) }", 20,
    ),
    "the length of a list": (
        "f (float[7,2] x) => (int64 y) <int64 n = {3}>"
        "{ s = SplitToSequence(x, n) y = SequenceLength(s) }", 17,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALWAYS)
def test_what_is_constant_by_nature_is_proven_by_equality(kind: str) -> None:
    found = chosen(*ALWAYS[kind])
    assert not found.unproven
    assert not found.needs_steps
    assert found.covered == (1.0,)
    assert len(found.inputs) == 3
    if not found.hidden:  # else it is verified at the model's steps where they can be opened
        assert found.tolerance[0] <= 1e-6
        assert "compared for equality" in found.notes[-1]


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        # Of booleans, whether any and whether all, of rows and of everything.
        (
            "f (bool[3,9] x) => (bool[3] some, bool[3] every) <int64[1] a = {-1}>"
            "{ some = ReduceMax<keepdims = 0>(x, a) every = ReduceMin<keepdims = 0>(x, a) }", 20,
        ),
        ("f (bool[3,9] x) => (bool some) { some = ReduceMax<keepdims = 0>(x) }", 20),
        # Whether something is far off, and what a wide quantum hides.
        ("f (float[2,8] x) => (bool[2,8] y) <float far = {50}> { y = Greater(x, far) }", 17),
        (
            "f (float[2,8] x) => (uint8[2,8] y) <float wide = {100}, uint8 zero = {0}>"
            "{ y = QuantizeLinear(x, wide, zero) }", 17,
        ),
        # A mask that ordinary numbers leave on.
        (
            "f (float[4,8] x) => (float[4,8] y) <float low = {-50}, float none = {0}>"
            "{ m = Greater(x, low) y = Where(m, none, x) }", 17,
        ),
    ],
)  # fmt: skip
def test_what_ordinary_inputs_leave_constant_is_made_to_change(text: str, opset: int) -> None:
    found = chosen(text, opset)
    assert not found.unproven
    for name in found.outputs[0]:
        assert len(np.unique([each[name] for each in found.outputs])) > 1, name


def test_few_elements_in_a_map_of_padding_are_enough() -> None:
    found = chosen(
        "f (float[1,1,4,4] x) => (float[1,1,64,64] y) <int64[8] p = {0,0,0,0,0,0,60,60}> { y = Pad(x, p) }"
    )
    assert not found.unproven
    assert not found.notes


def compiled(kind: str, folder: Path, device: Device) -> compiling.CompileResult:
    text, opset = ALWAYS[kind]
    made = request(folder, text, device)
    onnx.save(model(text, opset), made.path)
    return compiling.compile_file(made, lambda *_: None)


@pytest.mark.parametrize("kind", [kind for kind in ALWAYS if kind != "the largest of nothing"])
def test_what_is_constant_by_nature_is_compiled(kind: str, tmp_path: Path, device: Device) -> None:
    compiled(kind, tmp_path, device)


def idle(*given: Any, **_: Any) -> tuple[str, Any, list[str]]:
    """Kernels that write nothing."""
    _, lowered, passed_over = default_kernels(*given)
    source = re.sub(r"(__kernel[^{]*{)", r"\1 return;", lowered.source)
    assert source != lowered.source
    return "planted", replace(lowered, source=source), passed_over


def test_kernels_that_write_nothing_are_not_right_where_zeros_are(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory is full of zeros, and memory of the run before has its answer, here the same."""
    monkeypatch.setattr(compiling, "untuned_kernels", idle)
    monkeypatch.setattr(compiling, "default_kernels", idle)
    with pytest.raises(ModelRefused, match="does not give the reference's answers"):
        compiled("off its own mean", tmp_path, device)
