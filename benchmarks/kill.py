"""kill -9 at random moments of real tuning runs over one database of records.

    python -m benchmarks.kill [-n 100] [--seed 0]

Kills the tuner, its searching child or its measuring child, whichever is drawn, at a random moment of a run,
and checks after each: the database passes its integrity check, what events had reported is in it, what was in
flight is never run again, and the next run goes on from there. Prints a summary; exit status 1 where a check
failed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.tuner import running
from tests.tuner.running import MEASURING, SEARCHING, Tuning

from honed.machine.peaks import survey

VICTIMS = {"tuner": "", "searching child": SEARCHING, "measuring child": MEASURING}
_TRIALS = 5  # Trials of a run that is not killed
_RUNS = 4  # Number of runs over the same tasks
_DEADLINE = 120.0


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate as the database has it."""

    state: str
    outcome: str | None
    reason: str
    finished_s: float | None


@dataclass
class Story:
    """The counts and failed checks of all runs."""

    victims: Counter[str] = field(default_factory=Counter)
    missed: int = 0  # The run had ended, or had no such child at that moment
    reported: int = 0  # Trials
    in_flight: int = 0  # Candidates found so after a kill
    went_on: int = 0  # Runs that ended well although a child was killed
    ended_early: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def main() -> int:
    """Kill runs at random moments, check the records, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=100, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        story = kill_often(Path(folder), options.n, random.Random(options.seed), list(VICTIMS))
    print(f"{story.victims.total()} kills in {time.monotonic() - began:.0f} s: {dict(story.victims)}")
    print(f"kills that hit nothing, as the child was not there at that moment: {story.missed}")
    print(f"trials reported: {story.reported}, all of them kept" if not story.wrong else "see below")
    print(f"candidates in flight at a kill, quarantined by the next run: {story.in_flight}")
    print(f"runs that went on to their end without the child that was killed: {story.went_on}")
    if story.ended_early:
        print(f"runs that ended with an error: {dict(story.ended_early)}")
    print(f"failed checks: {len(story.wrong)}")
    for wrong in story.wrong:
        print(f"  {wrong}")
    return 1 if story.wrong else 0


def kill_often(folder: Path, kills: int, pick: random.Random, victims: list[str]) -> Story:
    """Make `kills` kills of processes drawn from `victims`, then one run without."""
    model, records, cache = running.write_model(folder / "m.onnx"), folder / "r.sqlite", folder / "cache"
    survey(None, cache)
    story = Story()
    began = time.monotonic()
    with Tuning(model, records, cache, f"--trials={_TRIALS}") as run:
        run.finish()
    whole = time.monotonic() - began  # Within which a kill comes
    before = _check(run, records, {}, story, "the first run, in peace")
    while story.victims.total() < kills:
        victim, moment = pick.choice(victims), pick.uniform(0.02, 1.0) * whole
        # Change the size now and then, as tasks at their roofline are not tuned any more.
        number = (story.victims.total() + story.missed) // _RUNS
        model = running.write_model(folder / "m.onnx", running.ROWS + 8 * number)
        before = _killed_once(model, records, cache, victim, moment, story, before)
        if (done := story.victims.total()) % 10 == 0:
            print(f"{done} kills, {len(story.wrong)} failed checks", file=sys.stderr, flush=True)
    with Tuning(model, records, cache, f"--trials={_TRIALS}", "--seed=999") as run:
        last = run.finish()
    if last["event"] != "done" or (not last["trials"] and "tuned" not in {r["state"] for r in last["tasks"]}):
        story.wrong.append(f"the last run, in peace, ended with {last}")
    _check(run, records, before, story, "the last run")
    if any(row.state == "in-flight" for row in _rows(records).values()):
        story.wrong.append("a candidate is in flight after the last run")
    return story


def _killed_once(
    model: Path,
    records: Path,
    cache: Path,
    victim: str,
    moment: float,
    story: Story,
    before: dict[str, Row],
) -> dict[str, Row]:
    """Make one run in which `victim` is killed after `moment` seconds; return the candidates afterwards."""
    seed = story.victims.total() + story.missed
    with Tuning(model, records, cache, f"--trials={_TRIALS}", f"--seed={seed}") as run:
        reader = threading.Thread(target=lambda: list(run.reported()))
        reader.start()
        reader.join(moment)
        hit = _kill(run, victim)
        reader.join(_DEADLINE)
        if reader.is_alive():
            story.wrong.append(f"kill {seed}: the run hangs after its {victim} was killed at {moment:.1f} s")
            run.process.kill()
            reader.join()
    story.victims[victim] += hit
    story.missed += not hit
    what = f"kill {seed} ({victim} at {moment:.2f} s)"
    if hit and victim != "tuner":
        _went_on(run, story, what)
    return _check(run, records, before, story, what)


def _kill(run: Tuning, victim: str) -> bool:
    if run.process.poll() is not None:
        return False
    if victim == "tuner":
        run.process.send_signal(signal.SIGKILL)
        return True
    child = run.child(VICTIMS[victim])
    with suppress(psutil.Error):
        if child is not None:
            os.kill(child.pid, signal.SIGKILL)
            return True
    return False


def _went_on(run: Tuning, story: Story, what: str) -> None:
    """Check that a run whose child was killed ended by itself, and well."""
    last: dict[str, Any] = run.events[-1] if run.events else {}
    if last.get("event") == "done":
        story.went_on += 1
    else:
        story.ended_early[str(last)[:200]] += 1
        story.wrong.append(f"{what}: the run ended with {str(last)[:300]}")


def _check(run: Tuning, records: Path, before: dict[str, Row], story: Story, what: str) -> dict[str, Row]:
    """Check the database after a run; return its candidates by trace."""
    if not records.exists():
        return before
    for aside in records.parent.glob("*.damaged*"):
        story.wrong.append(f"{what}: the database was set aside as {aside.name}")
    now = _rows(records)
    reported = sum(event["event"] == "trial" for event in run.events)
    story.reported += reported
    finished = {t for t, row in now.items() if row.finished_s and row.outcome != "abandoned"}
    fresh = finished - {t for t, row in before.items() if row.finished_s}
    if len(fresh) < reported:
        story.wrong.append(f"{what}: {reported} trials were reported and {len(fresh)} are kept")
    for trace, row in before.items():
        after = now.get(trace)
        if row.state == "in-flight":
            story.in_flight += 1
            if after is None or (after.state != "in-flight" and after.outcome != "abandoned"):
                story.wrong.append(f"{what}: what was in flight is {after} now")
        elif after != row:
            story.wrong.append(f"{what}: {row} has become {after}")
    return now


def _rows(records: Path) -> dict[str, Row]:
    with closing(sqlite3.connect(records)) as database:
        (sound,) = database.execute("PRAGMA integrity_check").fetchone()
        assert sound == "ok", sound
        if not database.execute("SELECT 1 FROM sqlite_schema WHERE name = 'candidates'").fetchone():
            return {}
        query = "SELECT workload || trace_sha256, state, outcome, reason, finished_s FROM candidates"
        return {key: Row(*rest) for key, *rest in database.execute(query)}


if __name__ == "__main__":
    sys.exit(main())
