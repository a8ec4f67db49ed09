"""What is learnt of values that are not compiled, and that what follows on them is cut by it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.machine.devices import Device
from honed.runtime.execution.executor import load
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler.compile import compile_file
from honed.tuner.compiler.partition import PartitionedModel, partition_model, valuetypes
from honed.tuner.verify import confined
from tests.tuner.partitions_random import CHEAP, OPSETS, in_this_process
from tests.tuner.requests import request_for

_ML = "ai.onnx.ml"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "run", in_this_process)


def info(name: str, shape: Any, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], **constants: Any
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items())
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=8)


def weights(*shape: int) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(0).normal(size=shape) / 8).astype(np.float32)


def test_an_unknown_rank_is_no_scalar() -> None:
    """ONNX Runtime says [] of both."""
    nodes = [
        helper.make_node("Scaler", ["x"], ["scaled"], domain=_ML, offset=[0.5], scale=[2.0]),
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("NonZero", ["x"], ["places"]),
    ]
    given = model(nodes, [info("x", [2, 3])], [info("scaled", None), info("total", None)])
    found = valuetypes.ask(given, ["scaled", "total", "places"])
    assert (found["scaled"].shape, found["scaled"].observed) == (None, (2, 3))
    assert (found["total"].shape, found["total"].observed) == (None, ())
    assert found["places"].shape == (2, -1)


def test_what_a_loop_gathers_over_no_steps_has_no_rank() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["go"]), helper.make_node("Neg", ["x"], ["g"])],
        "body",
        [info("i", [], TensorProto.INT64), info("on", [], TensorProto.BOOL)],
        [info("go", [], TensorProto.BOOL), info("g", None)],
    )
    nodes = [helper.make_node("Loop", ["n", ""], ["y"], body=body)]
    given = model(nodes, [info("x", [2, 3])], [info("y", None)], n=np.array(0))
    assert valuetypes.ask(given, ["y"])["y"].observed is None


def test_what_follows_a_scaler_is_compiled() -> None:
    """As in scikit-learn's pipelines."""
    nodes = [
        helper.make_node("Scaler", ["x"], ["s"], domain=_ML, offset=[0.5] * 8, scale=[2.0] * 8),
        helper.make_node("MatMul", ["s", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    made = partition_model(
        model(nodes, [info("x", [1, 8])], [info("y", ["n", 4])], w=weights(8, 4)), {}, CHEAP
    )
    assert isinstance(made, PartitionedModel)
    assert [[spec.shape for spec in part.outputs] for part in made.parts] == [[(1, 8)]]
    assert made.nodes == 2
    assert not made.tail


def test_a_signal_of_unknown_length_has_a_spectrum_of_known_rank() -> None:
    """Without messages of what the frontend thought of it; sizes alone keep the rest from being compiled."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Reshape", ["h", "flat"], ["h1"]),
        helper.make_node("Greater", ["h1", "zero"], ["on"]),
        helper.make_node("Compress", ["h1", "on"], ["some"], axis=0),
        helper.make_node("Reshape", ["some", "row"], ["signal"]),
        helper.make_node("STFT", ["signal", "step", "", "length"], ["spectrum"]),
        helper.make_node("Transpose", ["spectrum"], ["turned"], perm=[0, 3, 2, 1]),
        helper.make_node("Reshape", ["turned", "fold"], ["f"]),
        helper.make_node("Conv", ["f", "v"], ["y"]),
    ]
    constants = {"w": weights(64, 64), "v": weights(32, 18, 3), "zero": np.float32(0), "flat": np.array([-1])}
    constants |= {"row": np.array([1, -1]), "step": np.array(4), "length": np.array(16)}
    given = model(nodes, [info("x", [16, 64])], [info("y", [1, 32, "n"])], **constants, fold=[1, 18, -1])
    made = partition_model(given, {}, CHEAP)
    assert isinstance(made, PartitionedModel)
    assert made.outputs[0].shape == (1, 32, -1)
    assert made.parts[made.tail[-1]].sized
    assert {why.split(":")[0] for part in made.parts for why in part.why} == {
        "Compress",
        "what follows on those has a shape that depends on the data",
    }


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_a_recurrence_with_lengths_of_the_run_is_a_part_in_between(op: str) -> None:
    gates = 4 if op == "LSTM" else 3
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node(op, ["a", "wx", "wh", "", "n"], ["s"], hidden_size=16, direction="bidirectional"),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    lengths = info("n", [1], TensorProto.INT32)
    constants = {"w": weights(8, 8), "wx": weights(2, gates * 16, 8), "wh": weights(2, gates * 16, 16)}
    given = model(nodes, [info("x", [20, 1, 8]), lengths], [info("y", None)], **constants)
    made = partition_model(given, {}, CHEAP)
    assert isinstance(made, PartitionedModel)
    assert ([part.nodes for part in made.parts], made.tail, made.nodes) == ([1], (), 2)


def test_a_loop_with_a_count_of_the_run_is_a_part() -> None:
    """What follows on it waits for the sizes that it meets: a loop may change those of what it carries."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["go"]), helper.make_node("Tanh", ["v"], ["after"])],
        "body",
        [info("i", [], TensorProto.INT64), info("on", [], TensorProto.BOOL), info("v", [4, 8])],
        [info("go", [], TensorProto.BOOL), info("after", [4, 8])],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Loop", ["n", "", "a"], ["s"], body=body),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    count = info("n", [], TensorProto.INT64)
    given = model(nodes, [info("x", [4, 8]), count], [info("y", [4, 8])], w=weights(8, 8))
    made = partition_model(given, {}, CHEAP)
    assert isinstance(made, PartitionedModel)
    assert ([part.nodes for part in made.parts], made.tail, made.nodes) == ([1, 1], (0, 1), 1)
    assert [part.sized for part in made.parts] == [False, True]


def test_a_scalar_after_a_choice_is_a_scalar(device: Device, tmp_path: Path, monkeypatch: Any) -> None:
    """As a speech-quality model gives; its file states another shape, of another input."""
    monkeypatch.setattr(compiling, "partition_model", partial(partition_model, worth=CHEAP))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("NonZero", ["a"], ["places"]),
        helper.make_node("Cast", ["places"], ["p"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["p"], ["y"], keepdims=0),
        helper.make_node("Unique", ["a"], ["z"]),
    ]
    given = model(nodes, [info("x", [4, 8])], [info("y", [5]), info("z", [3])], w=weights(8, 4))
    path, output = tmp_path / "m.onnx", tmp_path / "m.honed"
    path.write_bytes(given.SerializeToString())
    compile_file(request_for(path, device), lambda *_: None)
    x = {"x": weights(4, 8)}
    with load(output, device.spec) as executor:
        found = executor.run(x)
    y, z = onnxruntime.InferenceSession(path).run(None, x)
    assert found["y"].shape == ()
    np.testing.assert_allclose(found["y"], y, rtol=1e-5)
    assert found["z"].shape == z.shape
