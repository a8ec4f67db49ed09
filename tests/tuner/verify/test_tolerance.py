"""The tolerance is the stated one: equal for integers, fixed for float32, derived for float16."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.runtime.errors import InvalidArgument
from honed.tuner import lightglue
from honed.tuner.verify import graphs
from honed.tuner.verify.tolerance import HALF_MOST, for_model, for_output, work

from .parsing import parsed


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "uint64"])
def test_integers_are_equal(dtype: str) -> None:
    assert for_output(dtype, "fp16", depth=100, reduction=1000) == 0


def test_floats_go_by_the_coarser_of_both_types() -> None:
    assert for_output("float32", "fp32", depth=1000, reduction=10**6) == 1e-3
    assert for_output("float64", "fp32") == 1e-3
    assert for_output("float32", "fp64") == 1e-3
    assert for_output("float64", "fp64") == 1e-6
    assert for_output("float16", "fp32", depth=64) == pytest.approx(4 * 2**-11 * 8)
    assert for_output("float32", "fp16", depth=64, reduction=16) == pytest.approx(4 * 2**-11 * 12)
    assert for_output("float16", "fp32", depth=64, reduction=16) == pytest.approx(4 * 2**-11 * 8)
    assert for_output("float32", "mixed", depth=64, reduction=16) == pytest.approx(4 * 2**-11 * 12)
    for dtype, precision in (("float8", "fp32"), ("int8", "auto")):
        with pytest.raises(InvalidArgument):
            for_output(dtype, precision)


@given(depth=st.integers(1, 10**6), reduction=st.integers(1, 10**6))
def test_half_stays_within_its_bounds_and_grows(depth: int, reduction: int) -> None:
    here = for_output("float16", "fp16", depth=depth, reduction=reduction)
    assert 1e-3 <= here <= HALF_MOST
    assert for_output("float16", "fp16", depth=depth + 1, reduction=reduction) >= here


@given(length=st.integers(1, 2000), seed=st.integers(0, 50))
def test_a_sum_in_half_keeps_to_it(length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, 16, length)).astype(np.float16)
    total = np.zeros(16, np.float16)
    for k in range(length):
        total += a[:, k] * b[:, k]
    exact = np.sum(a.astype(np.float64) * b, axis=1)
    bound = 4 * 2.0**-11 * (1 + np.sqrt(length))  # for_output's, before its cap
    assert np.abs(total - exact).max() <= bound * np.abs(exact).max()


def test_depth_and_sums_are_read_off_the_graph() -> None:
    model = parsed(
        "f (float[1,3,8,8] x, float[4,3,3,3] w, float[144,7] m) => (float[1,7] y) <int64[2] s = {1,-1}> {"
        "a = Conv(x, w) b = Relu(a) c = Reshape(b, s) d = MatMul(c, m) y = Softmax(d) }"
    )
    found = work(model, graphs.infer(model))
    assert found.reduction == 144
    assert found.depth == 4


@pytest.mark.parametrize(
    ("call", "sizes", "expected"),
    [
        ("Gemm<transA = 1>(a, b)", ("9,2", "9,4", "2,4"), 9),
        ("ConvTranspose(a, b)", ("1,6,4,4", "6,5,3,3", "1,5,6,6"), 54),
        ("GlobalAveragePool(a)", ("1,6,4,4", "1", "1,6,1,1"), 16),
        ("ReduceSum<keepdims = 0>(a)", ("3,5", "1", ""), 15),
        ("Expand(a, s)", ("1", "1", "5"), 1),
    ],
)
def test_sums_of_operators(call: str, sizes: tuple[str, str, str], expected: int) -> None:
    out = f"float[{sizes[2]}]" if sizes[2] else "float"
    model = parsed(
        f"f (float[{sizes[0]}] a, float[{sizes[1]}] b) => ({out} y) <int64[1] s = {{5}}> {{ y = {call} }}"
    )
    assert work(model, graphs.infer(model)).reduction == expected


def test_every_output_of_a_model_has_one() -> None:
    assert for_model(lightglue.build(16), "fp32") == (1e-3, 1e-3, 1e-3)
    assert for_model(lightglue.build(16), "fp16") == (HALF_MOST,) * 3
    model = parsed("f (float[3] a) => (float[3] b, int64[1] c) { b = Relu(a) c = ArgMax(a) }")
    assert for_model(model, "fp32") == (1e-3, 0.0)


def test_an_output_of_another_type_is_named() -> None:
    model = parsed("f (float[3] a) => (string[3] b) { b = Cast<to = 8>(a) }")
    with pytest.raises(InvalidArgument, match="output 'b' is not a tensor of a type honed carries"):
        for_model(model, "fp32")
