"""The search names the node that computes a wrong value, and says so where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from honed.machine.devices import Device
from honed.runtime.errors import ModelRefused
from honed.tuner import lightglue
from honed.tuner.verify.locate import first_difference

from .parsing import generate, parsed


def _run(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        values = ReferenceEvaluator(model).run(None, given)
    return {v.name: np.asarray(x) for v, x in zip(model.graph.output, values, strict=True)}


def _wrong_at(wrong: Mapping[str, str]) -> Callable[..., dict[str, np.ndarray]]:
    """A compiler that takes the node making a value for another operator."""

    def run(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        for node in changed.graph.node:
            if node.output[0] in wrong:
                node.op_type = wrong[node.output[0]]
        return _run(changed, given)

    return run


DIAMOND = parsed(
    "f (float[4] x) => (float[4] y, float[4] z) {"
    "a = Exp(x) b = Sin(a) c = Cos(a) d = Abs(b) e = Add(c, d) y = Tanh(e) z = Relu(a) }"
)
GIVEN = {"x": np.array([-1, 0.5, 1, 2], np.float32)}


@pytest.mark.parametrize(
    ("value", "wrong", "batch"),
    [
        pytest.param("a", "Sin", 1, marks=pytest.mark.slow),
        ("a", "Sin", 16),
        pytest.param("b", "Cos", 1, marks=pytest.mark.slow),
        pytest.param("c", "Exp", 2, marks=pytest.mark.slow),
        ("d", "Neg", 16),
        pytest.param("y", "Sin", 16, marks=pytest.mark.slow),
    ],
)
def test_it_names_the_node(value: str, wrong: str, batch: int) -> None:
    found = first_difference(DIAMOND, GIVEN, _wrong_at({value: wrong}), batch=batch)
    op = next(n.op_type for n in DIAMOND.graph.node if n.output[0] == value)
    assert f"made by node {value!r} ({op})" in found
    assert f"its output {value!r} differs by" in found
    assert "\n" not in found


@pytest.mark.slow
def test_the_first_of_several_is_named() -> None:
    found = first_difference(DIAMOND, GIVEN, _wrong_at({"b": "Cos", "y": "Sin", "z": "Neg"}), batch=1)
    assert "node 'b'" in found or "node 'z'" in found  # both read what agrees
    found = first_difference(DIAMOND, GIVEN, _wrong_at({"a": "Tanh", "y": "Sin", "e": "Sub"}), batch=2)
    assert "node 'a'" in found


@pytest.mark.slow
def test_a_large_model_takes_few_variants() -> None:
    model = lightglue.build(8)
    wrong = "layers.4/self1/ffn/gelu/erf"
    run = Mock(side_effect=_wrong_at({wrong: "Neg"}))
    assert f"node {wrong!r} (Erf)" in first_difference(model, lightglue.example_inputs(8), run)
    assert run.call_count <= 6  # of 1,464 nodes


def test_a_difference_that_does_not_show_again_is_not_blamed_on_a_node() -> None:
    run = Mock(side_effect=_run)
    assert "did not show again" in first_difference(DIAMOND, GIVEN, run)
    assert run.call_count == 1


def test_a_difference_that_vanishes_when_looked_at_is_not_blamed_on_a_node() -> None:
    def fused(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        whole = [v.name for v in model.graph.output] == ["y", "z"]
        return _wrong_at({"e": "Sub"} if whole else {})(model, given)

    found = first_difference(DIAMOND, GIVEN, fused)
    assert "no single node can be blamed for the difference of 'y'" in found
    assert "vanishes where the values before it are looked at" in found


def test_a_variant_that_cannot_be_compiled_ends_the_search() -> None:
    def refusing(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if len(model.graph.output) > 2:
            raise ModelRefused("too many outputs")
        return _wrong_at({"b": "Cos"})(model, given)

    found = first_difference(DIAMOND, GIVEN, refusing)
    assert "no single node can be blamed for the difference of 'y'" in found
    assert "too many outputs" in found


def test_time_is_bounded() -> None:
    run = Mock(side_effect=_wrong_at({"b": "Cos"}))
    assert "lack of time" in first_difference(DIAMOND, GIVEN, run, seconds=0)
    assert run.call_count == 1


@pytest.mark.slow
def test_wrong_shapes_and_nan_differ() -> None:
    def shaped(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {n: v[:1] if n in ("d", "e", "y") else v for n, v in _run(model, given).items()}

    assert "node 'd'" in first_difference(DIAMOND, GIVEN, shaped)
    found = first_difference(DIAMOND, GIVEN, _wrong_at({"c": "Acosh"}))  # of values below 1
    assert "node 'c'" in found
    assert "differs by inf" in found


@pytest.mark.slow
def test_values_read_by_subgraphs_are_looked_at() -> None:
    model = parsed(
        "f (bool c, float[3] x) => (float[3] y) { a = Exp(x) b = Sin(a) y = If (c) <"
        "then_branch = g () => (float[3] t) { t = Neg(b) },"
        "else_branch = h () => (float[3] t) { t = Abs(a) }> }"
    )
    (given,) = generate(model, 1)
    assert "node 'a'" in first_difference(model, given, _wrong_at({"a": "Cos"}))


@pytest.mark.tvm
def test_it_names_the_node_of_what_was_really_compiled(device: Device) -> None:
    from honed.tuner.compiler.verification import run_model

    def compiled(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        for node in changed.graph.node:
            if node.output[0] == "d":
                node.op_type = "Neg"
        return run_model(changed, given, device)

    found = first_difference(DIAMOND, GIVEN, compiled, batch=2)
    assert "node 'd' (Abs)" in found
    right = first_difference(DIAMOND, GIVEN, lambda m, g: run_model(m, g, device))
    assert "did not show again" in right


@pytest.mark.slow
def test_functions_are_looked_into() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18, "own": 1]>'
        "f (float[4] x) => (float[4] y) { y = own.wave(x) }"
        '<domain: "own", opset_import: ["": 18]> wave (a) => (c) { b = Exp(a) c = Sin(b) }'
    )
    found = first_difference(model, GIVEN, lambda m, g: _wrong_at({"y": "Cos"})(m, g))
    assert "(Sin)" in found
