"""Probes are inputs on which the reference is well determined; where none are, that is said."""

from __future__ import annotations

import numpy as np
import pytest

from honed.tuner import lightglue
from honed.tuner.verify.confined import EvaluationLimits
from honed.tuner.verify.evaluator import ReferenceFailure
from honed.tuner.verify.probes import ReferenceProbes, choose

from .parsing import generate, parsed


def _chosen(result: ReferenceProbes | ReferenceFailure) -> ReferenceProbes:
    assert isinstance(result, ReferenceProbes), result
    return result


def test_a_sane_model_gets_the_first_inputs_and_the_usual_tolerance() -> None:
    model = lightglue.build(16)
    found = _chosen(choose(model, 3, "fp32"))
    assert found.evaluator.startswith("onnxruntime ")
    assert found.tolerance == (1e-3, 1e-3, 1e-3)
    assert found.notes == ()
    for values, expected in zip(found.inputs, generate(model, 3), strict=True):
        assert all(np.array_equal(values[n], expected[n]) for n in expected)
    assert [list(o) for o in found.outputs] == [["scores", "matchability0", "matchability1"]] * 3


# Amplifies a difference of the inputs from 1 by 1e6 where the sum of the inputs is negative.
TOUCHY = parsed(
    "f (float[1] x) => (float[1] y) <float one = {1}, float much = {1000000}, float none = {0}> {"
    "r = Mul(x, much) s = Sin(r) low = Less(x, none) y = Where(low, s, x) }"
)


def test_inputs_that_amplify_rounding_are_passed_over() -> None:
    drawn = [values["x"][0] for values in generate(TOUCHY, 6, seed=3)]
    assert min(drawn[:2]) < -0.1, "the seed no longer shows the case"
    assert sum(x >= 0 for x in drawn) >= 2, "the seed no longer shows the case"
    found = _chosen(choose(TOUCHY, 2, "fp32", seed=3))
    assert all(values["x"][0] >= 0 for values in found.inputs)
    assert (found.tolerance, found.notes) == ((1e-3,), ())


def test_a_model_that_always_amplifies_is_proven_to_less_and_it_is_said() -> None:
    model = parsed("f (float[64] x) => (float[64] y) <float much = {30000}> { r = Mul(x, much) y = Sin(r) }")
    found = _chosen(choose(model, 2, "fp32"))
    assert 1e-3 < found.tolerance[0] <= 0.05
    assert len(found.notes) == 1
    assert "output 'y'" in found.notes[0]
    assert f"{found.tolerance[0]:.2g} of its range only" in found.notes[0]


@pytest.mark.slow
def test_integers_stay_equal_and_their_noise_is_said() -> None:
    model = parsed(
        "f (float[512] x) => (int32[512] y) <float much = {1e9}> { r = Mul(x, much) y = Cast<to = 6>(r) }"
    )
    found = _chosen(choose(model, 1, "fp32"))
    assert found.tolerance == (0.0,)
    assert "may be refused" in found.notes[0]
    model = parsed("f (float[512] x) => (int64[1] y) { y = ArgMax(x) }")
    assert _chosen(choose(model, 2, "fp32")).notes == ()


def test_integer_inputs_have_no_noise() -> None:
    model = parsed("f (int64[3] x) => (int64[3] y) { y = Add(x, x) }")
    found = _chosen(choose(model, 2, "fp32"))
    assert (found.tolerance, found.notes) == ((0.0,), ())


def test_a_failure_is_handed_on() -> None:
    model = parsed("f (float[2] a) => (float[2] c) { c = NoSuchOperator(a) }")
    assert isinstance(choose(model, 1, "fp32", limits=EvaluationLimits(seconds=30)), ReferenceFailure)
