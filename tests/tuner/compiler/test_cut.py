"""Cutting models in parts: what is put together again gives what the whole gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from honed.machine.devices import Device
from honed.protocol.errors import ModelRefused
from honed.tuner import frontend
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler.partition import CpuPartitionModel, PartitionedModel, partition_model
from honed.tuner.compiler.partition.divide import (
    PartitionNode,
    PartitionThresholds,
    StageAssignment,
    divide,
    with_less_to_hand_over,
)
from honed.tuner.frontend.rules import RULES
from honed.tuner.frontend.walk import PART_DOMAIN
from honed.tuner.verify import confined
from tests.daemon.split_models import detector, images, reference, sparse
from tests.tuner.partitions_random import in_this_process

CHEAP = PartitionThresholds(share=0.0, work=0, most=1000, whole=0.0)  # every stretch pays
STATIC, OPEN = (4,), (1, "n")
Values = dict[str, Any]


def run(model: onnx.ModelProto, inputs: Values) -> Values:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    given = {one.name: inputs[one.name] for one in session.get_inputs()}
    return dict(zip(names, session.run(names, given), strict=True))


def composed(made: PartitionedModel, inputs: Values) -> Values:
    """The program with its parts, then the last part."""

    class Part(OpRun):
        op_domain = PART_DOMAIN

        def _run(self, *values: Any, part: int | None = None) -> tuple[Any, ...]:
            model = made.parts[part or 0]
            found = run(model.model, dict(zip([t.name for t in model.inputs], values, strict=True)))
            return tuple(checked(model, found))

    program = onnx.ModelProto()
    program.CopyFrom(made.program)
    program.opset_import.append(helper.make_opsetid(PART_DOMAIN, 1))
    evaluator = ReferenceEvaluator(program, new_ops=[Part])
    values = inputs | dict(zip(evaluator.output_names, evaluator.run(None, inputs), strict=True))
    for n in made.tail:
        values |= run(made.parts[n].model, values)
    return {spec.name: values[spec.name] for spec in made.outputs}


def checked(part: CpuPartitionModel, found: Values) -> list[Any]:
    """What a part gives, of the shapes it says."""
    for spec in part.outputs:
        assert found[spec.name].shape == spec.shape
        assert found[spec.name].dtype == spec.dtype
    return [found[spec.name] for spec in part.outputs]


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Random graphs: Sin stands for what cannot be compiled, NonZero makes sizes that depend on the data."""
    static, open_ = ["x", "y"], []
    nodes = []
    for n in range(draw(st.integers(1, 14))):
        kinds = ["able", "able2", "unable", "opens"] + (["open", "closes"] if open_ else [])
        kind = draw(st.sampled_from(kinds))
        name = f"v{n}"
        if kind == "able2":
            pair = [draw(st.sampled_from(static)), draw(st.sampled_from(static))]
            nodes.append(helper.make_node("Add", pair, [name]))
        elif kind in ("able", "unable"):
            op = "Sin" if kind == "unable" else draw(st.sampled_from(["Tanh", "Neg"]))
            nodes.append(helper.make_node(op, [draw(st.sampled_from(static))], [name]))
        elif kind == "opens":
            source = draw(st.sampled_from(static))
            nodes += [
                helper.make_node("Relu", [source], [f"{name}_r"]),
                helper.make_node("NonZero", [f"{name}_r"], [f"{name}_i"]),
                helper.make_node("Cast", [f"{name}_i"], [name], to=TensorProto.FLOAT),
            ]
        elif kind == "open":
            nodes.append(helper.make_node("Neg", [draw(st.sampled_from(open_))], [name]))
        else:
            nodes += [
                helper.make_node("ReduceSum", [draw(st.sampled_from(open_))], [f"{name}_s"], keepdims=0),
                helper.make_node("Tanh", [f"{name}_s"], [f"{name}_t"]),
                helper.make_node("Add", [f"{name}_t", draw(st.sampled_from(static))], [name]),
            ]
        (open_ if kind in ("opens", "open") else static).append(name)
    made = [*static[2:], *open_]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=4, unique=True))
    info = dict.fromkeys(static, STATIC) | dict.fromkeys(open_, OPEN)
    graph = helper.make_graph(
        nodes,
        "random",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, STATIC) for n in ("x", "y")],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, info[n]) for n in outputs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def no_sin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, ("", "Sin"))
    monkeypatch.setattr(confined, "run", in_this_process)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=graphs(), seed=st.integers(0, 99))
def test_parts_put_together_give_what_the_whole_gives(
    no_sin: None, model: onnx.ModelProto, seed: int
) -> None:
    r = np.random.default_rng(seed)
    inputs = {name: r.normal(size=STATIC).astype(np.float32) for name in ("x", "y")}
    made = partition_model(model, {}, CHEAP)
    if isinstance(made, str):
        return
    found, expected = composed(made, inputs), run(model, inputs)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    values = inputs | run(made.source, inputs)
    for n in made.tail:
        values |= run(made.parts[n].model, values)
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6)
    frontend.normalise(made.program, parts=made.between)


