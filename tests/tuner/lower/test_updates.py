"""Outputs that keep most of an input lie in its buffer, and only what changes is stored there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.running import ready
from onnx import parser

from honed.machine.devices import Device
from honed.runtime.compiled.model import Growth
from honed.runtime.execution.segments import Command
from honed.tuner import frontend
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.compiler.verification import run_sets
from honed.tuner.lower.module import lower_module
from honed.tuner.lower.plan import Plan
from honed.tuner.tune.extract import extract

from .lowering import normal

pytestmark = pytest.mark.tvm
ROWS, SIZE = 12, 5
# Rows from `first` on are new; `other` is what the test puts in.
TEXT = f"""<ir_version: 8, opset_import: ["": 17]>
f (float[2,{ROWS},{SIZE}] past, int64 first, float[2,1,{SIZE}] new) => (float[2,{ROWS},{SIZE}] present OUTPUT)
    <int64 zero = {{0}}, int64 one = {{1}}, int64 rows = {{{ROWS}}}, int64[1] last = {{-1}}> {{
    all = Range(zero, rows, one)
    row = Unsqueeze(all, last)
    changes = LessOrEqual(first, row)
    value = Tanh(new)
    present = WHERE
    OTHER
}}"""
KEEPS = "Where(changes, value, past)"
OPPOSITE = ("Where(stays, past, value)", "stays = Not(changes)", "")


def _model(
    where: str = KEEPS, before: str = "", other: str = "", output: str = "", given: str = ""
) -> onnx.ModelProto:
    text = TEXT.replace("present =", f"{before}\n present =").replace("WHERE", where)
    text = text.replace("int64 first", f"{given} int64 first")
    return parser.parse_model(text.replace("OTHER", other).replace("OUTPUT", output))


def _given(first: int) -> dict[str, np.ndarray]:
    past, new = normal(2, ROWS, SIZE, seed=first), normal(2, 1, SIZE, seed=first)
    return {"past": past, "first": np.array(first, np.int64), "new": new}


def _expected(given: dict[str, np.ndarray]) -> np.ndarray:
    changes = np.arange(ROWS)[:, None] >= given["first"]
    return np.where(changes, np.tanh(given["new"]), given["past"])


def _plan(model: onnx.ModelProto, device: Device) -> Plan:
    module = frontend.import_relax(frontend.normalise(model))
    return lower_module(module, device.profile, first=untuned_kernels).plan(device.profile)


@pytest.mark.parametrize("where", [(KEEPS,), OPPOSITE])
def test_rows_are_written_in_place_run_after_run(where: tuple[str, ...], device: Device) -> None:
    model = _model(*where)
    made = _plan(model, device)
    assert made.output_buffers == made.input_buffers[:1]
    sets = [_given(first) for first in (0, 7, ROWS, 3)]
    for given, found in zip(sets, run_sets(model, sets, device, "auto", untuned_kernels), strict=True):
        np.testing.assert_allclose(found["present"], _expected(given), atol=1e-6)


@pytest.mark.parametrize(
    ("other", "output"),
    [
        ("more = Exp(past)", f", float[2,{ROWS},{SIZE}] more"),
        ("more = Identity(past)", f", float[2,{ROWS},{SIZE}] more"),
    ],
)
def test_an_input_that_is_read_elsewhere_stays_as_it_is(other: str, output: str, device: Device) -> None:
    model, given = _model(other=other, output=output), _given(4)
    assert set(_plan(model, device).output_buffers).isdisjoint(_plan(model, device).input_buffers)
    (found,) = run_sets(model, [given], device, "auto", untuned_kernels)
    np.testing.assert_allclose(found["present"], _expected(given), atol=1e-6)
    np.testing.assert_allclose(
        found["more"], np.exp(given["past"]) if "Exp" in other else given["past"], rtol=1e-5
    )


def test_halves_that_stay_on_the_device_are_not_converted_by_a_step(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device computes in singles. A decoder's 60 caches took 120 launches and 60 copies a step."""
    text = _model().graph
    for value in (*text.input, *text.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    model = onnx.helper.make_model(text, opset_imports=_model().opset_import)
    normalised = frontend.normalise(model, profile=device.profile)
    lowered = lower_module(frontend.import_relax(normalised), device.profile, first=untuned_kernels)
    converted: list[str] = []
    launch = Command.launch

    def noted(kernel: int | None, name: str, *args: Any) -> Command:
        if kernel is None:
            converted.append(name)
        return launch(kernel, name, *args)

    monkeypatch.setattr(Command, "launch", noted)
    growing = (Growth("past", "present", 1),)
    given = {
        name: value.astype(np.float16 if value.dtype == np.float32 else value.dtype)
        for name, value in _given(7).items()
    }
    with ready(normalised, lowered, device) as executor:
        assert converted in ([], ["widened"]), "of what is given alone"
        executor.restore(growing, {"past": given.pop("past")[:, :7]})
        assert executor.step(given, growing, 7, 1) == {}
        found = executor.read_rows(growing, 8)["past"]
    assert found.dtype == np.float16
    expected = _expected({name: value.astype(np.float32) for name, value in _given(7).items()})
    np.testing.assert_allclose(found, expected[:, :8], atol=2e-3)


def test_what_is_stored_in_place_is_not_tuned(device: Device, tmp_path: Path) -> None:
    onnx.save(_model(), tmp_path / "m.onnx")
    found = extract(tmp_path / "m.onnx", {}, "auto", device.profile)
    (update,) = found.opaque
    assert "update" in update.name
    assert update.key not in {one.task.key for one in found.tasks}


def test_a_choice_between_an_input_and_itself_is_made(device: Device) -> None:
    (found,) = run_sets(_model("Where(changes, past, past)"), [_given(4)], device, "auto", untuned_kernels)
    np.testing.assert_array_equal(found["present"], _given(4)["past"])


def test_what_is_no_output_has_memory_of_its_own(device: Device) -> None:
    model = _model("Exp(changed)", f"changed = {KEEPS}")
    assert set(_plan(model, device).output_buffers).isdisjoint(_plan(model, device).input_buffers)


@pytest.mark.parametrize(
    ("second", "functions"),
    [("second = Neg(new)", 1), ("most = ReduceMax<axes = [1]>(present)\n second = Add(new, most)", 2)],
    ids=["apart", "one of what the other stored"],
)
def test_two_of_equal_shapes_are_one_launch(second: str, functions: int, device: Device) -> None:
    shape = f"float[2,{ROWS},{SIZE}]"
    also = f"{second}\n also = Where(changes, second, too)"
    model = _model(other=also, output=f", {shape} also", given=f"{shape} too,")
    module = frontend.import_relax(frontend.normalise(model))
    lowered = lower_module(module, device.profile, first=untuned_kernels)
    updates = [one for name, one in lowered.functions.items() if "update" in name]
    assert [len(one.launches) for one in updates] == [1] * functions
    plan = lowered.plan(device.profile)
    assert plan.output_buffers == plan.input_buffers[:2]
    sets = [_given(first) | {"too": normal(2, ROWS, SIZE, seed=first + 1)} for first in (0, 7, ROWS, 3)]
    for given, found in zip(sets, run_sets(model, sets, device, "auto", untuned_kernels), strict=True):
        present = _expected(given)
        other = -given["new"] if functions == 1 else given["new"] + present.max(axis=1, keepdims=True)
        changes = np.arange(ROWS)[:, None] >= given["first"]
        np.testing.assert_allclose(found["present"], present, atol=1e-6)
        np.testing.assert_allclose(found["also"], np.where(changes, other, given["too"]), atol=1e-6)
