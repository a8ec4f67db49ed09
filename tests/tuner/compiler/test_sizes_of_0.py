"""Tensors with a size of 0 are constants: what makes or reads them is folded, and the rest is compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from honed.machine.devices import Device
from honed.runtime.compiled import modelfile
from honed.runtime.engines import PROVING_MIB, PartLimits
from honed.runtime.execution.cpuparts import CpuPartitionProcess
from honed.runtime.execution.executor import Executor
from honed.tuner import frontend
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler.compile import compile_file
from honed.tuner.compiler.partition import PartitionedModel, partition_model
from tests.tuner.requests import request_for

from .test_cut import CHEAP, run

EMPTY = "float[2,8] x, float[0,8] e"  # inputs of most models


def read(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')


def inputs(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    r = np.random.default_rng(0)
    return {
        value.name: r.normal(size=[d.dim_value for d in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
    }


@pytest.mark.parametrize(
    "text",
    [
        f"({EMPTY}) => (float[2,8] y) {{ c = Concat<axis=0>(e, x) y = Tanh(c) }}",
        f"({EMPTY}) => (float[0,8] y, float[2,8] z) {{ y = Tanh(e) z = Relu(x) }}",
        f"({EMPTY}) => (float[0,8] y) {{ y = Identity(e) }}",
        f"({EMPTY}) => (float[2,8] y) <int64[1] a = {{0}}> {{ s = ReduceSum(e, a) y = Add(s, x) }}",
        f"({EMPTY}) => (float[2,8] y) {{ s = Shape(e) f = Cast<to=1>(s) r = ReduceSum(f) y = Add(x, r) }}",
        "(float[2,0] a, float[0,8] e, float[2,8] x) => (float[2,8] y) { m = MatMul(a, e) y = Add(m, x) }",
        "(float[2,8] x) => (float[2,0] y) <int64[1] a = {8}, int64[1] b = {1}> { y = Slice(x, a, a, b) }",
        "(float[2,8] x) => (float[2,8] y, float[2,0] z) <int64[2] s = {8, 0}> { y, z = Split<axis=1>(x, s) }",
        "(float[4,8] x, float[0,8] u) => (float[4,8] y) <int64[0,1] i = {}> { y = ScatterND(x, i, u) }",
    ],
)
def test_what_has_no_elements_is_folded(text: str) -> None:
    model = read(text)
    made = frontend.normalise(model)
    given = inputs(model)
    found = onnxruntime.InferenceSession(made.model.SerializeToString()).run(None, given)
    for name, value in zip([o.name for o in made.outputs], found, strict=True):
        expected = run(model, given)[name]
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert [spec.shape for spec in made.inputs] == [value.shape for value in given.values()]


@pytest.mark.parametrize(
    "text",
    [
        f"({EMPTY}) => (float[2,8] y) {{ m = ReduceMean<axes=[0]>(e) t = Tanh(x) y = Add(t, m) }}",
        "(float[8,8] x, float[0,8] e) => (float[8,8] y, float[n,8,8] z) <int64 n = {0}> "
        "{ t = MatMul(x, x) y, z = Loop(n, , t) <body = b (int64 i, bool c, float[8,8] s) => "
        "(bool d, float[8,8] u, float[8,8] v) { d = Identity(c) u = Neg(s) v = Abs(s) }> }",
    ],
    ids=["a mean of nothing", "a loop of no steps"],
)
def test_what_cannot_be_folded_is_a_part(
    text: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "partition_model", partial(partition_model, worth=CHEAP))
    check_compiled(read(text), device, tmp_path, parts=1)


def test_nodes_that_make_nothing_are_no_part() -> None:
    text = "(float[0,1,4,4] e, float[2,8] x) => (float[2,8] y, float[0,1,8,8] z) <float[4] s = {1, 1, 2, 2}> "
    made = partition_model(read(text + "{ z = Resize(e, , s) y = Tanh(x) }"), {}, CHEAP)
    assert isinstance(made, PartitionedModel)
    assert not made.parts
    assert frontend.normalise(made.program).outputs[1].shape == (0, 1, 8, 8)


def test_outputs_without_elements_need_no_proof(device: Device, tmp_path: Path) -> None:
    model = read(f"({EMPTY}) => (float[2,8] y, float[0,8] z) {{ y = Tanh(x) z = Neg(e) }}")
    check_compiled(model, device, tmp_path, parts=0)


def check_compiled(model: onnx.ModelProto, device: Device, folder: Path, *, parts: int) -> None:
    """Compiled and verified, it gives what ONNX Runtime gives."""
    path, output = folder / "m.onnx", folder / "m.honed"
    onnx.save(model, path)
    request = request_for(path, device)
    made = compile_file(request, lambda *_: None).model
    assert len(made.split.parts if made.split is not None else ()) == parts
    assert made.proof is not None
    assert set(made.proof.covered) == {1.0}
    given = inputs(model)
    parts = partial(CpuPartitionProcess, PartLimits(memory_mib=PROVING_MIB))
    with Executor(modelfile.read(output), device, part_process=parts) as executor:
        found = executor.run(given)
    for name, expected in run(model, given).items():
        assert (found[name].shape, found[name].dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
