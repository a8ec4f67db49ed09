"""How much models are used: what decays how, and that it outlives restarts, crashes and wrong clocks."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.observe.usage import (
    MAX_AWAY_HALF_LIVES,
    DecayedUsage,
    UsageLog,
    UsageSettings,
    away,
    decay,
    shares,
)
from honed.protocol.service import TimeSpent
from honed.protocol.values import ProfiledRow

HALF_LIFE = 100.0
DAY = 86_400.0
SETTINGS = UsageSettings()
AMOUNTS = st.floats(0, 1e6)
MOMENTS = st.floats(0, 1e5)
HALF_LIVES = st.floats(1.0, 1e7)


@given(AMOUNTS, MOMENTS, HALF_LIVES)
def test_half_is_left_after_a_half_life(amount: float, start: float, half_life: float) -> None:
    spent = DecayedUsage()
    spent.add(amount, start, half_life)
    assert spent.value(start, half_life) == amount
    assert spent.value(start + half_life, half_life) == pytest.approx(amount / 2)


@given(st.lists(st.tuples(MOMENTS, AMOUNTS), max_size=20), st.floats(0, 1e4), HALF_LIVES)
def test_a_sum_decays_as_its_parts_do(
    events: list[tuple[float, float]], later: float, half_life: float
) -> None:
    events.sort()
    spent = DecayedUsage()
    for moment, amount in events:
        spent.add(amount, moment, half_life)
    now = (events[-1][0] if events else 0.0) + later
    parts = math.fsum(amount * decay(now - moment, half_life) for moment, amount in events)
    assert spent.value(now, half_life) == pytest.approx(parts, rel=1e-9, abs=1e-9)


@given(AMOUNTS, st.lists(MOMENTS, min_size=1), HALF_LIVES)
def test_looking_never_makes_it_more(amount: float, moments: list[float], half_life: float) -> None:
    spent = DecayedUsage(amount, 0.0)
    before = amount
    for moment in moments:  # also back in time
        spent.settle(moment, half_life)
        assert 0 <= spent.value(moment, half_life) <= before
        before = spent.value(moment, half_life)


@given(AMOUNTS, AMOUNTS, st.floats(-1e12, 1e12), HALF_LIVES)
def test_no_clock_upsets_the_ranking(one: float, other: float, leap: float, half_life: float) -> None:
    left = decay(away(0.0, leap, half_life), half_life)
    assert 2.0**-MAX_AWAY_HALF_LIVES * 0.999 <= left <= 1.0
    assert (one * left < other * left) == (one < other) or one * left == other * left


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e9)))
def test_shares_make_a_whole(times: dict[str, float]) -> None:
    found = shares(times)
    assert not found if sum(times.values()) == 0 else sum(found.values()) == pytest.approx(1.0)
    assert all(0 <= share <= 1 for share in found.values())


class Clocks:
    def __init__(self) -> None:
        self.monotonic = 0.0
        self.wall = 1.7e9

    def pass_(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


def opened(folder: Path, clocks: Clocks, settings: UsageSettings = SETTINGS) -> UsageLog:
    path = folder / "usage.json"
    return UsageLog(path, settings, clock=lambda: clocks.monotonic, wall=lambda: clocks.wall)


def seconds(ledger: UsageLog) -> dict[str, float]:
    return {name: told.seconds for name, told in ledger.usage().items()}


def row(task: str, us: float) -> ProfiledRow:
    return ProfiledRow(
        name="",
        kind="",
        task=task,
        schedule="",
        count=1,
        us=us,
        share=0,
        gflops=None,
        gbs=None,
        peak_share=None,
    )


ROWS = [row("dense", 60.0), row("softmax", 20.0), row("dense", 10.0), row("", 10.0)]


def test_time_is_kept_by_model_and_task_over_a_restart(tmp_path: Path) -> None:
    clocks = Clocks()
    ledger = opened(tmp_path, clocks)
    ledger.count_seconds("a", 8.0)
    ledger.count_seconds("b", 1.0)
    ledger.record_profile("a", "version 2", ROWS)
    assert ledger.usage()["a"].tasks == pytest.approx({"dense": 5.6, "softmax": 1.6})
    asyncio.run(ledger.save())
    written = (tmp_path / "usage.json").stat().st_ino
    asyncio.run(ledger.save())
    assert (tmp_path / "usage.json").stat().st_ino == written, "nothing happened since"
    clocks.monotonic = 0.0  # another boot
    clocks.wall += 3 * DAY
    again = opened(tmp_path, clocks)
    assert seconds(again) == pytest.approx({"a": 4.0, "b": 0.5})
    assert again.usage()["a"].tasks == pytest.approx({"dense": 2.8, "softmax": 0.8})
    assert [told.profiled for told in again.usage().values()] == ["version 2", ""]
    again.forget("a")
    asyncio.run(again.save())
    assert set(seconds(opened(tmp_path, clocks))) == {"b"}


def test_a_file_from_before_versions_were_told_apart_is_read(tmp_path: Path) -> None:
    clocks = Clocks()
    model = {"seconds": 8.0, "shares": {"dense": 1.0}}
    saved = {"format": 1, "saved": clocks.wall, "models": {"a": model}}
    (tmp_path / "usage.json").write_text(json.dumps(saved))
    told = opened(tmp_path, clocks).usage()["a"]
    assert told == TimeSpent(seconds=8.0, tasks={"dense": 8.0}, profiled="")


def test_a_clock_that_starts_in_1970_loses_nothing(tmp_path: Path) -> None:
    clocks = Clocks()
    ledger = opened(tmp_path, clocks)
    ledger.count_seconds("a", 8.0)
    asyncio.run(ledger.save())
    right, clocks.wall = clocks.wall, 0.0
    ledger = opened(tmp_path, clocks)
    assert seconds(ledger) == {"a": 8.0}
    ledger.count_seconds("a", 1.0)
    asyncio.run(ledger.save())
    clocks.wall = right + 3 * DAY
    assert seconds(opened(tmp_path, clocks)) == pytest.approx({"a": 4.5})


def test_another_half_life_changes_nothing_at_once(tmp_path: Path) -> None:
    clocks = Clocks()
    ledger = opened(tmp_path, clocks)
    ledger.count_seconds("a", 8.0)
    clocks.pass_(3 * DAY)
    ledger.change(UsageSettings(half_life_days=1.0))
    assert seconds(ledger) == pytest.approx({"a": 4.0})
    clocks.pass_(1 * DAY)
    assert seconds(ledger) == pytest.approx({"a": 2.0})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\xff",
        "[]",
        "[" * 100_000,
        '{"format": 2, "saved": 0.0, "models": {}}',
        '{"format": 1, "saved": 0.0, "models": {"a": {"seconds": -1.0, "shares": {}}}}',
        '{"format": 1, "saved": 0.0, "models": {"a": {"seconds": NaN, "shares": {}}}}',
        '{"format": 1, "saved": 0.0, "models": {"a": {"seconds": "1", "shares": {}}}}',
    ],
)
def test_a_damaged_file_is_set_aside(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "usage.json").write_bytes(text.encode("latin-1"))
    ledger = opened(tmp_path, Clocks())
    assert seconds(ledger) == {}
    assert (tmp_path / "usage.json.damaged").read_bytes() == text.encode("latin-1")
    assert "usage.json.damaged" in caplog.text
    ledger.count_seconds("a", 1.0)
    asyncio.run(ledger.save())
    assert json.loads((tmp_path / "usage.json").read_text())["models"]["a"]["seconds"] == 1.0


def test_a_disk_that_takes_nothing_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    ledger = opened(folder, Clocks())
    folder.rmdir()
    for _ in range(3):
        ledger.count_seconds("a", 1.0)
        asyncio.run(ledger.save())
    assert caplog.text.count("cannot be saved") == 1
    folder.mkdir()
    asyncio.run(ledger.save())
    assert seconds(opened(folder, Clocks())) == {"a": 3.0}
