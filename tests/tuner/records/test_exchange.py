"""Export and import: the same records on the other side, and nothing false taken in."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from honed.runtime.errors import Unavailable
from honed.tuner.records import exchange as exchange_module
from honed.tuner.records.exchange import Choose, export_jsonl, import_jsonl
from honed.tuner.records.rows import Outcome, RecordState, StoredOutcome, TaskRecord
from honed.tuner.records.store import Records
from tests.tuner.records.test_records import (
    FAULT,
    IDENTITY,
    NEWER_DRIVER,
    OTHER_DEVICE,
    SETUP,
    WRONG,
    add,
    new,
    right,
    trace,
)

TASK = TaskRecord(workload="dense", name="dense_3", flops=1e8, bytes=1e6)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Records]:
    with Records.open(tmp_path / "source.db", measured_by="board A") as records:
        records.put_model("lightglue", {TASK: 36})
        add(records, 1, right(2.0, 1.1))
        add(records, 2, right(1.5))
        add(records, 3, WRONG)
        add(records, 4, FAULT)
        add(records, 5, right(1), workload="softmax")
        add(records, 6, right(1), setup=OTHER_DEVICE)
        records.begin(new(7))
        yield records


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Records]:
    with Records.open(tmp_path / "target.db", measured_by="board B") as records:
        yield records


def exported(records: Records, choose: Choose = Records.iterate_finished) -> bytes:
    file = io.BytesIO()
    count = export_jsonl(records, file, SETUP, choose)
    assert file.getvalue().count(b"\n") == count
    return file.getvalue()


def without_ids(records: Records) -> list[Any]:
    return [dataclasses.replace(c, id=0) for c in records.iterate_finished(SETUP)]


def test_all_of_a_setup_goes_over_unchanged(source: Records, target: Records) -> None:
    data = exported(source)
    done = import_jsonl(target, io.BytesIO(data), SETUP)
    assert (done.added, done.merged, done.refused) == (5, 0, ())
    assert without_ids(target) == without_ids(source)
    assert target.task("dense") == TASK
    best = target.best("dense", SETUP)
    assert best is not None
    assert (best.trace, best.measured_by) == (trace(2), "board A")
    assert exported(target) == data


def test_importing_twice_changes_nothing(source: Records, target: Records) -> None:
    data = exported(source)
    import_jsonl(target, io.BytesIO(data), SETUP)
    done = import_jsonl(target, io.BytesIO(data), SETUP)
    assert (done.added, done.merged, done.refused) == (0, 5, ())
    assert exported(target) == data


def test_the_best_only(source: Records) -> None:
    lines = [json.loads(line) for line in exported(source, Records.distil).splitlines()]
    assert [(line["workload"], line["trace"]) for line in lines] == [
        ("dense", trace(2)),
        ("softmax", trace(5)),
    ]


def test_own_figures_stay_and_quarantine_comes_along(source: Records, target: Records) -> None:
    add(target, 1, right(9.0))
    add(target, 4, right(0.1))
    done = import_jsonl(target, io.BytesIO(exported(source)), SETUP)
    assert (done.added, done.merged) == (3, 2)
    by_trace = {c.trace: c for c in target.history("dense", SETUP)}
    assert by_trace[trace(1)].timing == right(9.0).timing
    assert (by_trace[trace(1)].measured_by, by_trace[trace(4)].state) == ("board B", RecordState.QUARANTINED)


def test_records_of_another_driver_come_as_stale_ones(source: Records, target: Records) -> None:
    import_jsonl(target, io.BytesIO(exported(source)), NEWER_DRIVER)
    assert target.best("dense", NEWER_DRIVER) is None
    assert [c.trace for c in target.stale("dense", NEWER_DRIVER)] == [trace(2), trace(1)]


def test_another_device_is_refused(source: Records, target: Records) -> None:
    done = import_jsonl(target, io.BytesIO(exported(source)), OTHER_DEVICE)
    assert (done.added, done.merged) == (0, 0)
    assert len(done.refused) == 5
    assert done.refused[0] == (
        "line 1: it was measured on Mali-G610 (ARM Platform), and this device is PoCL (ARM Platform)"
    )


def changed(line: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(line), **fields}).encode()


BAD_TIMING = {"median_s": 1.0, "low_s": 2.0, "high_s": 3.0, "repeats": 3, "yardstick_ratio": None}
BAD_CHANGES: list[dict[str, Any]] = [
    {"honed_records": 2},
    {"honed_records": "1"},
    {"surprise": 1},
    {"workload": None},
    {"trace": "no json"},
    {"trace": ["not", "text"]},
    {"trace": "[" * 100_000},
    {"state": "in-flight"},
    {"outcome": "excellent"},
    {"timing": None},
    {"timing": BAD_TIMING},
    {"timing": {**BAD_TIMING, "median_s": 2.0, "repeats": 2**40}},
    {"timing": {**BAD_TIMING, "median_s": 2.0, "low_s": -2.0}},
    {"state": "quarantined"},
    {"flops": -1.0},
    {"created_s": 1e999},
    {"reason": "half \ud800"},
    {"device": {"name": "x"}},
    {"device": {**dataclasses.asdict(IDENTITY), "name": "\ud800"}},
    {"compiler": "\ud800"},
]


@pytest.mark.parametrize("fields", BAD_CHANGES, ids=lambda fields: str(fields)[:40])
def test_malformed_lines_are_refused_with_their_number(
    source: Records, target: Records, fields: dict[str, Any]
) -> None:
    good = exported(source).splitlines()
    lines = [good[0], b"", changed(good[1], **fields), good[2]]
    done = import_jsonl(target, io.BytesIO(b"\n".join(lines)), SETUP)
    assert done.added == 2
    assert len(done.refused) == 1
    assert done.refused[0].startswith("line 3: ")


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"NaN", b'{"a": NaN}', b"1" * 5000]
)
def test_what_is_no_record_is_refused(target: Records, line: bytes) -> None:
    done = import_jsonl(target, io.BytesIO(line), SETUP)
    assert (done.added, len(done.refused)) == (0, 1)


def test_a_line_without_end_is_refused_and_the_next_is_read(
    source: Records, target: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = exported(source).splitlines()
    monkeypatch.setattr(exchange_module, "MAX_LINE_BYTES", 2000)
    done = import_jsonl(target, io.BytesIO(b"x" * 2000 + b"y" * 5500 + b"\n" + good[0]), SETUP)
    assert done.added == 1
    assert len(done.refused) == 1


def test_a_file_that_breaks_off_changes_nothing(source: Records, target: Records) -> None:
    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            if not line:
                raise OSError(5, "Input/output error")
            return line

    with pytest.raises(Unavailable, match="cannot be read"):
        import_jsonl(target, Broken(exported(source)), SETUP)
    assert list(target.iterate_finished(SETUP)) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_lines_damaged_anywhere(source: Records, target: Records, data: st.DataObject) -> None:
    text = bytearray(exported(source))
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    import_jsonl(target, io.BytesIO(bytes(text)), SETUP)
    for candidate in target.iterate_finished(SETUP):
        assert candidate.outcome is not StoredOutcome.RIGHT or candidate.timing is not None
    exported(target)


def test_the_outcomes_of_a_line_are_all_there_are() -> None:
    hints = get_type_hints(exchange_module.Line)
    assert set(get_args(hints["outcome"])) == {outcome.value for outcome in StoredOutcome}


def test_every_outcome_is_stored_and_what_may_harm_is_not_run_again() -> None:
    assert {outcome.stored_as for outcome in Outcome} == set(StoredOutcome) - {StoredOutcome.ABANDONED}
    harmful = {Outcome.DEADLINE, Outcome.FAULT, Outcome.OUT_OF_BOUNDS, Outcome.CRASH}
    assert {outcome for outcome in Outcome if outcome.quarantines} == harmful
    assert [Outcome(outcome.value) for outcome in Outcome] == list(Outcome)
