"""The reference is right, independent, bounded in time and memory, and says which evaluator it was."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from honed.runtime.errors import InvalidArgument
from honed.tuner import lightglue
from honed.tuner.verify.confined import EvaluationLimits
from honed.tuner.verify.evaluator import Reference, ReferenceFailure, evaluate
from tests.processes import running_children

from .parsing import generate, parsed


@pytest.fixture(scope="module", autouse=True)
def _warm_evaluators() -> None:
    """None: evaluators are started as programs here."""


def _done(result: Reference | ReferenceFailure) -> Reference:
    assert isinstance(result, Reference), result
    return result


def _failed(result: Reference | ReferenceFailure) -> str:
    assert isinstance(result, ReferenceFailure), result
    assert "\n" not in result.reason
    return result.reason


ALL_TYPES = parsed(
    "f (float16[2,3] h, bool[3] b, int8[2] i, double s, float[0,4] e, uint8[2] u) =>"
    "(float16[2,3] ho, bool[3] bo, int8[2] io, double so, float[0,4] eo, int32[2] uo)"
    "{ ho = Relu(h) bo = Not(b) io = Identity(i) so = Sqrt(s) eo = Relu(e) uo = Cast<to = 6>(u) }"
)


@pytest.mark.parametrize("evaluator", ["onnxruntime", "reference"])
def test_types_scalars_and_empty_tensors(evaluator: str) -> None:
    given = generate(ALL_TYPES, 2)
    result = _done(evaluate(ALL_TYPES, given, evaluators=[evaluator]))
    assert evaluator in result.evaluator
    assert result.evaluator.split()[1][0].isdigit()
    assert result.note is None
    for values, outputs in zip(given, result.outputs, strict=True):
        assert list(outputs) == ["ho", "bo", "io", "so", "eo", "uo"]
        expected = {
            "ho": np.maximum(values["h"], 0), "bo": ~values["b"], "io": values["i"],
            "so": np.sqrt(values["s"]), "eo": values["e"], "uo": values["u"].astype(np.int32),
        }  # fmt: skip
        for name, value in expected.items():
            np.testing.assert_array_equal(outputs[name], value, strict=True)


@pytest.mark.slow
def test_both_evaluators_agree_on_lightglue() -> None:
    model = lightglue.build(24)
    given = [lightglue.example_inputs(24), *generate(model, 2)]
    first = _done(evaluate(model, given, evaluators=["onnxruntime"]))
    second = _done(evaluate(model, given, evaluators=["reference"]))
    for a, b in zip(first.outputs, second.outputs, strict=True):
        for name in a:
            assert np.abs(a[name] - b[name]).max() <= 1e-5 * np.abs(b[name]).max()


@pytest.mark.parametrize("opset", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 9, 13, 14)), 15])
def test_normalisation_uses_what_it_is_given(opset: int) -> None:
    """ONNX's evaluator mixes mean and variance of the input in, below opset 14."""
    model = parsed(
        "f (float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3,4] y)"
        "{ y = BatchNormalization<epsilon = 0.01>(x, s, b, m, v) }",
        opset,
    )
    random = np.random.default_rng(0)
    x, s, b, m, v = (random.uniform(0.5, 2, each).astype(np.float32) for each in ((2, 3, 4), *[(3,)] * 4))
    want = (x - m[:, None]) / np.sqrt(v[:, None] + 0.01) * s[:, None] + b[:, None]
    for evaluator in ("onnxruntime", "reference"):
        result = _done(evaluate(model, [{"x": x, "s": s, "b": b, "m": m, "v": v}], evaluators=[evaluator]))
        np.testing.assert_allclose(result.outputs[0]["y"], want, rtol=1e-5, atol=1e-5)


def test_training_is_no_reference() -> None:
    model = parsed(
        "f (float[2,3] x, float[3] s, float[3] b, float[3] m, float[3] v)"
        " => (float[2,3] y, float[3] n, float[3] w)"
        "{ y, n, w = BatchNormalization(x, s, b, m, v) }",
        9,
    )
    assert "for training" in _failed(evaluate(model, generate(model, 1), evaluators=["reference"]))


def test_what_the_first_evaluator_lacks_the_second_does_and_it_is_said() -> None:
    model = parsed("f (double[4] a) => (double[4] c) { c = Sinh(a) }")
    given = generate(model, 1)
    result = _done(evaluate(model, given))
    assert result.evaluator.startswith("onnx.reference ")
    assert result.note is not None
    assert result.note.startswith("onnxruntime could not evaluate the model: NotImplemented")
    a = given[0]["a"]
    np.testing.assert_allclose(result.outputs[0]["c"], np.sinh(a), rtol=1e-12)


def test_a_failure_of_both_names_both() -> None:
    model = parsed("f (float[2] a) => (float[2] c) { c = NoSuchOperator(a) }")
    reason = _failed(evaluate(model, [{"a": np.zeros(2, np.float32)}]))
    assert "onnxruntime could not evaluate" in reason
    assert "reference could not evaluate" in reason
    assert "NoSuchOperator" in reason


ENDLESS = parsed(
    "f (float[1] a) => (float[1] c) <int64 trips = {1000000000000}, bool go = {1}> {"
    "c = Loop(trips, go, a) <body = g (int64 i, bool c1, float[1] s) => (bool c2, float[1] t)"
    "{ c2 = Identity(c1) t = Cos(s) }> }"
)


@pytest.mark.parametrize("evaluators", [["onnxruntime", "reference"], ["reference"]])
def test_time_is_bounded_and_neither_the_slower_evaluator_nor_a_process_stays(evaluators: list[str]) -> None:
    given = {"a": np.ones(1, np.float32)}
    reason = _failed(evaluate(ENDLESS, [given], EvaluationLimits(seconds=1), evaluators))
    assert "not done after 1 s" in reason
    assert [name for name in ("onnxruntime", "reference") if name in reason] == evaluators[:1]
    assert not running_children("evaluator")


@pytest.mark.parametrize("evaluator", ["onnxruntime", "reference"])
def test_memory_is_bounded(evaluator: str) -> None:
    model = parsed(
        "f (float[1] a) => (float[1] c) <int64[1] size = {6000000000}> {"
        "big = ConstantOfShape(size) c = ReduceMax(big) }"
    )
    given = {"a": np.ones(1, np.float32)}
    reason = _failed(evaluate(model, [given], EvaluationLimits(memory_bytes=2 << 30), [evaluator]))
    assert reason == f"{evaluator} could not evaluate the model: it needs more memory than allowed"


def test_what_is_no_tensor_is_a_failure() -> None:
    model = parsed("f (float[2] a) => (seq(float[2]) c) { c = SequenceConstruct(a) }")
    assert "'c' is not a tensor" in _failed(evaluate(model, [{"a": np.zeros(2, np.float32)}]))


def test_shapes_must_be_static() -> None:
    with pytest.raises(InvalidArgument, match="no static shape"):
        evaluate(lightglue.build(None), [lightglue.example_inputs(4)])


def test_the_child_knows_nothing_of_the_compiler() -> None:
    code = (
        "import sys, honed.tuner.verify.evaluator\n"
        "found = [m for m in sys.modules if m.split('.')[0] in ('tvm', 'pyopencl')]\n"
        "found += [m for m in sys.modules if m.startswith(('honed.tuner.frontend', 'honed.tuner.lower'))]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_child_reads_models_by_onnx_runtime_alone() -> None:
    code = "import sys, honed.tuner.verify.evaluator; assert 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
