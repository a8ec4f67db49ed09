"""Two runners in turns, by times that are made up."""

from __future__ import annotations

import asyncio

import pytest

from honed.daemon.serving import trial
from honed.daemon.serving.trial import Runner, paired_trial
from honed.daemon.worker.calls import ComparisonRun
from honed.machine.processors import OtherLoadMeter
from honed.runtime.engines import MIN_PAIRS


def runner(turns: list[tuple[str, int]], name: str, ran: ComparisonRun) -> Runner:
    async def run(turn: int) -> ComparisonRun:
        turns.append((name, turn))
        return ran

    return run


def runners(first: ComparisonRun, second: ComparisonRun) -> tuple[list[tuple[str, int]], Runner, Runner]:
    turns: list[tuple[str, int]] = []
    return turns, runner(turns, "a", first), runner(turns, "b", second)


def test_they_take_turns_until_it_is_sure() -> None:
    turns, first, second = runners(ComparisonRun(ns=2000), ComparisonRun(ns=1000))
    result = asyncio.run(paired_trial(first, second, 1.0))
    assert result.runs.within_allowance
    assert (result.first_us, result.second_us, result.wrong, result.others_percent) == (2.0, 1.0, "", None)
    assert turns[:4] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert len(turns) == 2 * len(result.runs.pairs) >= 2 * MIN_PAIRS


def test_each_set_of_inputs_runs_and_the_first_wrong_answer_ends_it() -> None:
    turns, first, second = runners(ComparisonRun(ns=2000, sets=40), ComparisonRun(ns=1000, sets=40))
    asyncio.run(paired_trial(first, second, 1.0))
    assert len(turns) == 80
    turns, first, second = runners(
        ComparisonRun(ns=2000, sets=40), ComparisonRun(ns=1000, wrong="y", sets=40)
    )
    result = asyncio.run(paired_trial(first, second, 1.0))
    assert (result.wrong, len(turns)) == ("y", 2)
    assert "differ" in result.objection


@pytest.mark.parametrize(("percent", "shown"), [(5.0, None), (50.0, 50.0)])
def test_others_make_times_provisional(
    monkeypatch: pytest.MonkeyPatch, percent: float, shown: float | None
) -> None:
    monkeypatch.setattr(OtherLoadMeter, "percent", lambda _: percent)
    monkeypatch.setattr(trial, "_LOOK_SECONDS", 0.0)
    _, first, second = runners(ComparisonRun(ns=2000), ComparisonRun(ns=1000))
    assert asyncio.run(paired_trial(first, second, 1.0, (1,))).others_percent == shown
    assert asyncio.run(paired_trial(first, second, 1.0)).others_percent is None
