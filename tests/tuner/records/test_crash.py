"""Killed processes, torn writes, two writers and a full disk: nothing that was reported is lost."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.runtime.errors import ResourceExhausted
from honed.tuner.records.rows import NewCandidate, RecordState, sha256
from honed.tuner.records.store import Records
from tests.tuner.records.test_records import SETUP, add, new, right, trace

ROOT = Path(__file__).parents[3]
KILLS = 100


def script(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


# Kills a tuner again and again: one fresh process forks them, since pytest's own has threads.
KILLER = """
import os, random, signal, sys, time
from tests.tuner.records.test_records import Records, SETUP, RecordState, new, right, trace
path, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
pick = random.Random(seed)

def tune(number, report):
    records = Records.open(path)
    records.quarantine_abandoned()
    os.write(report, b"open\\n")
    while True:
        number += 1
        candidate = records.begin(new(number))
        os.write(report, b"begun %d\\n" % number)
        records.finish(candidate, right(1 + number))
        os.write(report, b"done %d\\n" % number)
        if number % 7 == 0:
            records.add_version("m", str(number), number / 1000)
            os.write(report, b"version %d\\n" % number)

done, versions, banned, last, in_flight = set(), set(), set(), 0, 0
for kill in range(kills):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            tune(last, writer)
        finally:
            os._exit(1)
    os.close(writer)
    reports = os.fdopen(reader, "rb")
    lines = [reports.readline() for _ in range(pick.randrange(9))]
    time.sleep(pick.random() * 0.01)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    begun = set()
    for line in [*lines, *reports.readlines()]:
        word, *number = line.split()
        if number:
            {b"begun": begun, b"done": done, b"version": versions}[word].add(int(number[0]))
    with Records.open(path) as records:
        assert records.notes == (), records.notes
        assert records._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        left = {int(c.trace[10:-1]) for c in records.quarantine_abandoned()}
        assert len(left) <= 1, left
        kept = {int(c.trace[10:-1]): c for c in records.history("dense", SETUP)}
        assert {n for n, c in kept.items() if c.state is RecordState.DONE} >= done
        assert all(kept[n].timing == right(1 + n).timing for n in done)
        assert begun <= set(kept), begun - set(kept)
        banned |= left
        in_flight += bool(left)
        assert {n for n, c in kept.items() if c.state is RecordState.QUARANTINED} == banned
        assert not banned & done
        assert versions <= {int(v.why) for v in records.versions("m")}
        last = max(kept, default=0)
print(len(done), in_flight)
"""


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    with script(KILLER, tmp_path / "records.db", KILLS, seed) as killer:
        output, _ = killer.communicate(timeout=240)
    assert killer.returncode == 0, f"seed {seed}"
    done, in_flight = map(int, output.split())
    assert done > KILLS, "too little was going on for this to say anything"
    assert in_flight > KILLS // 10


WRITER = """
import sys
from tests.tuner.records.test_records import Records, new, right
with Records.open(sys.argv[1]) as records:
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(60):
        records.finish(records.begin(new(int(sys.argv[2]) + i)), right(1 + i))
