"""Models with steps in them are proven part by part: what a step decides by the last bit is not held against
them, and everything else is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper, parser
from onnxruntime.quantization import QuantType, quantize_dynamic

from honed.machine.devices import Device
from honed.protocol.errors import ModelRefused
from honed.runtime.compiled import modelfile
from honed.runtime.execution import programs
from honed.tuner import frontend
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler import verification
from honed.tuner.frontend import Normalised
from honed.tuner.verify import discontinuities, probes
from honed.tuner.verify.confined import DEFAULT_LIMITS
from tests.tuner.compiler.test_compile import planted
from tests.tuner.requests import request_for
from tests.tuner.verify.parsing import generate

Arrays = Mapping[str, np.ndarray]


def weighted(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """A model with normal weights of these shapes."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}')
    rng = np.random.default_rng(7)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


QUANTISED = weighted(
    """f (float[16, 32] x) => (float[16, 8] y) <float scale = {0.25}, uint8 zero = {128}> {
  p = MatMul(x, w)
  q = QuantizeLinear(p, scale, zero)
  d = DequantizeLinear(q, scale, zero)
  r = Relu(d)
  o = QuantizeLinear(r, scale, zero)
  e = DequantizeLinear(o, scale, zero)
  y = MatMul(e, v)
}""",
    w=(32, 24),
    v=(24, 8),
)
CHOSEN = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
f (float[64] x) => (float[64] y, int64[1] best) <float half = {0.5}> {
  s = Sin(x)
  above = Greater(s, half)
  n = Neg(s)
  y = Where(above, s, n)
  best = ArgMax(y)
}""")


def runtime(model: onnx.ModelProto, sets: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
    """ONNX Runtime's answers, which no test below takes for the compiled form's without changing them."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.output]
    return [dict(zip(names, session.run(None, dict(each)), strict=True)) for each in sets]


def changed(**changes: Callable[[np.ndarray], np.ndarray]) -> discontinuities.Run:
    """A compiled form that gives the reference's answers, but for some values."""

    def run(model: onnx.ModelProto, sets: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        return [
            {n: changes[n](v) if n in changes else v for n, v in found.items()}
            for found in runtime(model, sets)
        ]

    return run


def judged(model: onnx.ModelProto, run: discontinuities.Run) -> discontinuities.PiecewiseVerification:
    usual = [1e-3] * len(model.graph.output)
    found = discontinuities.judge(model, generate(model, 2), run, precision="fp32", tolerance=usual)
    assert found is not None
    return found


def test_a_model_without_steps_is_not_opened() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (float[4] x) => (float[4] y) { y = Sin(x) }'
    )
    assert discontinuities.open_at_steps(model) is None
    assert (
        discontinuities.judge(model, generate(model, 1), runtime, precision="fp32", tolerance=[1e-3]) is None
    )


def test_steps_that_constants_alone_decide_are_none() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (float[4] x) => (float[4] y) '
        "<float[4] c = {1, 2, 3, 4}> { r = Round(c) y = Mul(x, r) }"
    )
    assert discontinuities.open_at_steps(model) is None


@pytest.mark.parametrize("model", [QUANTISED, CHOSEN], ids=["quantised", "chosen"])
def test_an_opened_model_given_its_own_values_makes_them_again(model: onnx.ModelProto) -> None:
    apart = discontinuities.open_at_steps(model)
    assert apart is not None
    onnx.checker.check_model(apart.model, full_check=True)
    inputs = generate(model, 1)[0]
    (reference,) = runtime(discontinuities.exposing(model, apart), [inputs])
    (found,) = runtime(apart.model, [apart.feeds(inputs, reference)])
    original = {made: name for name, made in apart.made.items()}
    assert set(found) == {v.name for v in model.graph.output} - set(apart.after) | set(apart.before) | set(
        original
    )
    for name, value in found.items():
        np.testing.assert_array_equal(value, reference[original.get(name, name)])


UNARY = ["Sin", "Neg", "Round", "Floor", "Sign", "Relu", "Cast"]


