"""Comparisons with made-up times: bursts, drifts, and a clock that is turned down do not decide them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from honed.runtime.engines import COMPARISON_SECONDS, MAX_PAIRS, MIN_PAIRS, PairedTiming

Load = Callable[[random.Random, int, float], float]  # makes the time of run `number` from its quiet time


def quiet(chance: random.Random, number: int, seconds: float) -> float:
    return seconds * (1 + chance.expovariate(50))


def bursts(chance: random.Random, number: int, seconds: float) -> float:
    """Every other stretch of five runs takes two to five times as long."""
    return quiet(chance, number, seconds) * (chance.uniform(2, 5) if number // 5 % 2 else 1)


def hiccups(chance: random.Random, number: int, seconds: float) -> float:
    """A third of the runs, one by one, take up to ten times as long."""
    return quiet(chance, number, seconds) * (chance.uniform(1, 10) if chance.random() < 1 / 3 else 1)


def drift(chance: random.Random, number: int, seconds: float) -> float:
    """Each run takes 1 % longer than the one before: a machine that heats up."""
    return quiet(chance, number, seconds) * 1.01**number


def throttled(chance: random.Random, number: int, seconds: float) -> float:
    """The clock is halved after nine runs."""
    return quiet(chance, number, seconds) * (1 if number < 9 else 2)


LOADS = [quiet, bursts, hiccups, drift, throttled]
SLOW, FAST = 600_000_000, 1_000_000_000  # Hz


def compared(
    first: float, second: float, load: Load, seed: int, *, allowance: float = 1.0, most: int = MAX_PAIRS
) -> PairedTiming:
    chance, comparison, number = random.Random(seed), PairedTiming(allowance, most), 0
    while not comparison.done:
        taken = {}
        for which in comparison.order:
            taken[which] = load(chance, number, (first, second)[which])
            number += 1
        comparison.add(taken[0], taken[1])
    return comparison


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_no_load_decides_for_the_slower_one(load: Load, ratio: float) -> None:
    for seed in range(200):
        comparison = compared(1e-3, ratio * 1e-3, load, seed)
        assert comparison.within_allowance == (ratio < 1), seed


@pytest.mark.parametrize("load", LOADS)
def test_equals_are_seldom_called_different(load: Load) -> None:
    sure = sum(compared(1e-3, 1e-3, load, seed).sure for seed in range(500))
    assert sure < 15


@pytest.mark.parametrize("allowance", [1 / 1.02, 1.05, 1.2])
def test_the_allowance_moves_the_border(allowance: float) -> None:
    for seed in range(100):
        assert compared(1e-3, 0.9 * allowance * 1e-3, bursts, seed, allowance=allowance).within_allowance
        assert not compared(1e-3, 1.1 * allowance * 1e-3, bursts, seed, allowance=allowance).within_allowance


def test_what_is_clear_is_decided_soon_and_what_is_slow_takes_no_longer_than_it_may() -> None:
    assert len(compared(1e-3, 2e-3, quiet, 0).pairs) < 20
    slow = compared(60.0, 30.0, quiet, 0)
    assert (len(slow.pairs), slow.within_allowance, slow.sure) == (MIN_PAIRS, True, False)
    even = compared(1.0, 1.0, quiet, 0)
    assert COMPARISON_SECONDS <= sum(map(sum, even.pairs)) < COMPARISON_SECONDS + 3
    assert len(compared(1e-6, 1e-6, quiet, 2).pairs) in range(16, MAX_PAIRS + 1)
    assert len(compared(1e-6, 1e-6, quiet, 0, most=7).pairs) == 7


def test_the_times_told_are_those_of_the_quiet_machine() -> None:
    for load in (bursts, hiccups):
        first, second = compared(1e-3, 1.5e-3, load, 5).times
        assert first == pytest.approx(1e-3, rel=0.1)
        assert second == pytest.approx(1.5e-3, rel=0.1)


def test_a_pair_that_sums_to_the_least_may_be_either_way() -> None:
    comparison = PairedTiming(1.0)
    for first, second in [(2.0, 1.0), (1.0, 2.0), (9.0, 1.0), (9.0, 1.0)]:
        comparison.add(first, second)
    assert comparison.times == (1.0, 1.0)
    assert comparison.within_allowance
    assert not comparison.sure


def test_most_pairs_say_nothing_against_the_medians() -> None:
    comparison = PairedTiming(1.0)
    for first, second in [(2.0, 1.9), (5.0, 4.9), (1.0, 5.0)] + 2 * [(9.0, 8.0)]:
        comparison.add(first, second)
    assert comparison.times == (2.0, 4.9)
    assert not comparison.within_allowance


def test_pairs_at_two_clocks_are_not_compared() -> None:
    """The second program is the slower one, and is the faster one wherever the clock rose between the two."""
    comparison = PairedTiming(1.0)
    for number in range(MAX_PAIRS):
        if comparison.done:
            break
        if number % 2:
            comparison.add(1.0e-3, 1.1e-3, (FAST, FAST))
        else:
            comparison.add(1.7e-3, 1.1e-3, (SLOW, FAST))
    assert comparison.sure
    assert not comparison.within_allowance
    assert comparison.times == (1.0e-3, 1.1e-3)
    assert comparison.tried == 2 * len(comparison.pairs)


def test_pairs_of_a_clock_that_is_lower_for_both_are_compared() -> None:
    comparison = PairedTiming(1.0)
    for clock in (SLOW, FAST, SLOW):
        comparison.add(2e-3, 1e-3, (clock, clock))
    assert len(comparison.pairs) == 3


@pytest.mark.parametrize("clocks", [(None, None), (FAST, None), (None, SLOW)])
def test_a_clock_that_is_not_known_is_no_reason_to_leave_a_pair_out(
    clocks: tuple[int | None, int | None],
) -> None:
    comparison = PairedTiming(1.0)
    comparison.add(2e-3, 1e-3, clocks)
    assert comparison.pairs == [(2e-3, 1e-3)]


@pytest.mark.parametrize("seconds", [1e-3, COMPARISON_SECONDS])
def test_a_clock_that_never_stays_ends_a_comparison_all_the_same(seconds: float) -> None:
    comparison, number = PairedTiming(1.0), 0
    while not comparison.done:
        comparison.add(2 * seconds, seconds, (SLOW, FAST) if number % 2 else (FAST, SLOW))
        number += 1
    assert number == (MAX_PAIRS if seconds < 1 else MIN_PAIRS)
    assert comparison.times == (2 * seconds, seconds)
    assert comparison.within_allowance


def test_runners_take_turns_until_it_is_known_which_is_faster() -> None:
    begun, clocks = list[int](), iter([FAST, SLOW] + 100 * [FAST])

    def run(which: int) -> float:
        begun.append(which)
        return (2e-3, 1e-3)[which]

    comparison = PairedTiming(1.0).take_turns(partial(run, 0), partial(run, 1), clock=lambda: next(clocks))
    assert begun[:6] == [0, 1, 1, 0, 0, 1]
    assert comparison.done
    assert comparison.within_allowance
    assert len(comparison.pairs) == comparison.tried - 1, "the first was run at two clocks"
