"""Loops of known length and branches, compiled, give what ONNX Runtime gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from honed.runtime.errors import ModelRefused
from honed.tuner.frontend import normalise
from honed.tuner.frontend.flow import MAX_TRIPS

from .test_rules import floats, run

pytestmark = pytest.mark.tvm
BOOL, FLOAT, INT64 = TensorProto.BOOL, TensorProto.FLOAT, TensorProto.INT64


def info(name: str, kind: int = FLOAT, shape: Sequence[int] | None = (2, 3)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[str],
    constants: dict[str, np.ndarray],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "flow",
        inputs,
        [info(o, shape=None) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def same(made: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    done = normalise(made)
    for got, wanted in zip(run(done.model, feeds), run(made, feeds), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def loop(trips: np.ndarray, stop: str) -> onnx.ModelProto:
    """y = y * x + trip, as often as it is told, each y gathered; `stop` names what ends it early."""
    ends = {
        "never": helper.make_node("Identity", ["going"], ["on"]),
        "at three": helper.make_node("Less", ["trip", "three"], ["on"]),
        "by data": helper.make_node("Less", ["large", "ten"], ["on"]),
    }
    body = helper.make_graph(
        [
            helper.make_node("Cast", ["trip"], ["count"], to=FLOAT),
            helper.make_node("Mul", ["y", "x"], ["grown"]),
            helper.make_node("Add", ["grown", "count"], ["after"]),
            helper.make_node("ReduceMax", ["after"], ["large"], keepdims=0),
            ends[stop],
            helper.make_node("Identity", ["after"], ["seen"]),
        ],
        "body",
        [info("trip", INT64, ()), info("going", BOOL, ()), info("y")],
        [info("on", BOOL, ()), info("after"), info("seen")],
    )
    constants = {"trips": trips, "three": np.array(3), "ten": np.float32(10)}
    node = helper.make_node("Loop", ["trips", "", "x"], ["last", "all"], name="loop", body=body)
    return model([node], [info("x")], ["last", "all"], constants)


@given(st.integers(1, 6), st.sampled_from(["never", "at three"]))
def test_loops_of_known_length(trips: int, stop: str) -> None:
    same(loop(np.array(trips), stop), {"x": floats(2, 3)})


@pytest.mark.parametrize(
    ("trips", "stop", "why"),
    [(4, "by data", "condition is computed at run time"), (MAX_TRIPS + 1, "never", "more than")],
)
def test_other_loops_are_refused_by_name(trips: int, stop: str, why: str) -> None:
    with pytest.raises(ModelRefused, match=f"node loop.*{why}"):
        normalise(loop(np.array(trips), stop))


def test_loops_within_loops_are_bounded_together() -> None:
    """64 times 64 times a constant: no node remains, and yet it is not computed."""

    def body(depth: int) -> onnx.GraphProto:
        v, w = f"v{depth}", f"w{depth}"
        inner = helper.make_node("Loop", ["trips", "", v], [w], body=body(depth - 1)) if depth else None
        nodes = [inner or helper.make_node("Neg", [v], [w]), helper.make_node("Identity", ["going"], ["on"])]
        inputs = [info(f"i{depth}", INT64, ()), info("going", BOOL, ()), info(v)]
        return helper.make_graph(nodes, "body", inputs, [info("on", BOOL, ()), info(w)])

    nodes = [
        helper.make_node("Loop", ["trips", "", "start"], ["end"], name="outer", body=body(1)),
        helper.make_node("Add", ["end", "x"], ["y"]),
    ]
    constants = {"trips": np.array(MAX_TRIPS), "start": floats(2, 3)}
    with pytest.raises(ModelRefused, match=r"node outer.*graphs"):
        normalise(model(nodes, [info("x")], ["y"], constants))


@given(st.integers(1, 5), st.integers(0, 1), st.integers(0, 1), st.integers(0, 1), st.integers(-3, 2))
def test_scans(length: int, axis: int, back: int, out_back: int, out_axis: int) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "part"], ["after"]),
            helper.make_node("Unsqueeze", ["part", "nought"], ["wide"]),
            helper.make_node("Mul", ["wide", "x"], ["seen"]),
        ],
        "body",
        [info("state", shape=[3]), info("part", shape=[3])],
        [info("after", shape=[3]), info("seen", shape=None)],
    )
    node = helper.make_node(
        "Scan",
        ["start", "x" if axis == 0 else "turned"],
        ["last", "all"],
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[back],
        scan_output_axes=[out_axis],
        scan_output_directions=[out_back],
    )
    turn = helper.make_node("Transpose", ["x"], ["turned"])
    inputs = [info("start", shape=[3]), info("x", shape=[length, 3])]
    made = model([turn, node], inputs, ["last", "all"], {"nought": np.array([0])})
    same(made, {"start": floats(3, seed=1), "x": floats(length, 3)})


def branches(other: str) -> onnx.ModelProto:
    """One of two branches, as the sign of the data's sum says."""
    sides = [
        helper.make_graph(
            [helper.make_node(op, ["x"], [f"{name}_y"])], name, [], [info(f"{name}_y", shape=None)]
        )
        for name, op in (("then", "Exp"), ("else", other))
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "nought"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["y"], name="choice", then_branch=sides[0], else_branch=sides[1]
        ),
    ]
    return model(nodes, [info("x")], ["y"], {"nought": np.float32(0)})


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_chosen_at_run_time_are_both_computed(sign: int) -> None:
    same(branches("Abs"), {"x": sign * np.abs(floats(2, 3))})


@pytest.mark.parametrize(("other", "why"), [("Transpose", "branches differ"), ("NonZero", "NonZero")])
def test_branches_that_do_not_fit_are_refused_by_name(other: str, why: str) -> None:
    with pytest.raises(ModelRefused, match=f"node choice.*{why}") as refused:
        normalise(branches(other))
    assert len(refused.value.reasons) == 1
