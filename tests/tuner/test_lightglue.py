"""The demo model is the matcher of the case: its shapes, counts, size, work, and that it matches."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import shape_inference
from onnx.reference import ReferenceEvaluator

from honed.runtime.errors import InvalidArgument
from honed.tuner import lightglue

POINTS = 192


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    graph = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    shapes: dict[str, tuple[int | str, ...]] = {t.name: tuple(t.dims) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims)
    return shapes


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return lightglue.build(POINTS)


def test_matmuls_are_the_cases(model: onnx.ModelProto) -> None:
    shapes = _shapes(model)
    products = Counter(
        (shapes[n.input[0]], shapes[n.input[1]]) for n in model.graph.node if n.op_type == "MatMul"
    )
    n = POINTS
    assert products == {
        ((1, n, 256), (256, 768)): 18,
        ((1, n, 512), (512, 512)): 36,
        ((1, n, 256), (256, 256)): 74,
        ((1, n, 512), (512, 256)): 36,
        ((1, 4, n, 64), (1, 4, 64, n)): 36,
        ((1, 4, n, n), (1, 4, n, 64)): 36,
        ((1, n, 256), (1, 256, n)): 1,
        ((1, n, 2), (2, 32)): 2,  # positions
        ((1, n, 256), (256, 1)): 2,  # matchability
    }


def test_other_operators_are_the_cases(model: onnx.ModelProto) -> None:
    shapes = _shapes(model)
    counts = Counter(n.op_type for n in model.graph.node)
    assert counts["LayerNormalization"] == counts["Erf"] == 36
    assert counts["LogSoftmax"] == counts["Sigmoid"] == counts["Log"] == 2
    softmax = [n for n in model.graph.node if n.op_type == "Softmax"]
    assert len(softmax) == 36
    assert {shapes[n.input[0]] for n in softmax} == {(1, 4, POINTS, POINTS)}
    assert counts["Gather"] == 18 * 3 + 36 * 2  # q, k and v; both halves of each rotation
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 17)}


def test_work_and_size_are_the_cases(model: onnx.ModelProto) -> None:
    shapes = _shapes(model)
    flops = 0
    for node in model.graph.node:
        if node.op_type == "MatMul":
            inner = shapes[node.input[0]][-1]
            out = shapes[node.output[0]]
            flops += 2 * int(inner) * math.prod(int(d) for d in out)
    assert round(flops / 1e9, 2) == 10.04
    weights = [t for t in model.graph.initializer if t.name.endswith((".weight", ".bias"))]
    parameters = sum(math.prod(t.dims) for t in weights)
    assert round(parameters / 1e6, 1) == 11.3


def test_node_names_are_unique_and_readable(model: onnx.ModelProto) -> None:
    names = [n.name for n in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"layers.3/self0/qkv/matmul", "layers.8/cross1/ffn/norm", "scores"} <= set(names)


def test_it_finds_the_true_matches() -> None:
    points = 48
    inputs = lightglue.example_inputs(points)
    outputs = ReferenceEvaluator(lightglue.build(points)).run(None, inputs)
    scores, matchability0, matchability1 = outputs
    assert scores.shape == (1, points, points)
    assert matchability0.shape == matchability1.shape == (1, points)
    truth = lightglue.partners(points)
    assert np.mean(scores[0].argmax(axis=1) == truth) > 0.95
    assert np.mean(scores[0].argmax(axis=0) == np.argsort(truth)) > 0.95
    assert np.isfinite(scores).all()
    assert scores.max() <= 0
    assert ((matchability0 > 0) & (matchability0 < 1)).all()


def test_activations_stay_of_unit_size() -> None:
    points = 16
    model = lightglue.build(points)
    watched = [f"layers.{layer}/cross1/ffn/add" for layer in range(lightglue.LAYERS)]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in watched)
    rng = np.random.default_rng(5)
    inputs = {
        name: rng.standard_normal(value.shape).astype(np.float32)
        for name, value in lightglue.example_inputs(points).items()
    }
    values = ReferenceEvaluator(model).run(watched, inputs)
    assert all(0.5 < float(np.sqrt(np.mean(v**2))) < 2 and np.abs(v).max() < 12 for v in values)


@pytest.mark.slow
def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    first = lightglue.write(tmp_path / "a.onnx", 8, seed=3).read_bytes()
    assert lightglue.write(tmp_path / "b.onnx", 8, seed=3).read_bytes() == first
    assert lightglue.write(tmp_path / "b.onnx", 8, seed=4).read_bytes() != first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]


@pytest.mark.slow
def test_symbolic_points_can_be_bound_to_any_number(tmp_path: Path) -> None:
    model = onnx.load(lightglue.write(tmp_path / "n.onnx", symbolic=True))
    assert _shapes(model)["scores"] == (1, "N", "N")
    run = ReferenceEvaluator(model)
    for points in (5, 9):
        inputs = lightglue.example_inputs(points)
        fixed = ReferenceEvaluator(lightglue.build(points)).run(None, inputs)
        for symbolic, static in zip(run.run(None, inputs), fixed, strict=True):
            np.testing.assert_array_equal(symbolic, static)


@pytest.mark.parametrize("points", [0, -1, 4097])
def test_an_impossible_number_of_points_is_refused(points: int) -> None:
    with pytest.raises(InvalidArgument, match="from 1 to 4096"):
        lightglue.build(points)
    with pytest.raises(InvalidArgument, match="from 1 to 4096"):
        lightglue.example_inputs(points)
