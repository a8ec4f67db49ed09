"""Which sizes parts are compiled for, and how often they were met: pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.features.sizes import SizedPartition, best, cost, next_sizes
from honed.daemon.observe.usage import MOST, UsageLog, UsageSettings
from honed.protocol.values import ObservedSizes

HALF_LIFE = 100.0
counts = st.dictionaries(
    st.integers(1, 60).map(lambda n: (n,)), st.floats(0.01, 100, allow_nan=False), max_size=7
)


def part(
    *forms: int, by_rows: bool = True, left_out: tuple[int, ...] = (), number: int = 0
) -> SizedPartition:
    return SizedPartition(
        number=number,
        by_rows=by_rows,
        forms=tuple((n,) for n in forms),
        left_out=tuple((n,) for n in left_out),
    )


def met(number: int = 0, **often: float) -> dict[ObservedSizes, float]:
    """Counts by the size, as in n40=3."""
    return {ObservedSizes(part=number, sizes=(int(name[1:]),)): count for name, count in often.items()}


@given(found=counts, most=st.integers(0, 4), by_rows=st.booleans())
def test_the_sizes_chosen_were_met_are_bounded_and_none_cost_less(
    found: dict[tuple[int, ...], float], most: int, by_rows: bool
) -> None:
    chosen = best(found, most, by_rows=by_rows)
    assert set(chosen) <= found.keys()
    assert len(set(chosen)) == len(chosen) <= most
    least = min(
        cost(found, forms, by_rows=by_rows)
        for count in range(most + 1)
        for forms in itertools.combinations(found, min(count, len(found)))
    )
    assert cost(found, chosen, by_rows=by_rows) == pytest.approx(least)


@given(
    found=counts,
    most=st.integers(1, 4),
    by_rows=st.booleans(),
    left_out=st.sets(st.integers(1, 60), max_size=3),
)
def test_what_was_chosen_is_not_chosen_again(
    found: dict[tuple[int, ...], float], most: int, by_rows: bool, left_out: set[int]
) -> None:
    """Whatever came of it: all of it served, or none was faster."""
    often = {ObservedSizes(part=0, sizes=sizes): count for sizes, count in found.items()}
    before = part(by_rows=by_rows, left_out=tuple(left_out))
    chosen = next_sizes([before], often, 1.0, most)
    if chosen is None:
        return
    assert 0 < len(chosen) <= most
    assert not {each.sizes[0] for each in chosen} & left_out
    numbers = tuple(each.sizes[0] for each in chosen)
    assert next_sizes([part(*numbers, by_rows=by_rows, left_out=tuple(left_out))], often, 1.0, most) is None
    known, tries = before, 0
    while (tried := next_sizes([known], often, 1.0, most)) is not None:
        known = part(
            by_rows=by_rows, left_out=tuple({n for (n,) in known.left_out} | {e.sizes[0] for e in tried})
        )
        tries += 1
    assert tries <= len(found)


def test_what_is_met_least_goes_for_what_is_met_most() -> None:
    known = part(8, 30, by_rows=False)
    assert next_sizes([known], met(n8=20, n30=15, n31=1), 10, 2) is None
    assert next_sizes([known], met(n8=20, n30=1, n31=40), 10, 2) == (
        ObservedSizes(part=0, sizes=(8,)),
        ObservedSizes(part=0, sizes=(31,)),
    )


def test_two_that_are_met_as_often_do_not_take_turns() -> None:
    often = met(n40=50, n41=51)
    assert next_sizes([part(40, by_rows=False)], often, 10, 1) is None
    assert next_sizes([part(40)], often, 10, 1) is not None  # which runs both


def test_one_form_of_many_rows_is_enough_for_those_of_a_few_less() -> None:
    assert next_sizes([part(50)], met(n47=20, n48=20, n49=20, n50=20), 10, 4) is None
    chosen = next_sizes([part(50)], met(n5=500, n50=20), 10, 4)
    assert chosen is not None
    assert {each.sizes for each in chosen} == {(5,), (50,)}


def test_a_part_keeps_its_sizes_when_another_gets_some() -> None:
    parts = [part(7, number=1), part(number=3)]
    assert next_sizes(parts, met(3, n9=30), 10, 2) == (
        ObservedSizes(part=1, sizes=(7,)),
        ObservedSizes(part=3, sizes=(9,)),
    )


def test_rarely_met_sizes_and_hopeless_parts_are_left_alone() -> None:
    assert next_sizes([part()], met(n9=5, n12=4), 10, 2) is None
    assert next_sizes([part(by_rows=False)], met(n9=9, n12=9), 10, 2) is None
    assert next_sizes([part(by_rows=False, left_out=(1, 2, 3, 4))], met(n9=99), 10, 2) is None
    assert next_sizes([part(left_out=(40,))], met(n41=99, n30=99), 10, 2) is None  # as good as 40


def test_rows_that_differ_between_inputs_are_none_for_a_form() -> None:
    two = SizedPartition(number=0, by_rows=True, forms=(), left_out=())
    often = {ObservedSizes(part=0, sizes=(5, 6)): 99.0, ObservedSizes(part=0, sizes=(7, 7)): 20.0}
    assert next_sizes([two], often, 10, 2) == (ObservedSizes(part=0, sizes=(7, 7)),)


def ledger(clock: Iterator[float]) -> UsageLog:
    """A log that is never written; each look at its clock is the next time."""
    settings = UsageSettings(half_life_days=HALF_LIFE / 86_400)
    return UsageLog(Path("/nowhere/usage.json"), settings, clock=clock.__next__, wall=lambda: 0.0)


@given(sizes=st.lists(st.integers(0, 40), max_size=200))
def test_counts_are_bounded_and_those_met_least_go(sizes: list[int]) -> None:
    known = ledger(itertools.count(0.0))
    for n in sizes:
        known.observe("m", [ObservedSizes(part=0, sizes=(n,))])
    found = known.size_counts("m")
    assert len(found) == len(set(sizes) - {0})
    assert ObservedSizes(part=0, sizes=(0,)) not in found
    assert all(0 < value <= len(sizes) for value in found.values())


def test_beyond_the_bound_what_was_met_least_is_forgotten() -> None:
    often = ObservedSizes(part=0, sizes=(1,))
    known = ledger(itertools.repeat(0.0))
    known.observe("m", [often] * 50)
    for n in range(2, 2 * MOST):
        known.observe("m", [ObservedSizes(part=0, sizes=(n,))])
    found = known.size_counts("m")
    assert len(found) == MOST
    assert often in found