@given(data=st.data())
def test_stages_hold_what_they_promise(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    units = [
        PartitionNode(
            reads=tuple(f"v{m}" for m in data.draw(st.lists(st.integers(0, n - 1), max_size=3, unique=True)))
            if n
            else (),
            makes=(f"v{n}",),
            able=data.draw(st.booleans()),
            work=data.draw(st.integers(0, 5)),
        )
        for n in range(count)
    ]
    names = [f"v{n}" for n in range(count)]
    tied = set(data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True)))
    outputs = set(data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)))
    worth = data.draw(st.sampled_from([CHEAP, PartitionThresholds(share=0.2, work=2, most=1)]))
    light = set(data.draw(st.lists(st.integers(0, count - 1), unique=True)))
    nbytes = {name: data.draw(st.integers(0, 9)) for name in names}
    divided = divide(units, tied, outputs, worth)
    found = with_less_to_hand_over(units, divided, light, nbytes, outputs)
    stages = found.stages
    for n, unit in enumerate(units):
        assert unit.able or not found.is_compiled(n)
        for name in unit.reads:
            made = int(name[1:])
            assert stages[made] <= stages[n]
            if name in tied and not (units[made].able and unit.able):
                assert stages[made] == stages[n]
            if name in tied and found.is_compiled(made):
                assert found.is_compiled(n)
    for name in tied & outputs:
        assert stages[int(name[1:])] == found.tail
    between = {s for s in stages if s % 2 and s != found.tail}
    assert found.tail is None or found.tail == max(stages)
    assert len(between) <= worth.most
    assert handed(units, found, nbytes) <= handed(units, divided, nbytes)


def handed(units: list[PartitionNode], found: StageAssignment, nbytes: dict[str, int]) -> int:
    """Bytes that go to the last part."""
    last = [n for n, stage in enumerate(found.stages) if stage == found.tail]
    read = {name for n in last for name in units[n].reads}
    return sum(nbytes[name] for name in read if found.stages[int(name[1:])] != found.tail)


def test_a_detector_is_cut_before_what_chooses(tmp_path: Path) -> None:
    path = detector(tmp_path)
    made = partition_model(frontend.load(path), {})
    assert isinstance(made, PartitionedModel)
    assert (len(made.parts), made.tail) == (1, (0,))
    assert made.share > 0.99
    assert "NonMaxSuppression" in made.parts[0].why[0]
    image = images(4)[3]
    for name, value in reference(path, {"image": image}).items():
        np.testing.assert_allclose(composed(made, {"image": image})[name], value, rtol=1e-4, atol=1e-5)


def test_a_selection_that_ends_in_a_static_shape_is_a_part_in_between(tmp_path: Path) -> None:
    made = partition_model(frontend.load(sparse(tmp_path)), {})
    assert isinstance(made, PartitionedModel)
    assert (len(made.parts), made.tail) == (1, ())
    assert [t.name for t in made.parts[0].outputs] == ["thin"]


def test_what_would_hardly_be_compiled_is_not_cut(no_sin: None) -> None:
    nodes = [helper.make_node("MatMul", ["x", "x"], ["s0"])]
    nodes += [helper.make_node("Sin", [f"s{n}"], [f"s{n + 1}"]) for n in range(100)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("x", "s100")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    found = partition_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), {})
    assert isinstance(found, str)
    assert "too few to pay" in found


def test_a_node_that_claims_to_be_a_part_is_refused() -> None:
    nodes = [
        helper.make_node("Part", ["x"], ["p"], domain=PART_DOMAIN, part=0),
        helper.make_node("Neg", ["p"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(PART_DOMAIN, 1)]
    with pytest.raises(ModelRefused, match="is not compiled"):
        frontend.normalise(helper.make_model(graph, opset_imports=opsets))


def test_without_the_cpu_engine_nothing_is_cut(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frontend.load(detector(tmp_path))
    assert compiling.prepare(model, {}, "fp32", device.profile).cut is not None
    monkeypatch.setattr(compiling, "has_cpu_engine", lambda: False)
    with pytest.raises(ModelRefused, match="NonMaxSuppression"):
        compiling.prepare(model, {}, "fp32", device.profile)


def test_types_of_operators_that_onnx_does_not_define_are_asked_of_onnx_runtime() -> None:
    """A product, an operator of ONNX Runtime's own that is not compiled, and a product of static shape."""
    r = np.random.default_rng(2)
    weights = [
        numpy_helper.from_array(r.normal(size=(64, 64)).astype(np.float32) / 8, name) for name in ("v", "w")
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["a"]),
        helper.make_node("Inverse", ["a"], ["i"], domain="com.microsoft"),
        helper.make_node("MatMul", ["i", "w"], ["b"]),
        helper.make_node("Tanh", ["b"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializer=weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    made = partition_model(model, {}, PartitionThresholds(share=0.0, work=1, most=4, whole=0.0))
    assert isinstance(made, PartitionedModel)
    assert (len(made.parts), made.tail, made.nodes) == (1, (), 3)
    assert "Inverse" in made.parts[0].why[0]
    x = {"x": r.normal(size=(64, 64)).astype(np.float32)}
    np.testing.assert_allclose(composed(made, x)["y"], run(model, x)["y"], rtol=1e-3, atol=1e-4)
