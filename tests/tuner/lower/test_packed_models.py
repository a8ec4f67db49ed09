"""Models whose weights are packed: once, when they are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel, Launch, SourceModel
from honed.runtime.execution.executor import Executor, load
from honed.tuner import frontend
from honed.tuner.compiler.assemble import assemble
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.module import LoweredModel, lower_module
from honed.tuner.lower.workload import task_key
from honed.tuner.measure.candidate import Candidate, prepared_launches
from honed.tuner.tune.extract import Extracted, extract, workload
from tests.tuner.search.search_functions import imagined, profile_of

pytestmark = pytest.mark.tvm
CONSTANT = """(float[1,16,28,28] x) => (float[1,16,28,28] z) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Relu(c)
    d = Conv <pads = [1, 1, 1, 1]> (y, w, b) z = Tanh(d) }"""
DYNAMIC = """(float[1,16,28,28] x, float[16,16,3,3] w) => (float[1,16,28,28] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Relu(c) }"""
BOTH = """(float[1,16,28,28] x, float[16,16,3,3] v) => (float[1,16,28,28] z) {
    y = Conv <pads = [1, 1, 1, 1]> (x, w) z = Conv <pads = [1, 1, 1, 1]> (y, v) }"""
X = np.random.default_rng(2).standard_normal((1, 16, 28, 28)).astype(np.float32)


def model(text: str) -> onnx.ModelProto:
    """A model with the weights w and b in it, where it has no inputs of these names."""
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    rng = np.random.default_rng(1)
    given = {value.name for value in made.graph.input}
    for name, shape in (("w", (16, 16, 3, 3)), ("b", (16,))):
        if name not in given:
            value = rng.standard_normal(shape).astype(np.float32) / 8
            made.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return made


def tasks(text: str, folder: Path, profile: DeviceProfile) -> list[Extracted]:
    onnx.save(model(text), folder / "m.onnx")
    return extract(folder / "m.onnx", {}, "fp32", profile).tasks


def lowered(text: str, profile: DeviceProfile) -> tuple[frontend.Normalised, LoweredModel]:
    normalised = frontend.normalise(model(text), precision="fp32")
    return normalised, lower_module(frontend.import_relax(normalised), profile, first=untuned_kernels)


def written(text: str, profile: DeviceProfile, path: Path) -> CompiledModel:
    """Compiled for the profile with what is served first."""
    normalised, made = lowered(text, profile)
    source = SourceModel(sha256="0" * 64, filename="m", producer="", opset=17, precision="fp32", notes=())
    found, constants = assemble(source, profile, normalised, made, None)
    modelfile.write(path, found, constants)
    return found


def entries(found: CompiledModel, steps: tuple[object, ...]) -> list[str]:
    return [found.kernels[step.kernel].name.split(".")[-1] for step in steps if isinstance(step, Launch)]


@pytest.mark.opencl
def test_weights_are_packed_once_and_answers_stay_the_same(device: Device, tmp_path: Path) -> None:
    found = written(CONSTANT, profile_of("mali", device.profile), tmp_path / "m.honed")
    assert entries(found, found.prepare) == ["0", "0"]
    assert entries(found, found.steps) == ["1", "2", "1", "2"]
    assert found.prepared_bytes == 2 * 16 * 16 * 9 * 4
    unprepared = replace(
        found,
        prepare=(),
        prepared_bytes=0,
        arena_bytes=found.arena_bytes + found.prepared_bytes,
        buffers=tuple(
            replace(b, place="scratch", offset=found.arena_bytes + b.offset) if b.place == "prepared" else b
            for b in found.buffers
        ),
        steps=(*found.prepare, *found.steps),
    )
    with modelfile.read(tmp_path / "m.honed") as file:
        values = {n: file.constant(n) for n, b in enumerate(found.buffers) if b.place == "constant"}
        modelfile.write(tmp_path / "as before.honed", unprepared, values)
    with load(tmp_path / "as before.honed", device) as executor:
        right = executor.run({"x": X})["z"]
    for _ in range(2):
        with Executor(modelfile.read(tmp_path / "m.honed"), device) as executor:
            assert executor.launches == 4
            for k in range(3):
                executor.run({"x": X + k})
                np.testing.assert_array_equal(executor.run({"x": X})["z"], right)


def test_a_task_says_which_weights_may_be_packed(tmp_path: Path) -> None:
    mali, gpu = imagined("mali"), imagined("gpu")
    constant, dynamic = (tasks(text, tmp_path, mali) for text in (CONSTANT, DYNAMIC))
    assert [one.task.constants for one in constant] == [(1,), (1,)]
    assert [one.task.constants for one in dynamic] == [()]
    assert [one.task.constants for one in tasks(CONSTANT, tmp_path, gpu)] == [(), ()]
    keys = [one.task.key for one in constant]
    assert [key[16:] for key in keys] == ["_c1", "_c1"]
    assert dynamic[0].task.key in [key[:16] for key in keys], "the same function, with other times"
    assert keys == [task_key(one.func) for one in constant]


def test_compiling_knows_a_task_by_the_same_key(tmp_path: Path) -> None:
    for text in (CONSTANT, DYNAMIC, BOTH):
        keys = {one.task.key for one in tasks(text, tmp_path, imagined("mali"))}
        _, made = lowered(text, imagined("mali"))
        assert {function.task for function in made.functions.values()} == keys


def test_weights_that_are_constants_in_some_calls_only(tmp_path: Path) -> None:
    (one,) = tasks(BOTH, tmp_path, imagined("mali"))
    assert (one.task.weight, one.task.constants) == (2, ())


@pytest.mark.parametrize(
    "text",
    [
        "(float[1,16,28,28] x) => (float[1,16,26,26] y) { y = Conv <group = 16> (x, w) }",
        "(float[1,16,28,28] x) => (float[1,16,28,28] y) { y = Conv (x, w) }",
        "(float[12,16] x) => (float[12,16] y) { y = MatMul(x, w) }",
    ],
    ids=["depthwise", "pointwise", "product"],
)
def test_what_is_never_packed_keeps_its_key(text: str, tmp_path: Path) -> None:
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    shape = (16, 1, 3, 3) if "group" in text else (16, 16, 1, 1) if "Conv" in text else (16, 16)
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), "w"))
    onnx.save(made, tmp_path / "m.onnx")
    (one,) = extract(tmp_path / "m.onnx", {}, "fp32", imagined("mali")).tasks
    assert one.task.constants == ()
    assert len(one.task.key) == 16


def test_weights_are_packed_for_images_that_no_vector_divides(tmp_path: Path) -> None:
    text = "(float[1,16,13,13] x) => (float[1,16,13,13] y) { y = Conv (x, w) }"
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((16, 16, 1, 1), np.float32), "w"))
    onnx.save(made, tmp_path / "m.onnx")
    (one,) = extract(tmp_path / "m.onnx", {}, "fp32", imagined("mali")).tasks
    assert one.task.constants == (1,)
    assert one.task.key.endswith("_c1")


def test_packing_is_no_part_of_a_candidates_time(tmp_path: Path) -> None:
    one = tasks(CONSTANT, tmp_path, imagined("mali"))[0]
    _, made = lowered(CONSTANT, imagined("mali"))
    function = next(f for f in made.functions.values() if f.task == one.task.key)
    task = workload(one.task.key, one.func, one.task.outputs, tmp_path, None, one.task.constants)
    first = Candidate(id="first", source=function.source, inner=function.inner, launches=function.launches)
    assert prepared_launches(task, first) == {0}
    assert prepared_launches(replace(task, constants=()), first) == set()