@given(
    nodes=st.lists(
        st.tuples(st.sampled_from([*UNARY, "Add", "Greater"]), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
        max_size=10,
    )
)
def test_any_graph_opened_makes_the_values_of_the_whole(nodes: list[tuple[str, int, int]]) -> None:
    values, text = ["x"], []
    for i, (op, a, b) in enumerate(nodes):
        left, right = values[a % len(values)], values[b % len(values)]
        match op:
            case "Cast":
                text.append(f"i{i} = Cast<to = 7>({left}) v{i} = Cast<to = 1>(i{i})")
            case "Add":
                text.append(f"v{i} = Add({left}, {right})")
            case "Greater":
                text.append(f"b{i} = Greater({left}, {right}) v{i} = Where(b{i}, {left}, {right})")
            case _:
                text.append(f"v{i} = {op}({left})")
        values.append(f"v{i}")
    model = weighted(f"f (float[8] x) => (float[8] {values[-1]}) {{ {' '.join(text)} }}")
    apart = discontinuities.open_at_steps(model)
    inputs = {"x": np.linspace(-3.3, 4.1, 8, dtype=np.float32)}
    if apart is None:
        assert not {op for op, _, _ in nodes} & {"Round", "Floor", "Sign", "Cast", "Greater"}
        return
    (reference,) = runtime(discontinuities.exposing(model, apart), [inputs])
    (found,) = runtime(apart.model, [apart.feeds(inputs, reference)])
    for name, value in found.items():
        original = {made: n for n, made in apart.made.items()}.get(name, name)
        np.testing.assert_array_equal(value, reference[original])


def test_right_parts_allow_the_whole_what_the_reference_does_to_itself() -> None:
    found = judged(QUANTISED, changed(p=lambda v: v * np.float32(1 + 3e-4)))
    assert found.wrong is None
    assert 1e-3 < found.tolerance[0] <= 0.25
    assert "proven part by part between its 2 steps" in found.note


def one_up(share: float) -> Callable[[np.ndarray], np.ndarray]:
    """So many of the elements one quantum up."""

    def change(value: np.ndarray) -> np.ndarray:
        other = value.copy()
        other.reshape(-1)[: round(share * value.size)] += 1
        return other

    return change


def test_a_quantum_at_a_boundary_is_allowed_to_few() -> None:
    assert judged(QUANTISED, changed(**{"q, made": one_up(0.005)})).wrong is None
    many = judged(QUANTISED, changed(**{"q, made": one_up(0.05)})).wrong
    assert many is not None
    assert "output 'q' differs" in many
    two = judged(QUANTISED, changed(**{"q, made": lambda v: one_up(0.003)(one_up(0.003)(v))})).wrong
    assert two is not None


@pytest.mark.parametrize("name", ["p", "r", "y"])
def test_a_part_that_is_wrong_is_named(name: str) -> None:
    wrong = judged(QUANTISED, changed(**{name: lambda v: v * np.float32(1.02)})).wrong
    assert wrong is not None
    assert f"output {name!r} differs by 0.02" in wrong


def test_what_is_rounded_may_be_off_by_a_hundredth_of_its_quantum() -> None:
    model = weighted(
        """f (float[64] x) => (float[64] y) <float less = {13}, float scale = {0.05}, uint8 zero = {0}> {
  l = Add(x, less)
  s = Reciprocal(l)
  q = QuantizeLinear(s, scale, zero)
  y = DequantizeLinear(q, scale, zero)
}"""
    )
    assert judged(model, changed(s=lambda v: v + np.float32(3e-4))).wrong is None
    assert judged(model, changed(s=lambda v: v + np.float32(8e-4))).wrong is not None


def test_functions_into_one_may_be_off_by_the_last_bits_of_one() -> None:
    """ONNX Runtime's sigmoid errs by 1e-7, which is much of the range where all its values are small."""
    model = weighted(
        """f (float[64] x) => (float[64] y) <float less = {-13}, float scale = {0.000001}, uint8 zero = {0}> {
  l = Add(x, less)
  s = Sigmoid(l)
  q = QuantizeLinear(s, scale, zero)
  y = DequantizeLinear(q, scale, zero)
}"""
    )
    assert judged(model, changed(s=lambda v: v + np.float32(1e-7))).wrong is None
    assert judged(model, changed(s=lambda v: v + np.float32(1e-6))).wrong is not None


SATURATED = weighted(
    """f (float[16, 32] x) => (float[128] y) <float tenth = {0.1}, float less = {16}, int64[1] flat = {-1}> {
  p = MatMul(x, w)
  t = Mul(p, tenth)
  l = Sub(t, less)
  s = Sigmoid(l)
  y = Reshape(s, flat)
}""",
    w=(32, 8),
)


def test_what_saturates_at_the_end_is_judged_by_what_it_is_given() -> None:
    """A detector that sees nothing gives 1e-7 everywhere, of which the last bits are all there is."""
    right = judged(SATURATED, changed(**{"s, made": lambda v: v + np.float32(1e-7)}))
    assert right.wrong is None
    largest = max(found["y"].max() for found in runtime(SATURATED, generate(SATURATED, 2)))
    assert right.tolerance[0] * largest <= 2.4e-7
    for name, by in (("l", 1.02), ("s, made", 1e6)):
        wrong = judged(SATURATED, changed(**{name: lambda v, by=by: v * np.float32(by)})).wrong
        assert wrong is not None
        assert f"output {name[0]!r} differs" in wrong


def test_what_is_computed_with_after_it_saturates_is_no_step() -> None:
    model = weighted("f (float[4] x) => (float[4] y) { s = Sigmoid(x) y = Sin(s) }")
    assert discontinuities.open_at_steps(model) is None


def test_choices_between_the_same_values_must_be_the_same() -> None:
    assert judged(CHOSEN, runtime).wrong is None
    other = judged(CHOSEN, changed(**{"above, made": np.logical_not})).wrong
    assert other is not None
    assert "'above'" in other


# Each step makes eight times as much of what a rounding to 2^-15 changed.
AMPLIFYING = parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> f (float[2048] x) => (float[2048] v24) '
    "<float eight = {8}, float fine = {0.00003}, uint16 zero = {32768}> { v0 = Sin(x) "
    + " ".join(
        f"m{n} = Mul(v{n}, eight) s{n} = Sin(m{n}) "
        f"q{n} = QuantizeLinear(s{n}, fine, zero) v{n + 1} = DequantizeLinear(q{n}, fine, zero)"
        for n in range(24)
    )
    + "}"
)


