"""What travels in a farm: it comes as it went, and what is no row is refused by a sentence."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.farm import rows
from honed.protocol.errors import InvalidArgument
from honed.protocol.strict import to_plain
from honed.tuner.records.rows import Outcome, Timing, Verdict
from tests.tuner.liars import honest

FINITE = st.floats(min_value=1e-9, max_value=1e3)
TEXT = st.text(max_size=20)
LINES = st.builds(rows.LogLine, candidate=TEXT, device=st.none() | TEXT, monotonic_s=FINITE, text=TEXT)
TIMINGS = st.builds(
    Timing,
    median_s=FINITE,
    low_s=FINITE,
    high_s=FINITE,
    repeats=st.integers(1, 99),
    yardstick_ratio=st.none() | FINITE,
)
VERDICTS = st.builds(
    Verdict,
    outcome=st.sampled_from(Outcome),
    reason=TEXT,
    timing=st.none() | TIMINGS,
    yardstick_s=st.none() | FINITE,
    seconds=FINITE,
)
RULINGS = st.builds(
    rows.BoardVerdict,
    verdict=VERDICTS.map(to_plain),
    phases=st.dictionaries(TEXT, FINITE, max_size=3),
    faults=st.lists(LINES, max_size=3).map(tuple),
)
ANSWERS = (
    RULINGS
    | st.builds(rows.BoardReady, rate=FINITE)
    | st.builds(rows.BoardBusy, why=TEXT, seconds=FINITE, reload=st.booleans())
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | FINITE | TEXT | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=9,
)


@given(ANSWERS)
def test_answers_come_as_they_went(answer: rows.Answer) -> None:
    assert rows.answer(rows.pack(answer)) == answer


@given(VERDICTS)
def test_verdicts_come_as_they_went(verdict: Verdict) -> None:
    ruling = rows.BoardVerdict(verdict=to_plain(verdict), phases={}, faults=())
    found = rows.answer(rows.pack(ruling))
    assert isinstance(found, rows.BoardVerdict)
    assert rows.verdict_of(found) == verdict


@given(st.binary() | PLAIN.map(msgpack.packb) | PLAIN.map(lambda plain: msgpack.packb({"ruling": plain})))
def test_whatever_comes_is_a_row_or_refused(data: bytes) -> None:
    for kind in (rows.Greeting, rows.BoardMemory, rows.FarmTrial):
        with suppress(InvalidArgument):
            rows.unpack(kind, data)
    with suppress(InvalidArgument):
        rows.answer(data)


@given(st.dictionaries(TEXT, PLAIN, max_size=4))
def test_whatever_a_row_holds_is_read_or_refused(plain: dict[str, object]) -> None:
    with suppress(InvalidArgument):
        rows.verdict_of(rows.BoardVerdict(verdict=plain, phases={}, faults=()))
    with suppress(InvalidArgument):
        rows.candidate_of(rows.FarmTrial(search="", task="", candidate=plain, best=None))
    with pytest.raises(InvalidArgument):
        rows.workload_in(Path("/nowhere"), rows.BoardMemory(search="", workload=plain, files={}))


def test_a_task_and_its_candidates_travel_with_all_that_is_theirs(tmp_path: Path) -> None:
    workload = honest.scale(tmp_path / "scale", 64)
    one = honest.candidate(workload, honest.SCALE, groups=1)
    trial = rows.FarmTrial(search="s", task="t", candidate=rows.candidate_map(one), best=1e-3)
    assert rows.candidate_of(rows.unpack(rows.FarmTrial, rows.pack(trial))) == one
    memory = rows.unpack(rows.BoardMemory, rows.pack(rows.memory_of(workload, "s")))
    there = tmp_path / "there"
    there.mkdir()
    assert rows.workload_in(there, memory) == replace(workload, folder=there)
    for name in memory.files:
        assert (there / name).read_bytes() == (workload.folder / name).read_bytes()


@pytest.mark.parametrize("name", ["../0.0.npy", "/etc/passwd", "9.9.npy"])
def test_files_are_the_tasks_own_and_no_others(tmp_path: Path, name: str) -> None:
    memory = rows.memory_of(honest.scale(tmp_path / "scale", 64), "s")
    odd = replace(memory, files={**memory.files, name: b""})
    with pytest.raises(InvalidArgument, match="with others"):
        rows.workload_in(tmp_path, odd)


@pytest.mark.parametrize("sets", ["a few", None, [], 10**12])
def test_a_task_of_another_version_is_refused(tmp_path: Path, sets: object) -> None:
    memory = rows.memory_of(honest.scale(tmp_path / "scale", 64), "s")
    odd = replace(memory, workload={**memory.workload, "sets": sets})
    with pytest.raises(InvalidArgument, match="compare versions"):
        rows.workload_in(tmp_path, odd)
