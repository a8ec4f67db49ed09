"""GroupQueryAttention, as decoders of onnxruntime-genai have it, against ONNX Runtime."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from honed.runtime.errors import ModelRefused
from honed.tuner.frontend import normalise

from .test_rules import floats, run

pytestmark = pytest.mark.tvm
HEADS, FEW, SIZE, ROWS = 4, 2, 32, 32
INPUTS = ("q", "k", "v", "past_k", "past_v", "ends", "total", "cos", "sin", "places", "bias", "sink")
RESULTS = ("y", "new_k", "new_v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """New rows behind those of the past, of which so many are there for each sample of the batch."""

    new: int = 1
    there: tuple[int, ...] = (5,)
    past: int | None = None  # rows of the cache that is given; as many as are there by default
    whole: int | None = None  # total_sequence_length
    packed: bool = False
    rotary: int = 0  # pairs that are rotated
    extra: tuple[str, ...] = ()  # other inputs
    bias: tuple[int, int] = (1, 1)  # batch and heads
    short: int = 0  # columns that the bias lacks
    run_time: bool = False  # whether the total is an input
    dtype: type[np.generic] = np.float32

    @property
    def rows(self) -> int:
        return max(self.there) if self.past is None else self.past

    @property
    def total(self) -> int:
        return max(self.there) + self.new if self.whole is None else self.whole

    def data(self) -> dict[str, np.ndarray]:
        batch, length = len(self.there), max(self.total, self.rows)
        q, k = HEADS * SIZE, FEW * SIZE
        made = {"q": floats(batch, self.new, q + 2 * k if self.packed else q)}
        if not self.packed:
            made |= {"k": floats(batch, self.new, k, seed=1), "v": floats(batch, self.new, k, seed=2)}
        made |= {f"past_{n}": floats(batch, FEW, self.rows, SIZE, seed=3) for n in "kv"}
        angles = floats(ROWS, self.rotary, seed=5)
        if self.rotary:
            made |= {"cos": np.cos(angles), "sin": np.sin(angles)}
        if "places" in self.extra:
            made["places"] = np.random.default_rng(6).integers(0, ROWS, (batch, self.new))
        if "bias" in self.extra:
            made["bias"] = floats(*self.bias, self.new, length - self.short, seed=7)
        if "sink" in self.extra:
            made["sink"] = floats(HEADS, seed=8)
        made = {n: v.astype(self.dtype) if v.dtype == np.float32 else v for n, v in made.items()}
        ends = np.array(self.there, np.int32) + self.new - 1
        return made | {"ends": ends, "total": np.array(self.total, np.int32)}


def model(case: Case, **attrs: Any) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    data = case.data()
    names = [name if name in data else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    fixed = {"cos", "sin"} | (set() if case.run_time else {"total"})
    attrs = {"num_heads": HEADS, "kv_num_heads": FEW, "do_rotary": int(case.rotary > 0)} | attrs
    node = helper.make_node("GroupQueryAttention", names, RESULTS, domain="com.microsoft", **attrs)
    kinds = {n: helper.np_dtype_to_tensor_dtype(v.dtype) for n, v in data.items()}
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(n, kinds[n], v.shape) for n, v in data.items() if n not in fixed],
        [helper.make_tensor_value_info(n, kinds["q"], None) for n in RESULTS],
        [numpy_helper.from_array(v, n) for n, v in data.items() if n in fixed],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8), data


CASES = [
    pytest.param(Case(), {}, id="step"),
    pytest.param(Case(new=3), {}, id="chunk"),
    pytest.param(Case(new=4, there=(0,)), {}, id="prompt"),
    pytest.param(Case(new=4, there=(0,), past=9), {}, id="prompt with capacity"),
    pytest.param(Case(past=9), {}, id="step with capacity"),
    pytest.param(Case(past=9, whole=9), {}, id="step with capacity in all"),
    pytest.param(Case(new=3, past=9, whole=9), {}, id="chunk with capacity in all"),
    pytest.param(Case(past=9, run_time=True), {}, id="total at run time"),
    pytest.param(Case(new=4, there=(0,), past=9, run_time=True), {}, id="prompt at run time"),
    pytest.param(Case(there=(5, 3, 0)), {}, id="batch"),
    pytest.param(Case(there=(5, 3), past=9, rotary=16), {}, id="batch with capacity"),
    pytest.param(Case(packed=True, rotary=16), {}, id="packed"),
    pytest.param(Case(new=3, rotary=16), {"rotary_interleaved": 1}, id="interleaved"),
    pytest.param(Case(new=3, rotary=8), {}, id="rotated in part"),
    pytest.param(Case(new=3, rotary=16, extra=("places",)), {}, id="positions given"),
    pytest.param(Case(new=4, there=(0,), rotary=16, extra=("places",)), {}, id="positions of a prompt"),
    pytest.param(Case(past=9), {"local_window_size": 3}, id="window"),
    pytest.param(Case(new=7, there=(0,)), {"local_window_size": 3}, id="prompt with window"),
    pytest.param(Case(new=3), {"softcap": 0.5}, id="capped"),
    pytest.param(Case(new=3, extra=("bias",)), {}, id="bias"),
    pytest.param(Case(new=3, past=9, whole=9, extra=("bias",), bias=(1, HEADS)), {}, id="bias of heads"),
    pytest.param(Case(there=(5, 3), extra=("bias",), bias=(2, 1)), {"softcap": 2.0}, id="bias and cap"),
    pytest.param(Case(new=3, extra=("sink",)), {}, id="sink"),
    pytest.param(Case(new=3), {"smooth_softmax": 1}, id="smooth"),
    pytest.param(Case(new=3, past=9), {"causal": 0, "scale": 0.2}, id="not causal"),
    pytest.param(Case(new=3, past=9, rotary=16, dtype=np.float16), {}, id="halves"),
]


@pytest.mark.parametrize(("case", "attrs"), CASES)
def test_grouped_attention(case: Case, attrs: dict[str, Any]) -> None:
    made, data = model(case, **attrs)
    expected, done = run(made, data), normalise(made)
    onnx.checker.check_model(done.model, full_check=True)
    tolerance = 1e-5 if case.dtype is np.float32 else 1e-2
    for got, wanted in zip(run(done.model, data), expected, strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def test_rows_behind_a_padded_prompt_are_ignored_by_the_next_step() -> None:
    """Samples that are shorter than the prompt: only their own rows are compared."""
    made, data = model(Case(new=5, there=(0, 0), rotary=16))
    data["ends"] = np.array([4, 2], np.int32)
    for got, wanted in zip(run(normalise(made).model, data)[:1], run(made, data)[:1], strict=True):
        np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[1, :3], wanted[1, :3], rtol=1e-5, atol=1e-5)


@example(1, 2, 2, [0, 0, 0], 2, True, False, 0, {}, np.float32)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.lists(st.integers(-1, 9), min_size=3),
    st.one_of(st.none(), st.integers(0, 9)), st.booleans(), st.booleans(), st.sampled_from([0, 8, 16]),
    st.sampled_from([{}, {"local_window_size": 2}, {"softcap": 1.5}, {"smooth_softmax": 1}, {"causal": 0}]),
    st.sampled_from([np.float32, np.float16]),
)  # fmt: skip
def test_lengths_of_requests_are_served_rightly_or_not_at_all(
    batch: int, new: int, past: int, ends: list[int], total: int | None, run_time: bool, packed: bool,
    rotary: int, attrs: dict[str, Any], dtype: type[np.generic],
) -> None:  # fmt: skip
    """Whatever lengths a request has: where the preconditions allow it, the answer is ONNX Runtime's."""
    case = Case(
        new=new, there=(0,) * batch, past=past, whole=past + new if total is None else total,
        packed=packed, rotary=rotary, run_time=run_time, dtype=dtype,
    )  # fmt: skip
    made, data = model(case, **attrs)
    data["ends"] = np.array(ends[:batch], np.int32)
    try:
        done = normalise(made)
    except ModelRefused:
        return
    served = all(each.allows(data[each.input]) for each in done.preconditions)
    if not run_time and case.total != past + new and not new <= case.total <= past:
        return  # ONNX Runtime refuses every request
    if batch > 1 and new > 1 and case.total != new:
        return
    try:
        expected = run(made, data)
    except onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument:
        assert not served
        return
    fits = (
        expected[1].shape[2]
        == tuple(d.dim_value for d in done.model.graph.output[1].type.tensor_type.shape.dim)[2]
    )
    # With as many rows in the cache as new ones, every request is a prompt, which may be padded.
    padded = batch == 1 and (data["ends"] < new - 1).any() and run_time and past > new > 1
    assert served == (fits and not padded)
    if served:
        tolerance = 1e-5 if dtype is np.float32 else 1e-2
        for got, wanted in zip(run(done.model, data), expected, strict=True):
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("case", "attrs", "text"),
    [
        (Case(), {"sliding_window_cache": 1, "local_window_size": 3}, "evicts from its cache"),
        (Case(), {"qk_output": 1}, "its scores are wanted"),
        (Case(), {"kv_num_heads": 3}, "are not shared by 3 heads"),
        (Case(rotary=17), {}, "do not fit heads of 32"),
        (Case(new=6, there=(0,), past=4, whole=5), {}, "no room for 6 new rows"),
        (Case(past=9, extra=("bias",), short=1), {}, "not for all of its cache"),
    ],
)
def test_what_is_refused(case: Case, attrs: dict[str, Any], text: str) -> None:
    made, _ = model(case, **attrs)
    with pytest.raises(ModelRefused, match=text):
        normalise(made)
