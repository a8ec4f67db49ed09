"""Classifiers as skl2onnx writes them: labels, and a list of maps of their probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from honed import ort
from honed.ort import errors
from honed.runtime import Client
from tests.daemon.running import Service

from .test_ort import pointed, served

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
__all__ = ["pointed", "served"]
ROWS = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3)


def classifier(labels: list[int] | list[str]) -> bytes:
    """A linear classifier of rows of three, with ZipMap behind it."""
    text = isinstance(labels[0], str)
    known = {"classlabels_strings" if text else "classlabels_ints": labels}
    zipped = {"classlabels_strings" if text else "classlabels_int64s": labels}
    weights = np.linspace(-1, 1, 3 * len(labels)).tolist()
    nodes = [
        helper.make_node(
            "LinearClassifier",
            ["x"],
            ["label", "scores"],
            domain="ai.onnx.ml",
            coefficients=weights,
            intercepts=[0.1] * len(labels),
            post_transform="SOFTMAX",
            **known,
        ),
        helper.make_node("ZipMap", ["scores"], ["probabilities"], domain="ai.onnx.ml", **zipped),
    ]
    kind = TensorProto.STRING if text else TensorProto.INT64
    floats = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    listed = helper.make_sequence_type_proto(helper.make_map_type_proto(kind, floats))
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3]),
        helper.make_tensor_value_info("label", kind, ["batch"]),
        helper.make_value_info("probabilities", listed),
    ]
    graph = helper.make_graph(nodes, "classifier", ends[:1], ends[1:])
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    return bytes(helper.make_model(graph, opset_imports=domains, ir_version=8).SerializeToString())


@pytest.mark.parametrize("labels", [[3, 5, 8], ["setosa", "versicolor", "virginica"]])
def test_a_classifier_gives_what_onnxruntime_gives(served: Service, labels: list[Any]) -> None:
    data = classifier(labels)
    ours, theirs = ort.InferenceSession(data), onnxruntime.InferenceSession(data)
    told = [(each.name, each.type) for each in theirs.get_outputs()]
    assert [(each.name, each.type) for each in ours.get_outputs()] == told
    for rows in (ROWS, ROWS[:1], ROWS[:0]):
        mine, its = ours.run(None, {"x": rows}), theirs.run(None, {"x": rows})
        np.testing.assert_array_equal(mine[0], its[0])
        assert mine[1] == its[1]
    assert ours.run(["probabilities"], {"x": ROWS}) == [theirs.run(None, {"x": ROWS})[1]]
    with pytest.raises(errors.NotImplemented, match="list of maps"):
        ours.run_with_ort_values(None, {"x": ort.OrtValue.ortvalue_from_numpy(ROWS)})


def test_a_client_gets_keys_and_values(served: Service) -> None:
    with Client(served.socket) as client:
        brought = client.bring(classifier([3, 5, 8]))
        outputs = client.metadata(brought.model_name)["outputs"]
        assert [(each["name"], each["datatype"], each["shape"]) for each in outputs[1:]] == [
            ("probabilities.keys", "INT64", [-1]),
            ("probabilities.values", "FP32", [-1, -1]),
        ]
        answer = client.infer(brought.model_name, {"x": ROWS})
        assert answer["probabilities.keys"].tolist() == [3, 5, 8]
        assert answer["probabilities.values"].shape == (4, 3)
