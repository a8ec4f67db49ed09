"""Parts compiled for sizes that depend on the data: which may run on more rows, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from honed.machine.devices import Device
from honed.protocol.errors import ModelFileError
from honed.protocol.values import ObservedSizes
from honed.runtime.compiled import modelfile, validate
from honed.runtime.compiled.model import CompiledModel, CpuPartition, PartitionTensor, SkippedSizes
from honed.runtime.engines import PairedTiming, allowance, can_compiled_serve
from honed.runtime.execution.executor import load
from honed.runtime.execution.verification import check_numbered, probe_count
from honed.tuner import frontend
from honed.tuner.compiler import sized
from honed.tuner.compiler.compile import compile_file
from honed.tuner.compiler.partition import PartitionedModel, partition_model
from honed.tuner.compiler.partition.rows import by_rows
from honed.tuner.frontend.signature import StaticTensorSpec
from honed.tuner.tune.extract import extract
from tests.daemon.split_models import detector, images, reference, two_stage
from tests.tuner.requests import request_for

Values = dict[str, Any]
WIDTH = 6
STEPS: dict[str, tuple[list[onnx.NodeProto], bool]] = {
    "relu": ([helper.make_node("Relu", ["x"], ["y"])], True),
    "bias": ([helper.make_node("Add", ["x", "row"], ["y"])], True),
    "matmul": ([helper.make_node("MatMul", ["x", "square"], ["y"])], True),
    "gemm": ([helper.make_node("Gemm", ["x", "square", "row"], ["y"])], True),
    "softmax": ([helper.make_node("Softmax", ["x"], ["y"], axis=1)], True),
    "reshaped": (
        [
            helper.make_node("Reshape", ["x", "halves"], ["x1"]),
            helper.make_node("ReduceMax", ["x1"], ["x2"], axes=[2]),
            helper.make_node("Sub", ["x1", "x2"], ["x3"]),
            helper.make_node("Reshape", ["x3", "flat"], ["y"]),
        ],
        True,
    ),
    "shape": (
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Tanh", ["x"], ["x1"]),
            helper.make_node("Reshape", ["x1", "s"], ["y"]),
        ],
        True,
    ),
    "sum of all rows": (
        [helper.make_node("ReduceMean", ["x"], ["m"], axes=[0]), helper.make_node("Sub", ["x", "m"], ["y"])],
        False,
    ),
    "softmax of columns": ([helper.make_node("Softmax", ["x"], ["y"], axis=0)], False),
    "rows by rows": (
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
            helper.make_node("MatMul", ["t", "x"], ["g"]),
            helper.make_node("MatMul", ["x", "g"], ["y"]),
        ],
        False,
    ),
    "how many there are": (
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "first"], ["n"]),
            helper.make_node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Div", ["x", "f"], ["y"]),
        ],
        False,
    ),
    "rows made longer": (
        [
            helper.make_node("Reshape", ["x", "columns"], ["c"]),
            helper.make_node("Softmax", ["c"], ["d"], axis=1),
            helper.make_node("Reshape", ["d", "flat"], ["y"]),
        ],
        False,
    ),
}


def part(steps: list[str]) -> tuple[onnx.ModelProto, list[StaticTensorSpec], list[StaticTensorSpec]]:
    """Steps one after the other, on rows of WIDTH."""
    r = np.random.default_rng(1)
    constants = {
        "row": r.normal(size=(WIDTH,)).astype(np.float32),
        "square": r.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "halves": np.array([-1, 2, WIDTH // 2]),
        "flat": np.array([-1, WIDTH]),
        "columns": np.array([WIDTH, -1]),
        "first": np.array(0),
    }
    nodes = []
    for n, step in enumerate(steps):
        for node in STEPS[step][0]:
            copied = onnx.NodeProto()
            copied.CopyFrom(node)
            for names in (copied.input, copied.output):
                for i, name in enumerate(names):
                    if name not in constants:
                        names[i] = {"x": f"v{n}", "y": f"v{n + 1}"}.get(name, f"{name}_{n}")
            nodes.append(copied)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH])
        for name in ("v0", f"v{len(steps)}")
    ]
    graph = helper.make_graph(
        nodes,
        "part",
        ends[:1],
        ends[1:],
        initializer=[numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    specs = [StaticTensorSpec(name=end.name, dtype="float32", shape=(-1, WIDTH)) for end in ends]
    return model, specs[:1], specs[1:]


@pytest.mark.parametrize("step", STEPS)
def test_what_a_row_hangs_on_is_known(step: str) -> None:
    assert by_rows(*part([step])) == STEPS[step][1]


@given(steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
def test_more_rows_change_no_row_where_that_is_said(steps: list[str]) -> None:
    model, inputs, outputs = part(steps)
    if not by_rows(model, inputs, outputs):
        assert not all(STEPS[step][1] for step in steps)
        return
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = np.random.default_rng(2).normal(size=(5, WIDTH)).astype(np.float32)
    more = np.concatenate([x, np.repeat(x[-1:], 3, 0)])
    [few], [many] = (session.run(None, {"v0": each}) for each in (x, more))
    np.testing.assert_allclose(many[:5], few, rtol=1e-5, atol=1e-6)


def sizes(*rows: int) -> tuple[ObservedSizes, ...]:
    return tuple(ObservedSizes(part=1, sizes=(n,)) for n in rows)


class Compiling:
    """Compiles the detector of two stages for a device, as often as asked."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.device = device
        self.source = two_stage(folder)
        self.output = self.source.with_suffix(".honed")

    def __call__(self, **more: Any) -> CompiledModel:
        request = request_for(self.source, self.device, "auto", **more)
        compile_file(request, lambda *_: None)
        with modelfile.read(self.output) as file:
            return file.model