@pytest.fixture
def rounded(tmp_path: Path, device: Device) -> compiling.CompileRequest:
    """A model of 49,152 sums that nearly cancel, rounded to an eighth of their range: some on its edge."""
    model = weighted(
        """f (float[48, 1024] x) => (float[48, 1024] y)
<float far = {100}, float scale = {4}, int8 zero = {0}> {
  a = Abs(x)
  s = Sqrt(a)
  z = Add(s, far)
  p = MatMul(z, w)
  q = QuantizeLinear(p, scale, zero)
  y = DequantizeLinear(q, scale, zero)
}""",
        w=(1024, 1024),
    )
    weights = numpy_helper.to_array(model.graph.initializer[-1])
    centred = numpy_helper.from_array(weights - weights.mean(axis=0), "w")
    model.graph.initializer[-1].CopyFrom(centred)
    onnx.save(model, tmp_path / "rounded.onnx")
    return request_for(tmp_path / "rounded.onnx", device)


def test_sums_at_a_boundary_are_served_with_a_note(
    rounded: compiling.CompileRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    build = programs._build

    def building(device: Device, source: str, cache: Path | None) -> Any:
        built.append(source)
        return build(device, source, cache)

    monkeypatch.setattr(programs, "_build", building)
    monkeypatch.setattr(verification, "run_sets", None)  # no part is compiled by itself
    result = compiling.compile_file(rounded, lambda *_: None)
    assert len(set(built)) == len(built) > 0, "a program that is there is built again"
    proven = modelfile.read(rounded.output).model.proof
    assert proven is not None
    assert proven.error[0] > 0.05, "no sum lies at a boundary any more; this shows nothing"
    assert 0.05 < proven.probes[0].tolerance[0] <= 0.25
    assert any("proven part by part between its 1 steps" in note for note in result.model.source.notes)


def test_wrong_kernels_before_a_step_are_refused(
    rounded: compiling.CompileRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "untuned_kernels", planted)
    monkeypatch.setattr(compiling, "default_kernels", planted)
    with pytest.raises(ModelRefused, match="given the reference's own values at each step"):
        compiling.compile_file(rounded, lambda *_: None)
    assert not rounded.output.exists()


def test_a_model_that_amplifies_rounding_is_refused_before_its_kernels_are_made(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(AMPLIFYING, tmp_path / "amplifying.onnx")
    request = request_for(tmp_path / "amplifying.onnx", device)
    monkeypatch.setattr(compiling, "lower_module", lambda *_: pytest.fail("it was lowered"))
    with pytest.raises(ModelRefused, match=r"output .v24. of the reference itself changes.*--calibration"):
        compiling.compile_file(request, lambda *_: None)
    assert judged(QUANTISED, runtime).undetermined == ""


@pytest.mark.slow
def test_a_wrong_rule_is_found_though_the_calls_compute_what_it_says(
    rounded: compiling.CompileRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def normalised(*given: Any, **named: Any) -> Normalised:
        found = normalise(*given, **named)
        for tensor in found.model.graph.initializer:
            if tensor.dims == [1024, 1024]:
                larger = numpy_helper.to_array(tensor) * np.float32(1.004)
                tensor.CopyFrom(numpy_helper.from_array(larger, tensor.name))
        return found

    normalise = frontend.normalise
    monkeypatch.setattr(frontend, "normalise", normalised)
    with pytest.raises(ModelRefused, match="given the reference's own values at each step"):
        compiling.compile_file(rounded, lambda *_: None)


def test_an_operator_that_rounds_inside_may_be_off_by_what_moves_it() -> None:
    """A quantised LSTM rounds its state in each step, where nothing can be opened."""
    plain = weighted(
        "f (float[24, 1, 16] x) => (float[24, 1, 1, 32] y) { y, h, c = LSTM<hidden_size = 32>(x, w, r) }",
        w=(1, 128, 16),
        r=(1, 128, 32),
    )
    del plain.graph.node[0].output[1:]
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(plain, f"{folder}/m.onnx")
        quantize_dynamic(f"{folder}/m.onnx", f"{folder}/q.onnx", weight_type=QuantType.QInt8)
        model = onnx.load(f"{folder}/q.onnx")
    assert "DynamicQuantizeLSTM" in {node.op_type for node in model.graph.node}
    assert judged(model, changed(**{"y, made": lambda v: v + np.float32(1.5e-3)})).wrong is None
    wrong = judged(model, changed(**{"y, made": lambda v: v * np.float32(1.2)})).wrong
    assert wrong is not None
    assert "output 'y' differs" in wrong


def test_noise_at_steps_differs_from_run_to_run_and_stays_small() -> None:
    apart = discontinuities.open_at_steps(QUANTISED)
    assert apart is not None
    moved = discontinuities.moving(QUANTISED, apart, {"p": 1e-3, "r": 1e-3})
    outputs = [onnx.helper.make_tensor_value_info("p, moved", 1, None)]
    outputs += [onnx.helper.make_tensor_value_info("p", 1, None)]
    moved.graph.output.extend(outputs)
    one, other = runtime(moved, generate(QUANTISED, 1) * 2)
    assert not np.array_equal(one["p, moved"], other["p, moved"])
    for each in (one, other):
        assert 0 < np.abs(each["p, moved"] - each["p"]).max() <= 1.01e-3


def test_probes_of_an_opened_model_know_the_values_at_its_steps() -> None:
    """They are what another evaluation gives, and the probes are what they are for the model alone."""
    apart = discontinuities.quantising(QUANTISED)
    assert apart is not None
    plain, shown = (probes.choose(QUANTISED, 2, "fp32", piecewise=each) for each in (None, apart))
    assert isinstance(plain, probes.ReferenceProbes)
    assert isinstance(shown, probes.ReferenceProbes)
    assert plain.opened is None
    assert shown.opened is not None
    np.testing.assert_equal((shown.inputs, shown.outputs), (plain.inputs, plain.outputs))
    assert (shown.tolerance, shown.covered) == (plain.tolerance, plain.covered)
    again = discontinuities.open_with_reference(QUANTISED, shown.inputs, DEFAULT_LIMITS)
    assert again is not None
    np.testing.assert_equal(list(shown.opened[1]), list(again[1]))
    assert {"y", *apart.before, *apart.after} == shown.opened[1][0].keys()
