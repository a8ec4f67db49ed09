"""How far ONNX Runtime may optimise: found on real faults of it, and on graphs that are planted as such."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.onnxfile.reading import read
from honed.runtime.engines import HIGHEST, LEVELS, LOWEST
from honed.tuner.verify import confined, evaluator, levels
from honed.tuner.verify.confined import DEFAULT_LIMITS, EvaluationLimits
from honed.tuner.verify.levels import Arrays
from tests import lookalikes, models


def tensor(name: str, shape: list[int | str | None], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    **known: np.ndarray,
) -> onnx.ModelProto:
    constants = [numpy_helper.from_array(value, name) for name, value in known.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def padded_pool(shape: list[int | str | None], pool: str = "MaxPool") -> onnx.ModelProto:
    """ONNX Runtime 1.31 fuses the Pad into the pool, whose padding is not zeros."""
    return model(
        [
            helper.make_node("Sub", ["x", "much"], ["low"]),
            helper.make_node("Pad", ["low", "pads"], ["wide"]),
            helper.make_node(pool, ["wide"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
        ],
        [tensor("x", shape)],
        [tensor("y", [None, None, None, None])],
        much=np.array(9, np.float32),
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    )


def optimised_wrongly(given: onnx.ModelProto) -> bool:
    x = np.zeros((1, 2, 6, 6), np.float32)
    found = []
    for level in (onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL, onnxruntime.GraphOptimizationLevel(0)):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        found += onnxruntime.InferenceSession(given.SerializeToString(), options).run(None, {"x": x})
    return bool(np.abs(found[0] - found[1]).max() > 0.1)


@pytest.mark.parametrize("shape", [[1, 2, 6, 6], ["n", 2, "h", "w"]])
def test_a_real_fault_is_found_and_its_node_named(shape: list[int | str | None]) -> None:
    given = padded_pool(shape)
    if not optimised_wrongly(given):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} pads it rightly")
    found = levels.highest(given, {}, DEFAULT_LIMITS)
    assert found.checked
    assert found.level != HIGHEST
    assert found.error is not None
    assert found.error > 0.1
    assert "output 'y' differs by" in found.why
    assert "ONNX Runtime runs MaxPool" in found.why
    assert "Pad 'wide', MaxPool 'y'" in found.why


def test_what_is_optimised_rightly_is_right(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = model(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["c", "s", "s", "s", "s"], ["b"]),
            helper.make_node("Relu", ["b"], ["r"]),
            helper.make_node("ReduceMean", ["r"], ["y"], axes=[2, 3]),
        ],
        [tensor("x", ["n", 3, 8, 8])],
        [tensor("y", ["n", 4, 1, 1])],
        w=rng.normal(size=(4, 3, 3, 3)).astype(np.float32),
        s=np.full(4, 0.5, np.float32),
    )
    found = levels.highest(given, {}, DEFAULT_LIMITS)
    assert (found.level, found.checked, found.why) == (HIGHEST, True, "")
    onnx.save(given, path := tmp_path / "m.onnx")
    again = levels.of_file(path, {"x": (2, 3, 8, 8)}, DEFAULT_LIMITS)
    assert dataclasses.replace(again, seconds=0.0, error=0.0) == dataclasses.replace(
        found, seconds=0.0, error=0.0
    )


class Planted(levels._Runs):
    """A stub in ONNX Runtime's place, which is wrong from some level on, and never starts a process."""

    right: str = LOWEST

    def at(self, level: str, *more: str) -> list[Arrays] | str:
        off = 0.0 if list(LEVELS).index(level) >= list(LEVELS).index(self.right) else 1.0
        return [{"y": 2 * given["x"] + np.float32(off)} for given in self.inputs]


@pytest.mark.parametrize("right", LEVELS)
def test_the_highest_level_that_agrees_serves(monkeypatch: pytest.MonkeyPatch, right: str) -> None:
    monkeypatch.setattr(levels, "_Runs", Planted)
    monkeypatch.setattr(Planted, "right", right)
    doubled = model([helper.make_node("Add", ["x", "x"], ["y"])], [tensor("x", [4])], [tensor("y", [4])])
    found = levels.highest(doubled, {}, DEFAULT_LIMITS)
    assert (found.level, found.checked) == (right, True)
    assert bool(found.why) is (right != HIGHEST)


@pytest.mark.parametrize(("shape", "scale"), [([1, 1], [0.5, -2]), ([4], [0.5, -2, 1, 3])])
def test_an_optimised_form_that_never_runs_lowers_the_level(shape: list[int], scale: list[float]) -> None:
    given = lookalikes.layer_norm(shape, scale)
    if not lookalikes.fails_optimised(given, np.ones(shape, np.float32)):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} runs it optimised")
    found = levels.highest(given, {}, DEFAULT_LIMITS)  # the output of the first is constant
    assert found.checked
    assert found.level != HIGHEST
    assert found.why.startswith("ONNX Runtime does not run it so")