"""


def test_two_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with script(WRITER, path, 1000) as one, script(WRITER, path, 2000) as two:
        for writer in (one, two):
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in (one, two):
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        assert [writer.wait(timeout=120) for writer in (one, two)] == [0, 0]
    with Records.open(path) as records:
        kept = records.history("dense", SETUP)
        assert {c.trace for c in kept} == {trace(base + i) for base in (1000, 2000) for i in range(60)}
        assert {c.state for c in kept} == {RecordState.DONE}


OPENER = "import sys\nfrom tests.tuner.records.test_records import Records\nRecords.open(sys.argv[1]).close()"


def test_several_processes_may_create_it_at_once(tmp_path: Path) -> None:
    openers = [script(OPENER, tmp_path / "records.db") for _ in range(4)]
    for opener in openers:
        with opener:
            assert opener.wait(timeout=60) == 0
    assert list(tmp_path.glob("*.damaged*")) == []


def test_torn_writes_lose_only_what_was_not_reported(tmp_path: Path) -> None:
    """A write-ahead log cut or garbled anywhere gives the candidates of an earlier moment, whole."""
    path, log = tmp_path / "records.db", Path(f"{tmp_path}/records.db-wal")
    ends: list[int] = []
    with Records.open(path) as records:
        records._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for i in range(20):
            add(records, i, right(1 + i))
            ends.append(log.stat().st_size)
        whole, base = log.read_bytes(), path.read_bytes()
    pick = random.Random(7)
    for attempt in range(60):
        cut = pick.randrange(len(whole))
        tail = pick.randbytes(pick.randrange(9000)) if attempt % 2 else b""
        copy = tmp_path / f"torn{attempt}.db"
        copy.write_bytes(base)
        Path(f"{copy}-wal").write_bytes(whole[:cut] + tail)
        with Records.open(copy) as records:
            assert records.notes == ()
            kept = records.history("dense", SETUP)
            done = [c for c in kept if c.state is RecordState.DONE]
            assert [c.trace for c in done] == [trace(i) for i in range(len(done))]
            assert len(done) >= sum(end <= cut for end in ends)
            assert len(kept) - len(done) <= 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("needs root to mount a small tmpfs")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def big(number: int) -> NewCandidate:
    return NewCandidate(workload="dense", setup=SETUP, trace=f'["{"x" * 20_000}", {number}]')


def tune_on(records: Records, candidate: int, reported: list[str]) -> None:
    for i in range(1, 200):
        records.finish(candidate, right(i))
        reported.append(big(i - 1).trace)
        candidate = records.begin(big(i))


def begin_on(records: Records) -> None:
    for i in range(2, 200):
        records.begin(big(i))


def fill(path: Path) -> None:
    """Take all the room there is."""
    room = os.statvfs(path.parent)
    with path.open("wb", buffering=0) as file:
        file.write(b"\0" * (room.f_bavail * room.f_frsize))


def test_a_full_disk_loses_nothing_that_was_reported(small_disk: Path) -> None:
    path = small_disk / "records.db"
    reported: list[str] = []
    with Records.open(path) as records:
        candidate = records.begin(big(0))
        with pytest.raises(ResourceExhausted, match="free some disk space"):
            tune_on(records, candidate, reported)
        assert len(reported) > 5
        assert [c.trace for c in records.history("dense", SETUP) if c.state is RecordState.DONE] == reported
    with Records.open(path) as records:
        assert records.notes == ()
        kept = records.history("dense", SETUP)
        assert [c.trace for c in kept if c.state is RecordState.DONE] == reported


def test_after_a_full_disk_it_goes_on(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with Records.open(small_disk / "records.db") as records:
        running = records.begin(new(1))
        fill(ballast)
        with pytest.raises(ResourceExhausted):
            begin_on(records)
        in_flight = len(records.history("dense", SETUP))
        ballast.unlink()
        records.finish(running, right(1))
        number = records.begin(big(1000))
        records.finish(number, right(2))
        assert len(records.history("dense", SETUP)) == in_flight + 1
    with Records.open(small_disk / "records.db") as records:
        assert not records.may_run(SETUP, "dense", sha256(big(2).trace)) or in_flight == 1
        assert records.best("dense", SETUP) is not None


def test_no_room_to_begin_with(small_disk: Path) -> None:
    fill(small_disk / "ballast")
    with pytest.raises(ResourceExhausted, match=r"room|space"):
        Records.open(small_disk / "records.db")


def test_an_unclean_end_is_checked_thoroughly(tmp_path: Path) -> None:
    """Damage that only the full check finds, an index that lacks a row, is found after a crash."""
    path = tmp_path / "records.db"
    with Records.open(path) as records:
        add(records, 1, right(1))
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        change = "SET sql = replace(sql, 'in-flight', 'done') WHERE name = 'candidates_running'"
        connection.execute(f"UPDATE sqlite_schema {change}")
        connection.execute("PRAGMA writable_schema = OFF")
    connection.close()
    data = path.read_bytes()
    with Records.open(path) as records:
        assert records.notes == ()
        add(records, 2, right(1))
        log = Path(f"{path}-wal").read_bytes()
    path.write_bytes(data)
    Path(f"{path}-wal").write_bytes(log)
    with Records.open(path) as records:
        assert "missing from index candidates_running" in records.notes[0]
