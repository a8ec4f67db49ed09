"""What the records keep, hand out and refuse, and how their file is opened."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from honed.machine.profile import DeviceIdentity
from honed.protocol.params import Gain, TuningFigures
from honed.runtime.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied, Unavailable
from honed.tuner.records import sql
from honed.tuner.records.rows import (
    MeasurementSetup,
    NewCandidate,
    Outcome,
    RecordState,
    StoredOutcome,
    TaskRecord,
    Timing,
    Verdict,
    sha256,
)
from honed.tuner.records.store import InQuarantine, ProcessIdentity, Records

IDENTITY = DeviceIdentity(
    platform="ARM Platform", vendor="ARM", name="Mali-G610", driver_version="g13p0", kernel_driver="kbase"
)
SETUP = MeasurementSetup(device=IDENTITY, compiler="honed-1")
NEWER_DRIVER = MeasurementSetup(
    device=dataclasses.replace(IDENTITY, driver_version="g25p0"), compiler="honed-1"
)
NEWER_COMPILER = MeasurementSetup(device=IDENTITY, compiler="honed-2")
OTHER_DEVICE = MeasurementSetup(device=dataclasses.replace(IDENTITY, name="PoCL"), compiler="honed-1")


def trace(number: int) -> str:
    return json.dumps(["trace", number])


def right(milliseconds: float, ratio: float | None = None) -> Verdict:
    seconds = milliseconds / 1000
    timing = Timing(
        median_s=seconds, low_s=seconds * 0.9, high_s=seconds * 1.1, repeats=30, yardstick_ratio=ratio
    )
    return Verdict(outcome=Outcome.RIGHT, timing=timing)


WRONG = Verdict(outcome=Outcome.WRONG, reason="element 7 differs by 3.0")
FAULT = Verdict(outcome=Outcome.FAULT, reason="page fault", story="mali ...: Page fault")


def new(
    number: int, workload: str = "dense", setup: MeasurementSetup = SETUP, source: str | None = None
) -> NewCandidate:
    return NewCandidate(workload=workload, setup=setup, trace=trace(number), source_sha256=source)


def add(
    records: Records, number: int, verdict: Verdict, workload: str = "dense", setup: MeasurementSetup = SETUP
) -> int:
    candidate = records.begin(new(number, workload, setup))
    records.finish(candidate, verdict)
    return candidate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.db"


@pytest.fixture
def records(path: Path) -> Iterator[Records]:
    with Records.open(path, measured_by="board") as opened:
        yield opened


def test_a_candidate_from_begin_to_verdict(records: Records) -> None:
    number = records.begin(new(1))
    (running,) = records.history("dense", SETUP)
    assert (running.id, running.state, running.outcome, running.timing) == (
        number,
        RecordState.IN_FLIGHT,
        None,
        None,
    )
    assert records.best("dense", SETUP) is None
    verdict = right(2.5, 1.25)
    done = records.finish(number, verdict)
    assert (done.state, done.outcome, done.timing) == (RecordState.DONE, StoredOutcome.RIGHT, verdict.timing)
    assert (done.trace, done.trace_sha256) == (trace(1), sha256(trace(1)))
    assert (done.driver, done.compiler, done.measured_by) == ("g13p0", "honed-1", "board")
    assert done.finished_s is not None
    assert done.finished_s >= done.created_s > 1.7e9
    assert records.best("dense", SETUP) == done


def test_the_clock_of_a_timing_is_recorded(records: Records) -> None:
    for n, hz in enumerate((1_000_000_000, None)):
        records.finish(records.begin(new(n)), dataclasses.replace(right(2.5), clock_hz=hz))
    rows = records._connection.execute("SELECT clock_hz FROM candidates ORDER BY id").fetchall()
    assert rows == [(1_000_000_000,), (None,)]


def test_everything_is_there_after_opening_again(path: Path) -> None:
    with Records.open(path) as records:
        add(records, 1, right(2))
        add(records, 2, FAULT)
        before = records.history("dense", SETUP)
    with Records.open(path) as records:
        assert records.history("dense", SETUP) == before
        assert records.notes == ()


def test_the_best_is_the_fastest_right_one_at_fair_speed(records: Records) -> None:
    add(records, 1, right(3.0))
    add(records, 2, WRONG)
    fast = add(records, 3, right(4.0, 2.0))  # on a device slowed to half its speed: 2 ms
    add(records, 4, right(1.0), workload="softmax")
    add(records, 5, right(1.0), setup=OTHER_DEVICE)
    best = records.best("dense", SETUP)
    assert best is not None
    assert best.id == fast
    assert [c.workload for c in records.distil(SETUP)] == ["dense", "softmax"]


def test_quarantine_is_for_good(records: Records) -> None:
    number = records.begin(new(1, source="kernel"))
    records.finish(number, FAULT)
    for setup in (SETUP, NEWER_DRIVER, NEWER_COMPILER):
        assert not records.may_run(setup, "dense", sha256(trace(1)))
        with pytest.raises(InQuarantine, match="page fault"):
            records.begin(new(1, setup=setup))
    assert not records.may_run(SETUP, "other task", sha256(trace(2)), "kernel")
    assert records.may_run(OTHER_DEVICE, "dense", sha256(trace(1)), "kernel")
    assert records.may_run(SETUP, "softmax", sha256(trace(1)))
    (kept,) = records.list_quarantined(NEWER_DRIVER)
    assert (kept.reason, kept.story) == ("page fault", "mali ...: Page fault")


def test_what_was_not_built_waits_for_another_driver_or_other_source(records: Records) -> None:
    number = records.begin(new(1, source="kernel"))
    records.finish(number, Verdict(outcome=Outcome.BUILD, reason="not fully linked"))
    for again in (new(1), new(2, source="kernel"), new(2, source="kernel", setup=NEWER_COMPILER)):
        assert not records.may_run(again.setup, "dense", sha256(again.trace), again.source_sha256)
        with pytest.raises(InQuarantine, match=r"was not built \(not fully linked\)"):
            records.begin(again)
    for setup, source in ((NEWER_DRIVER, "kernel"), (OTHER_DEVICE, "kernel"), (NEWER_COMPILER, "other")):
        assert records.may_run(setup, "dense", sha256(trace(1)), source)
    assert records.list_quarantined(SETUP) == []
    (kept,) = records.history("dense", SETUP)
    assert (kept.state, kept.outcome) == (RecordState.DONE, StoredOutcome.NOT_BUILT)


def test_a_candidate_runs_once_at_a_time(records: Records, path: Path) -> None:
    records.begin(new(1))
    with Records.open(path) as other:
        assert not other.may_run(SETUP, "dense", sha256(trace(1)))
        with pytest.raises(AlreadyExists, match="measured already"):
            other.begin(new(1))
        other.begin(new(2))


def test_measuring_again_keeps_the_figures_until_there_are_new_ones(records: Records) -> None:
    first = add(records, 1, right(2))
    assert records.begin(new(1)) == first
    best = records.best("dense", SETUP)
    assert best is not None
    assert best.state is RecordState.IN_FLIGHT
    records.finish(first, WRONG)
    assert records.best("dense", SETUP) is None


def test_withdrawn_candidates_leave_no_trace(records: Records) -> None:
    number = records.begin(new(1))
    records.withdraw(number)
    assert records.history("dense", SETUP) == []
    measured = add(records, 2, right(2))
    before = records.history("dense", SETUP)
    records.withdraw(records.begin(new(2)))
    assert records.history("dense", SETUP) == before
    for gone in (number, measured, 999):
        with pytest.raises(NotFound, match="not in flight"):
            records.withdraw(gone)


def test_only_what_was_begun_can_be_finished(records: Records) -> None:
    number = add(records, 1, right(2))
    for unknown in (number, 999):
        with pytest.raises(NotFound, match="not in flight"):
            records.finish(unknown, right(1))
    best = records.best("dense", SETUP)
    assert best is not None
    assert best.timing == right(2).timing


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(outcome=Outcome.RIGHT),
        right(-1),
        right(float("nan")),
        right(float("inf")),
        right(1, 0.0),
        Verdict(outcome=Outcome.WRONG, timing=Timing(median_s=1, low_s=2, high_s=3, repeats=3)),
        Verdict(outcome=Outcome.WRONG, timing=Timing(median_s=1, low_s=1, high_s=1, repeats=0)),
    ],
)
def test_impossible_verdicts_are_refused(records: Records, verdict: Verdict) -> None:
    number = records.begin(new(1))
    with pytest.raises(InvalidArgument, match=r"cannot be|has no timing"):
        records.finish(number, verdict)
    assert records.history("dense", SETUP)[0].state is RecordState.IN_FLIGHT


def test_a_trace_must_be_json(records: Records) -> None:
    for text in ("no json", "[" * 100_000):
        with pytest.raises(InvalidArgument, match="JSON"):
            records.begin(dataclasses.replace(new(1), trace=text))


def test_other_drivers_and_compilers_are_set_aside(records: Records) -> None:
    for setup in (SETUP, NEWER_COMPILER):
        add(records, 1, right(3 if setup is SETUP else 1), setup=setup)
    add(records, 2, right(2))
    add(records, 3, FAULT)
    add(records, 4, WRONG)
    add(records, 1, right(9), workload="softmax")
    assert records.best("dense", NEWER_DRIVER) is None
    assert [c.trace for c in records.stale("dense", NEWER_DRIVER)] == [trace(1), trace(2)]
    assert [c.trace for c in records.stale("dense", NEWER_DRIVER, limit=1)] == [trace(1)]
    add(records, 1, right(5), setup=NEWER_DRIVER)  # measured again: no longer stale
    assert [c.trace for c in records.stale("dense", NEWER_DRIVER)] == [trace(2)]
    assert records.stale("dense", OTHER_DEVICE) == []
    assert [c.trace for c in records.history("dense", NEWER_DRIVER)] == [trace(1)]
    with pytest.raises(InQuarantine):
        records.begin(new(3, setup=NEWER_DRIVER))
    assert len(records.history("dense", SETUP)) == 4


def process_that_begins(path: Path, number: int) -> None:
    """A process that begins a candidate and is killed."""
    code = (
        "import os, signal, sys\nfrom tests.tuner.records.test_records import Records, new\n"
        "Records.open(sys.argv[1]).begin(new(int(sys.argv[2])))\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code, str(path), str(number)], cwd=root, timeout=60)
    assert done.returncode == -9


def test_what_ran_when_a_process_was_killed_is_quarantined(records: Records, path: Path) -> None:
    mine = records.begin(new(1))
    process_that_begins(path, 2)
    assert not records.may_run(SETUP, "dense", sha256(trace(2)))
    (left,) = records.quarantine_abandoned()
    assert (left.trace, left.state, left.outcome) == (
        trace(2),
        RecordState.QUARANTINED,
        StoredOutcome.ABANDONED,
    )
    assert left.reason == "was running when the tuner or the machine stopped"
    assert records.quarantine_abandoned() == []
    with pytest.raises(InQuarantine):
        records.begin(new(2))
    records.finish(mine, right(1))


def test_what_ran_when_the_machine_stopped_is_quarantined(path: Path) -> None:
    with Records.open(path) as records:
        records.begin(new(1))
    owner = dataclasses.replace(ProcessIdentity.this_process(), boot_id="0" * 8)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE candidates SET owner = ?", (str(owner),))
    connection.close()
    with Records.open(path) as records:
        assert [c.trace for c in records.quarantine_abandoned()] == [trace(1)]


def test_owners_are_told_apart() -> None:
    mine = ProcessIdentity.this_process()
    assert ProcessIdentity.parse(str(mine)) == mine
    assert not mine.has_ended()
    assert dataclasses.replace(mine, started=mine.started + 1).has_ended()  # the number was used again
    assert dataclasses.replace(mine, pid=2**22 + 1).has_ended()
    assert dataclasses.replace(mine, boot_id="another").has_ended()
    assert not dataclasses.replace(mine, pid_namespace=1, pid=2**22 + 1).has_ended()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    other = dataclasses.replace(mine, pid=child.pid, started=int(stat.rpartition(")")[2].split()[19]))
    assert not other.has_ended()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but still in the process table
    assert other.has_ended()
    child.communicate()
    assert other.has_ended()


def weights(records: Records, model: str) -> dict[str, int]:
    """How often a model runs each task per inference."""
    with closing(sqlite3.connect(records.path)) as database:
        return dict(database.execute("SELECT workload, weight FROM weights WHERE model = ?", (model,)))


def test_tasks_of_models(records: Records) -> None:
    dense = TaskRecord(workload="k1", name="dense", flops=1e8, bytes=1e6)
    softmax = TaskRecord(workload="k2", name="softmax", flops=1e5, bytes=1e6)
    records.put_model("lightglue", {softmax: 36, dense: 74})
    records.put_model("other", {dense: 1})
    assert weights(records, "lightglue") == {"k1": 74, "k2": 36}
    records.put_model("lightglue", {dense: 2})
    assert weights(records, "lightglue") == {"k1": 2}
    assert records.task("k2") == softmax
    assert records.task("k3") is None
    rival = dataclasses.replace(softmax, workload="k3")
    records.put_model("lightglue", {dense: 2}, [rival])
    assert weights(records, "lightglue") == {"k1": 2}
    assert records.task("k3") == rival
    assert weights(records, "unknown") == {}
    with pytest.raises(InvalidArgument):
        records.put_model("bad", {dataclasses.replace(dense, flops=float("nan")): 1})
    with pytest.raises(InvalidArgument):
        records.put_model("lightglue", {softmax: 0})
    assert weights(records, "lightglue") == {"k1": 2}


def test_versions_of_a_model(records: Records) -> None:
    first = records.add_version("m", "added", None)
    second = records.add_version("m", "3 kernels are faster", 0.0125)
    assert (first.version, second.version, records.add_version("n", "added", 1.0).version) == (1, 2, 1)
    assert records.versions("m") == [first, second]


def test_device_key_leaves_the_driver_version_out() -> None:
    assert SETUP.device_key == NEWER_DRIVER.device_key == NEWER_COMPILER.device_key
    for field in dataclasses.fields(DeviceIdentity):
        other = MeasurementSetup(
            device=dataclasses.replace(IDENTITY, **{field.name: "another"}), compiler="honed-1"
        )
        assert (other.device_key == SETUP.device_key) == (field.name == "driver_version")


# -- the file


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_word_of_another_version_is_told(path: Path, records: Records) -> None:
    records.finish(records.begin(new(1)), WRONG)
    assert [c.outcome for c in records.history("dense", SETUP)] == [StoredOutcome.WRONG]
    edit(path, "UPDATE candidates SET outcome = 'doubtful'")
    with pytest.raises(InvalidArgument, match=r"record 1 of task dense .*'doubtful' .* move their file away"):
        records.history("dense", SETUP)


def test_commits_are_durable(records: Records) -> None:
    assert records._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert records._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_newer_format_is_refused_and_left_alone(path: Path) -> None:
    Records.open(path).close()
    edit(path, "PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(InvalidArgument, match=f"format 99 and this honed knows {len(sql.MIGRATIONS)}"):
        Records.open(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    edit(path, "CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(InvalidArgument, match="another program's"):
        Records.open(path)
    assert path.read_bytes() == before


def test_an_older_format_is_brought_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = len(sql.MIGRATIONS)
    with Records.open(path) as records:
        add(records, 1, right(1))
    monkeypatch.setattr(
        sql, "MIGRATIONS", (*sql.MIGRATIONS, ("ALTER TABLE tasks ADD COLUMN note TEXT", "SELECT 1"))
    )
    for _ in range(2):
        with Records.open(path) as records:
            assert records._connection.execute("PRAGMA user_version").fetchone() == (formats + 1,)
            assert records.best("dense", SETUP) is not None


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records.open(path).close()
    with monkeypatch.context() as patch:
        patch.setattr(sql, "MIGRATIONS", (*sql.MIGRATIONS, ("CREATE TABLE extra (x)", "no SQL")))
        with pytest.raises(InvalidArgument):
            Records.open(path)
    with Records.open(path) as records:
        formats = records._connection.execute("PRAGMA user_version").fetchone()
        assert formats == (len(sql.MIGRATIONS),)
        tables = records._connection.execute("SELECT name FROM sqlite_schema").fetchall()
        assert ("extra",) not in tables


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "page":
        data[4096:8192] = b"\xa5" * 4096
    elif how == "cut":
        del data[len(data) // 2 :]
    elif how == "text":
        data = bytearray(b"these are no records\n" * 1000)
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["page", "cut", "text"])
def test_a_damaged_file_is_set_aside(path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    with Records.open(path) as records:
        for i in range(50):
            add(records, i, right(1 + i))
    damage(path, how)
    kept = path.read_bytes()
    with caplog.at_level(logging.WARNING), Records.open(path) as records:
        (note,) = records.notes
        assert "were damaged" in note
        assert "begin anew" in note
        assert note in caplog.text
        aside = Path(note.rpartition(" ")[2])
        assert aside.read_bytes() == kept
        assert records.history("dense", SETUP) == []
        add(records, 1, right(1))
    with Records.open(path) as records:
        assert records.notes == ()
        assert records.best("dense", SETUP) is not None


def test_two_damaged_files_in_one_second_are_both_kept(path: Path) -> None:
    for text in (b"first" * 1000, b"second" * 1000, b"third" * 1000):
        path.write_bytes(text)
        Records.open(path).close()
    kept = {file.read_bytes()[:5] for file in path.parent.glob("records.db.damaged-*")}
    assert kept == {b"first", b"secon", b"third"}


def test_a_damaged_file_in_use_is_not_taken_away(path: Path) -> None:
    with Records.open(path) as records:
        add(records, 1, right(1))
        records._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sound = path.read_bytes()
        damage(path, "page")
        with pytest.raises(Unavailable, match="another process has them open"):
            Records.open(path)
        assert path.exists()
        path.write_bytes(sound)


def test_a_missing_folder_and_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(PermissionDenied, match="cannot be opened"):
        Records.open(tmp_path / "none" / "records.db")
    (tmp_path / "records.db").mkdir()
    with pytest.raises((PermissionDenied, Unavailable), match="cannot be"):
        Records.open(tmp_path / "records.db")


def test_a_busy_database_says_so(path: Path) -> None:
    with Records.open(path) as one, Records.open(path, busy_s=0.05) as two:
        one._connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="written by another process"):
            two.begin(new(1))
        one._connection.execute("COMMIT")
        two.begin(new(1))


def test_closing_gives_everything_back(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    records = Records.open(path)
    records.close()
    records.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not Path(f"{path}-wal").exists()


def test_many_candidates_are_found_quickly(path: Path) -> None:
    """Every query of a trial goes by an index: none reads the whole table."""
    with Records.open(path) as records:
        add(records, 1, right(1))
        values: dict[str, Any] = dict.fromkeys(
            ("device", "workload", "driver", "compiler", "trace_sha256", "source_sha256", "owner", "id"), ""
        )
        for query in (sql.BANNED, sql.RUNNING, sql.BEST, sql.BY_ID, sql.OWNERS):
            plan = records._connection.execute(f"EXPLAIN QUERY PLAN {query}", values).fetchall()
            scans = [row[3] for row in plan if row[3].startswith("SCAN") and "INDEX" not in row[3]]
            assert scans == [], query


def test_figures_of_all_that_was_tried(records: Records) -> None:
    assert records.figures() == TuningFigures(trials={}, faults=0, gains={})
    add(records, 1, right(2.0))
    add(records, 2, right(1.0), "another")
    add(records, 3, FAULT)
    records.begin(new(4))
    for model, seconds in (("m", 0.9), ("n", 0.5), ("m", 0.6), ("m", 0.3)):
        records.add_progress(model, 1, seconds)
    told = records.figures()
    assert told.trials == {"faulted": 1, "right": 2}
    assert told.faults == 1
    assert told.gains == {
        "m": Gain(before_seconds=0.9, now_seconds=0.3),
        "n": Gain(before_seconds=0.5, now_seconds=0.5),
    }