@pytest.fixture(scope="module")
def compiling(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Compiling:
    """A file for two sizes is there."""
    made = Compiling(device, tmp_path_factory.mktemp("sized"))
    made(sizes=sizes(16, 48), keep_slower=True)
    return made


def model_of(compiling: Compiling) -> CompiledModel:
    with modelfile.read(compiling.output, verify=False) as file:
        return file.model


def test_a_detector_of_two_stages_has_a_part_that_sizes_alone_keep_from_compiling(tmp_path: Path) -> None:
    made = partition_model(frontend.load(two_stage(tmp_path)), {})
    assert isinstance(made, PartitionedModel)
    choosing, dense = (made.parts[n] for n in made.tail)
    assert not choosing.sized
    assert dense.sized
    assert dense.by_rows
    assert dense.flops > 1000 * choosing.flops
    assert "RoiAlign" in [node.op_type for node in dense.model.graph.node]


def test_what_has_no_work_that_pays_stays_one_part(tmp_path: Path) -> None:
    made = partition_model(frontend.load(detector(tmp_path)), {})
    assert isinstance(made, PartitionedModel)
    assert [part.sized for part in made.parts] == [False]


@pytest.mark.opencl
@pytest.mark.tvm
def test_forms_answer_as_the_cpu_engine_does(compiling: Compiling) -> None:
    with load(compiling.output, compiling.device) as executor:
        assert [form.sizes for form in executor.model.forms] == [(16,), (48,)]
        ran = set()
        for image in images(7):
            found, expected = executor.run({"image": image}), reference(compiling.source, {"image": image})
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4)
            ran |= {met.sizes[0] for met in executor.observed}
        assert 0 in ran
        assert ran & set(range(1, 17))  # in the form of 16 rows
        assert ran & set(range(17, 49))
        assert ran & set(range(49, 100))  # in the CPU engine
        for number in range(probe_count(executor)):
            assert all(found.right for found in check_numbered(executor, number))
        assert probe_count(executor) > len(executor.model.proof.probes if executor.model.proof else ())


@pytest.mark.opencl
@pytest.mark.tvm
def test_the_time_of_forms_is_told_apart(compiling: Compiling) -> None:
    def rows(image: Any) -> dict[str, int]:
        return {row.name: row.count for row in executor.profile({"image": image}).kernels}

    with load(compiling.output, compiling.device) as executor:
        empty, few = (rows(image) for image in images(2))
    assert (empty["(cpu_part)"], few["(cpu_part)"]) == (1, 2)
    assert ("(compiled_part)" in empty, few["(compiled_part)"]) == (False, 1)


@pytest.mark.slow
@pytest.mark.opencl
@pytest.mark.tvm
def test_tuning_compiles_for_the_sizes_that_are_served(compiling: Compiling, tmp_path: Path) -> None:
    """As `like` has them, also where that is a device that the CPU engine is faster than."""
    served = tmp_path / "served.honed"
    served.write_bytes(compiling.output.read_bytes())
    again = Compiling(compiling.device, tmp_path)(existing_build=served)
    assert [(form.part, form.sizes) for form in again.forms] == [(1, (16,)), (1, (48,))]


@pytest.mark.opencl
@pytest.mark.tvm
def test_equal_constants_are_in_the_file_once(compiling: Compiling) -> None:
    small, large = model_of(compiling).forms
    largest = [
        max((b.nbytes, b.offset) for b in f.model.buffers if b.place == "constant") for f in (small, large)
    ]
    assert largest[0] == largest[1]


