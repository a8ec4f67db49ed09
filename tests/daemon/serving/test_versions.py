"""Which version is served, which can be gone back to, and what is never published again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.serving.trial import PairedTrialResult
from honed.daemon.store.files import StoredFile
from honed.daemon.store.store import begin, new_version
from honed.daemon.store.versions import (
    GAIN,
    KEPT,
    LOSS,
    REMEMBERED,
    VersionHistory,
    check_new,
    go_back,
    settle,
    succeed,
    trial_over,
)
from honed.protocol.results import ModelVersion
from honed.runtime.engines import PairedTiming
from honed.runtime.errors import AlreadyExists, NotFound


def file(number: int) -> StoredFile:
    return StoredFile(name="m.honed", sha256=f"{number:064x}", nbytes=number)


def version(number: int, settled: bool = True) -> ModelVersion:
    return new_version(file(number), number, schedules=f"s{number}", why="tuned", now=number, settled=settled)


def grown(count: int) -> VersionHistory:
    history = begin(file(1), schedules="s1", why="added", now=1.0)
    for number in range(2, count + 1):
        history = succeed(history, version(number), float(number), keep=True)
    return history


def test_a_successor_is_served_and_the_ones_before_are_kept() -> None:
    history = grown(5)
    assert history.current.number == 5
    assert [v.number for v in history.versions if v.kept] == [3, 4, 5]
    assert history.deployments[-2].until == 5.0
    assert history.deployments[-2].end == "version 5 followed"


def test_another_model_leaves_nothing_to_go_back_to() -> None:
    history = succeed(grown(2), version(3), 3.0, keep=False)
    assert history.earlier() is None
    assert [v.number for v in history.versions if v.kept] == [3]


def test_going_back_quarantines_what_was_left() -> None:
    history = go_back(grown(3), 2, "it is slower", "it is slower", 4.0)
    assert history.current.number == 2
    assert history.get(3).quarantine == "it is slower"
    assert not history.get(3).kept
    with pytest.raises(AlreadyExists, match="in quarantine since version 3: it is slower"):
        check_new(history, "s3")
    check_new(history, "s4")


def test_what_was_served_last_is_gone_back_to_first() -> None:
    history = go_back(grown(3), 1, "by hand", "", 4.0)
    earlier = history.earlier()
    assert earlier is not None
    assert earlier.number == 3


def test_unproven_versions_are_not_gone_back_to() -> None:
    history = succeed(grown(1), version(2, settled=False), 2.0, keep=True)
    history = succeed(history, version(3), 3.0, keep=True)
    earlier = history.earlier()
    assert earlier is not None
    assert earlier.number == 1
    assert settle(succeed(grown(1), version(2, settled=False), 2.0, keep=True)).current.settled


def test_what_is_served_or_pinned_over_is_not_published() -> None:
    with pytest.raises(AlreadyExists, match="served already"):
        check_new(grown(2), "s2")
    import dataclasses

    with pytest.raises(AlreadyExists, match="pinned"):
        check_new(dataclasses.replace(grown(2), pinned=True), "s9")


def test_unknown_numbers_are_named() -> None:
    with pytest.raises(NotFound, match="no version 9"):
        grown(2).get(9)


@given(st.lists(st.tuples(st.sampled_from(["new", "bad", "back", "other"]), st.booleans()), max_size=300))
def test_there_is_always_one_served_version_with_its_file(steps: list[tuple[str, bool]]) -> None:
    history = grown(1)
    for now, (step, settled) in enumerate(steps, 2):
        earlier = history.earlier()
        if step == "new":
            history = succeed(history, version(history.next_number, settled), now, keep=True)
        elif step == "other":
            history = succeed(history, version(history.next_number, True), now, keep=False)
        elif earlier is not None:
            story = "bad" if step == "bad" else ""
            history = settle(go_back(history, earlier.number, "why", story, now))
        current = history.current
        assert current.kept
        assert [s.until is None for s in history.deployments].count(True) == 1
        assert sum(v.kept for v in history.versions) <= KEPT
        assert len(history.deployments) <= REMEMBERED
        assert len({v.number for v in history.versions}) == len(history.versions)
        assert history.next_number > current.number
        assert all(history.get(s.number) for s in history.deployments)


def compared(old: float, new: float, wrong: str = "", allowance: float = 1 / GAIN) -> PairedTrialResult:
    return PairedTrialResult(runs=PairedTiming(allowance, pairs=[(old / 1e3, new / 1e3)] * 3), wrong=wrong)


def test_a_comparison_takes_the_faster_and_right_one() -> None:
    assert compared(2.0, 1.0).objection == ""
    assert "not faster" in compared(1.0, 0.99).objection
    assert "differ" in compared(2.0, 1.0, "output 'y' differs").objection


def test_runs_that_other_work_made_longer_do_not_count() -> None:
    for allowance in (1 / GAIN, LOSS):
        runs = PairedTiming(allowance)
        for pair in zip((10, 10, 11, 10, 10, 11, 10), (8, 20, 8, 21, 8, 19, 22), strict=True):
            runs.add(*pair)
        assert PairedTrialResult(runs=runs, wrong="").objection == ""


def test_in_service_noise_does_not_send_it_back() -> None:
    assert compared(1.0, 1.03, allowance=LOSS).objection == ""
    assert "slower" in compared(1.0, 1.2, allowance=LOSS).objection


def test_a_trial_ends_by_requests_or_by_time_with_one() -> None:
    assert [trial_over(20, 0.0), trial_over(0, 999.0), trial_over(1, 60.0), trial_over(19, 59.0)] == [
        True,
        False,
        True,
        False,
    ]
