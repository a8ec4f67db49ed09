"""Planted records of a hub, in a real search on PoCL: they cost trials, and their source its credit."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tvm")

import honed.tuner
from honed.hub import layout
from honed.machine.devices import Device
from honed.tuner.records.exchange import export_jsonl, import_jsonl
from honed.tuner.records.store import Records
from tests.tuner.liars import searched

pytestmark = [pytest.mark.tvm, pytest.mark.opencl, pytest.mark.slow]
NO_SCHEDULES = ("[]", '{"a": 1}', '[[["GetSBlock", [], ["nobody", "main"], ["b0"]]], []]', "[[[[[[1]]]]], 7]")


def test_planted_records_cost_trials_and_no_answers(device: Device, cache_dir: Path, tmp_path: Path) -> None:
    func = searched.functions()["softmax"]

    def tuned(name: str, trials: int) -> tuple[honed.tuner.TunedFunction, list[dict[str, Any]]]:
        told: list[dict[str, Any]] = []
        found = honed.tuner.tune_function(
            func,
            device=device.spec,
            trials=trials,
            records=tmp_path / name,
            cache_dir=cache_dir,
            emit=told.append,
        )
        return found, told

    tuned("honest", 3)
    with Records.open(tmp_path / "honest") as records:
        (setup,) = records.setups()
        file = io.BytesIO()
        export_jsonl(records, file, setup)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    good = min((line for line in lines if line["timing"]), key=lambda line: line["timing"]["median_s"])
    at_once = good["timing"] | {"median_s": 1e-9, "low_s": 1e-9, "high_s": 1e-9}
    planted = [good | {"timing": at_once}, *(good | {"trace": t, "timing": at_once} for t in NO_SCHEDULES)]
    given = b"".join(
        layout.hint_of(json.dumps(layout.shareable_part(line)).encode(), name)[0]
        for name, theirs in (("liar", planted), ("friend", [good]))
        for line in theirs
    )
    with Records.open(tmp_path / "here") as records:
        assert import_jsonl(records, io.BytesIO(given), setup).refused == ()
    found, told = tuned("here", 2)
    assert 1e-8 < found.best_s <= found.default_s, "a time that was measured here"
    assert [event for event in told if event["event"] == "condemned"] == []
    with Records.open(tmp_path / "here") as records:
        sources = records.hint_sources()
        (workload,) = {line["workload"] for line in lines}
        assert records.hints(workload, setup, 100) == []
    assert sources["liar"].aside
    assert not sources["friend"].aside