@pytest.mark.opencl
@pytest.mark.tvm
def test_a_wrong_form_is_not_served(compiling: Compiling) -> None:
    model = model_of(compiling)
    form = model.forms[0]
    wrong = {
        "of another part": replace(form, part=0),
        "of no size": replace(form, sizes=(0,)),
        "of too many sizes": replace(form, sizes=(16, 16)),
        "of another size": replace(form, sizes=(17,)),
        "of fewer rows than none": replace(form, least=-1),
        "of more rows than it has": replace(form, least=17),
        "within a form": replace(form, model=replace(form.model, forms=(form,))),
        "with constants elsewhere": replace(form, model=replace(form.model, constant_bytes=64)),
        "that gives nothing": replace(form, model=replace(form.model, outputs=())),
        "in no time": replace(form, times=replace(form.times, cpu_us=0.0) if form.times else None),
    }
    for each in wrong.values():
        with pytest.raises(ModelFileError):
            validate.check(replace(model, forms=(each,)))
    with pytest.raises(ModelFileError, match="two forms"):
        validate.check(replace(model, forms=(form, form)))
    assert model.split is not None
    both = replace(model.split, left_out=(SkippedSizes(part=form.part, sizes=form.sizes, why="slow"),))
    with pytest.raises(ModelFileError, match="two forms"):
        validate.check(replace(model, split=both))


@pytest.mark.slow
@pytest.mark.opencl
@pytest.mark.tvm
def test_what_the_cpu_engine_is_faster_with_is_left_out_and_told(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a few rows, on a machine that does nothing else: times are real, what they say is given."""
    monkeypatch.setattr(PairedTiming, "within_allowance", property(lambda _: False))
    compiling = Compiling(device, tmp_path)
    model = compiling(sizes=(*sizes(2), ObservedSizes(part=0, sizes=(3,)), ObservedSizes(part=7, sizes=())))
    assert model.split is not None
    assert not model.forms
    [out] = model.split.left_out
    assert (out.part, out.sizes) == (1, (2,))
    assert "the CPU engine is faster" in out.why
    kept = tmp_path / "before.honed"
    compiling.output.rename(kept)
    again = compiling(sizes=sizes(3), existing_build=kept)
    assert again.split is not None
    assert {out.sizes for out in again.split.left_out} == {(2,), (3,)}


@given(
    rows=st.integers(1, 200),
    us_per_row=st.floats(0.1, 10.0),
    compiled_us=st.floats(1.0, 2000.0),
    processor=st.booleans(),
)
def test_a_form_runs_for_fewer_rows_as_long_as_it_is_faster(
    rows: int, us_per_row: float, compiled_us: float, processor: bool
) -> None:
    """The CPU engine takes as long as there are rows; a form takes the same for all."""

    class Engine:
        def run_chain(self, _parts: Any, given: Values, _wanted: Any) -> Any:
            return SimpleNamespace(ns=1e3 * us_per_row * len(given["x"])), {}

    x = PartitionTensor(name="x", dtype="float32", shape=(-1, 2))
    sized_part = CpuPartition(
        onnx=0, inputs=(x,), outputs=(), nodes=1, flops=1, why=(), sized=True, by_rows=True
    )

    class Both(sized._ComparedEngines):
        def _in_form(self, given: Any) -> float:
            return compiled_us / 1e6

        def _in_cpu(self, given: Any) -> float:  # handing over takes no time
            seconds = super()._in_cpu(given)
            self.transfers = 0.0
            return seconds

    both = Both(cast(Any, Engine()), 0, sized_part, cast(Any, None), allowance(same_cores=processor))
    given = {"x": np.zeros((rows, 2), np.float32)}
    least = both.least(given, keep_slower=False)
    assert 1 <= least <= rows
    if least < rows:
        assert can_compiled_serve(compiled_us, us_per_row * least, same_cores=processor)
    assert both.least(given, keep_slower=True) == 1
    whole = replace(sized_part, by_rows=False)
    assert replace(both, part=whole).least(given, keep_slower=False) == 0


@pytest.mark.opencl
@pytest.mark.tvm
def test_tuning_has_the_tasks_of_forms(compiling: Compiling) -> None:
    profile = compiling.device.profile
    without = extract(compiling.source, {}, "fp32", profile)
    found = extract(compiling.source, {}, "fp32", profile, existing_build=compiling.output)
    keys = {one.task.key for one in found.tasks}
    assert keys > {one.task.key for one in without.tasks}
    kernels = [kernel for form in model_of(compiling).forms for kernel in form.model.kernels]
    assert {kernel.task for kernel in kernels} <= keys