@pytest.mark.parametrize("shapes", [{}, {"x": (1, 8)}])
def test_what_is_right_for_one_row_alone_is_not_right(shapes: dict[str, tuple[int, ...]]) -> None:
    """Means that lose their axis are taken off columns, which for one row is a layer norm."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[-1], keepdims=0),
        helper.make_node("Sub", ["x", "mean"], ["d"]),
        helper.make_node("Pow", ["d", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["variance"], axes=[-1], keepdims=0),
        helper.make_node("Add", ["variance", "little"], ["above"]),
        helper.make_node("Sqrt", ["above"], ["deviation"]),
        helper.make_node("Div", ["d", "deviation"], ["normal"]),
        helper.make_node("Mul", ["normal", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["y"]),
    ]
    little, two = np.array(1e-5, np.float32), np.array(2, np.float32)
    scale, bias = (np.arange(8, dtype=np.float32) % n + 1 for n in (3, 2))
    given = model(
        nodes,
        [tensor("x", ["n", 8])],
        [tensor("y", [None, 8])],
        two=two,
        little=little,
        scale=scale,
        bias=bias,
    )
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = (onnxruntime.InferenceSession(given.SerializeToString(), each) for each in (None, plain))
    optimised, right = (session.run(None, {"x": x})[0] for session in sessions)
    if np.abs(optimised - right).max() < 0.1:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} optimises it rightly")
    found = levels.highest(given, shapes, DEFAULT_LIMITS)
    assert found.checked
    assert found.level != HIGHEST
    assert "output 'y' differs by" in found.why


def two_outputs(second: onnx.NodeProto, kind: int, **known: np.ndarray) -> onnx.ModelProto:
    """A padded pool and an output beside it."""
    given = padded_pool([1, 2, 6, 6])
    given.graph.node.append(second)
    given.graph.output.append(tensor("z", [None] * 4, kind))
    given.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in known.items())
    return given


@pytest.mark.parametrize(
    "given",
    [
        two_outputs(helper.make_node("ArgMax", ["x"], ["z"], axis=0), TensorProto.INT64),
        two_outputs(
            helper.make_node("Pad", ["x", "away"], ["z"]),
            TensorProto.FLOAT,
            away=np.array([0, 0, 6, 0, 0, 0, -6, 0]),
        ),
        two_outputs(
            helper.make_node("Mul", ["x", "nan"], ["z"]), TensorProto.FLOAT, nan=np.array(np.nan, np.float32)
        ),
    ],
    ids=["one of one", "moved out of view", "not a number"],
)
def test_outputs_that_say_nothing_do_not_keep_others_from_being_checked(given: onnx.ModelProto) -> None:
    if not optimised_wrongly(padded_pool([1, 2, 6, 6])):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} pads it rightly")
    found = levels.highest(given, {}, DEFAULT_LIMITS)
    assert found.checked
    assert found.level != HIGHEST
    assert "output 'y' differs by" in found.why


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            model(
                [
                    helper.make_node("RandomNormalLike", ["x"], ["noise"]),
                    helper.make_node("Add", ["x", "noise"], ["y"]),
                ],
                [tensor("x", [4])],
                [tensor("y", [4])],
            ),
            "random numbers",
        ),
        (
            model(
                [helper.make_node("MatMul", ["x", "w"], ["y"])],
                [tensor("x", ["a", "b"])],
                [tensor("y", ["a", 2])],
                w=np.ones((7, 2), np.float32),
            ),
            "could not evaluate the model",
        ),
        (
            model(
                [helper.make_node("Relu", ["x"], ["y"])],
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
                [tensor("y", [None])],
            ),
            "unknown rank",
        ),
    ],
    ids=["random", "no size fits", "unknown rank"],
)
def test_what_cannot_be_checked_says_why(given: onnx.ModelProto, why: str) -> None:
    found = levels.highest(given, {}, DEFAULT_LIMITS)
    assert (found.level, found.checked, found.error) == (LOWEST, False, None)
    assert why in found.why


@pytest.mark.slow
def test_a_model_that_refuses_other_settings_is_checked() -> None:
    """A voice detector that knows rates of 8 and 16 kHz, and at 16 kHz frames of 512."""
    shapes = {"input": (1, 512), "state": (2, 1, 128)}
    found = levels.of_file(models.path("silero_vad"), shapes, DEFAULT_LIMITS)
    assert (found.checked, found.level) == (True, HIGHEST), found.why


def test_time_and_memory_are_bounded() -> None:
    given = padded_pool([1, 2, 6, 6])
    late = levels.highest(given, {}, EvaluationLimits(seconds=0.001))
    assert not late.checked
    assert "it was not done after 0.001 s" in late.why


def test_the_graph_that_is_run_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = padded_pool([1, 2, 6, 6])
    confined.write(tmp_path, given, ["x"], [{"x": np.zeros((1, 2, 6, 6), np.float32)}])
    arguments = [str(tmp_path), evaluator.at_level("basic"), "--threads", "1", "--sets", "1", "--write"]
    monkeypatch.setattr(confined, "answering", lambda: nullcontext(print))  # this process keeps its stdout
    assert evaluator.main(arguments) == 0
    read(tmp_path / evaluator.OPTIMISED)
