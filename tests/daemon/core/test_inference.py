"""ModelInfer checked against a model, without a service."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from honed.daemon.serving.plan import InferencePlan, ResponseInfo, check
from honed.daemon.store.compiled import interface_of
from honed.daemon.worker.calls import InferenceResult, InputSpec, OutputSpec, RegionSlice, pack_layout
from honed.daemon.worker.shared_memory import RegionTable
from honed.protocol import strict
from honed.protocol.errors import HonedError, InvalidArgument
from honed.protocol.params import InferParams, RegionParams
from honed.runtime.calling.shared_memory import Region
from honed.runtime.compiled.model import Tensor

INPUTS = (
    Tensor(name="a", dtype="float32", shape=(2, 3), buffer=0),
    Tensor(name="mask", dtype="bool", shape=(4,), buffer=1),
    Tensor(name="n", dtype="int64", shape=(), buffer=2),
)
OUTPUTS = (
    Tensor(name="y", dtype="float16", shape=(5,), buffer=3),
    Tensor(name="empty", dtype="float32", shape=(0, 2), buffer=4),
)
A = {"name": "a", "datatype": "FP32", "shape": [2, 3]}
MASK = {"name": "mask", "datatype": "BOOL", "shape": [4]}
N = {"name": "n", "datatype": "INT64", "shape": []}
RAW = [bytes(24), b"\0\1\1\0", bytes(8)]


@pytest.fixture
def regions() -> Iterator[RegionTable]:
    table = RegionTable(4)
    with Region("r", 4096) as region:
        table.add(RegionParams(name="r", offset=None, byte_size=4096), region.descriptor)
    yield table
    for held in table.remove(None):
        assert held.release()


def planned(regions: RegionTable, **changes: Any) -> InferencePlan:
    params = {"model_name": "m", "inputs": [A, MASK, N], "raw_input_contents": RAW, **changes}
    parsed = strict.from_plain(InferParams, params, where="params", none_omitted=True)
    plan = check(parsed, interface_of(INPUTS, OUTPUTS), None, regions, max_bytes=1 << 20, keep=True)
    plan.check_data(parsed.raw_input_contents or ())
    return plan


def placed(entry: dict[str, Any], offset: int, size: int, name: str = "r") -> dict[str, Any]:
    place = {
        "shared_memory_region": name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": size,
    }
    return {**entry, "parameters": place}


def test_a_plain_request(regions: RegionTable) -> None:
    plan = planned(regions)
    assert (plan.timeout, plan.priority, plan.finite, plan.regions) == (60.0, 2, False, [])
    worker = plan.form()
    assert worker.inputs[0] == InputSpec(name="a", dtype="float32", shape=(2, 3), place=None)
    assert [(output.name, output.place) for output in worker.outputs] == [("y", None), ("empty", None)]
    call = plan.call(RAW, "key")
    assert (call.template, call.raw) == (worker, tuple(RAW))


def test_inputs_in_any_order(regions: RegionTable) -> None:
    plan = planned(regions, inputs=[N, A, MASK], raw_input_contents=[RAW[2], RAW[0], RAW[1]])
    assert [entry.name for entry in plan.form().inputs] == ["n", "a", "mask"]


def test_places_in_shared_memory(regions: RegionTable) -> None:
    plan = planned(
        regions,
        inputs=[placed(A, 0, 24), MASK, N],
        raw_input_contents=RAW[1:],
        outputs=[placed({"name": "y"}, 4086, 10)],
    )
    assert len(plan.regions) == 1
    number = plan.regions[0].number
    worker = plan.form()
    assert worker.inputs[0].place == RegionSlice(region=number, offset=0, nbytes=24)
    assert worker.outputs == (OutputSpec(name="y", place=RegionSlice(region=number, offset=4086, nbytes=10)),)
    ran = InferenceResult(raw=(), layout=pack_layout([(5,)], [-1]), input_ns=0, infer_ns=2000, output_ns=0)
    result = plan.answer(ran, "", ResponseInfo(1, 2, "gpu"))
    assert result["outputs"][0]["parameters"]["shared_memory_offset"] == 4086


def test_room_for_outputs_without_a_place(regions: RegionTable) -> None:
    plan = planned(regions, **placed({}, 64, 256))
    number = plan.regions[0].number
    assert plan.form().room == RegionSlice(region=number, offset=64, nbytes=256)
    layout = pack_layout([(5,), (0,)], [128, -1])
    ran = InferenceResult(raw=(b"",), layout=layout, input_ns=0, infer_ns=2000, output_ns=0)
    outputs = plan.answer(ran, "", ResponseInfo(1, 2, "gpu"))["outputs"]
    assert outputs[0]["parameters"] == placed({}, 192, 10)["parameters"]
    assert outputs[1]["parameters"] == {}


def test_what_was_asked_for(regions: RegionTable) -> None:
    plan = planned(regions, parameters={"timeout": 1500, "priority": 1, "finite": True})
    assert (plan.timeout, plan.priority, plan.finite) == (0.0015, 1, True)
    assert [t.name for t, _ in planned(regions, outputs=[{"name": "empty"}]).outputs] == ["empty"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": [A, MASK]}, "'n' is missing"),
        ({"inputs": [A, MASK, N, A]}, "twice"),
        ({"inputs": [A, MASK, {**N, "name": "m"}]}, "no input 'm'"),
        ({"inputs": [{**A, "datatype": "FP16"}, MASK, N]}, "takes FP32"),
        ({"inputs": [{**A, "shape": [3, 2]}, MASK, N]}, r"takes \[2, 3\]"),
        ({"inputs": [{**A, "shape": [2, 3, 1]}, MASK, N]}, r"takes \[2, 3\]"),
        ({"raw_input_contents": RAW[:2]}, "no data for input 'n'"),
        ({"raw_input_contents": None}, "no data for input 'a'"),
        ({"raw_input_contents": [*RAW, b""]}, "1 more"),
        ({"raw_input_contents": [bytes(23), *RAW[1:]]}, "23 bytes and should have 24"),
        ({"outputs": [{"name": "z"}]}, "no output 'z'"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "twice"),
        ({"outputs": [placed({"name": "y"}, 4087, 10)]}, "outside region"),
        ({"outputs": [placed({"name": "y"}, -1, 10)]}, "outside region"),
        ({"outputs": [placed({"name": "y"}, 2**63, 10)]}, "outside region"),
        ({"outputs": [placed({"name": "y"}, 0, 12)]}, "must be the tensor's"),
        ({"inputs": [placed(A, 0, 24), MASK, N]}, "should have 4"),
        ({"parameters": {"timeout": 0}}, "timeout"),
        ({"parameters": {"timeout": 2**62}}, "timeout"),
        ({"parameters": {"priority": 0}}, "priority"),
        ({"parameters": {"priority": 4}}, "priority"),
        (placed({}, 1, 64), "multiple of 64"),
        (placed({}, 64, 0), "at least 1"),
        ({"parameters": {"shared_memory_region": "r"}}, "at least 1"),
        (placed({}, 4096, 64), "outside region"),
        (placed({}, -64, 64), "outside region"),
    ],
)
def test_what_is_wrong_is_named(regions: RegionTable, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        planned(regions, **changes)


def test_unknown_regions(regions: RegionTable) -> None:
    with pytest.raises(HonedError, match="there is no region 'other'"):
        planned(regions, inputs=[placed(A, 0, 24, "other"), MASK, N], raw_input_contents=RAW[1:])


def test_a_region_lives_as_long_as_it_is_held() -> None:
    table = RegionTable(4)
    with Region("r", 4096) as region:
        table.add(RegionParams(name="r", offset=None, byte_size=4096), region.descriptor)
    held = table.get("r")
    held.hold()
    (removed,) = table.remove("r")
    assert removed is held
    assert not held.release()
    assert held.release()


def test_a_plan_holds_nothing_of_one_request(regions: RegionTable) -> None:
    data, name = [memoryview(bytes(each)) for each in RAW], "an id"
    plan = planned(regions, id=name, raw_input_contents=data)
    outputs = [bytes(10), b""]
    layout = pack_layout([(5,), (0, 2)], [-1, -1])
    ran = InferenceResult(raw=tuple(outputs), layout=layout, input_ns=0, infer_ns=2000, output_ns=0)
    plan.check_data(data)
    answer = plan.answer(ran, name, ResponseInfo(1, 2, "gpu"))
    assert (answer["id"], answer["raw_output_contents"]) == (name, outputs)
    assert plan.call(data, "key").raw == tuple(data)
    del answer
    for each in (*data, name, outputs[0]):
        assert not held_by(plan, each)


def test_answers_of_other_shapes_and_engines_are_told_apart(regions: RegionTable) -> None:
    plan = planned(regions)

    def told(size: int, engine: str) -> tuple[list[int], str, str]:
        ran = InferenceResult(
            raw=(), layout=pack_layout([(size,), (0, 2)], [-1, -1]), input_ns=0, infer_ns=0, output_ns=0
        )
        answer = plan.answer(ran, "", ResponseInfo(1, 2, engine, f"device of {engine}"))
        parameters = answer["parameters"]
        return answer["outputs"][0]["shape"], parameters["engine"], parameters["device"]

    for size, engine in ((5, "gpu"), (6, "gpu"), (6, "cpu"), (5, "gpu")):
        assert told(size, engine) == ([size], engine, f"device of {engine}")


def held_by(plan: InferencePlan, sought: object) -> list[object]:
    """What holds an object, of all that a plan leads to."""
    seen, left, found = set(), [plan], []
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        inner = gc.get_referents(each)
        if any(one is sought for one in inner):
            found.append(each)
        left += inner
    return found
