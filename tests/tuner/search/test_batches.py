"""A task's batches in turn: kin first, then evolution, then around the best; each proposed once."""

from __future__ import annotations

import pytest

from honed.tuner.lower.target import target_for
from honed.tuner.search import rules, traces
from honed.tuner.search.batches import EVOLVED_FIRST, Batches, Evolution, Proposal, SearchStrategy, neighbours
from honed.tuner.search.costmodel import WIDTH, CostModel

from .search_functions import dense, imagined

pytestmark = pytest.mark.tvm

SIZE = 6


def batches(m: int, n: int, k: int, *, related: list[str] | None = None, family: str = "cpu") -> Batches:
    func, one = dense(m, n, k), imagined(family)
    evolution = Evolution(
        func,
        target_for(one),
        rules.space(func, target_for(one), one),
        CostModel(WIDTH),
        batch=SIZE,
        seed=3,
        postprocs=rules.postprocs(one),
    )
    return Batches(evolution, SIZE, related or [])


def tiles(proposal: Proposal) -> list[traces.Tile]:
    found = traces.read(proposal.trace).decisions
    return [d for _, d in sorted(found.items()) if isinstance(d, traces.Tile)]


def numbers(drawn: traces.ScheduleTrace) -> tuple[tuple[int, traces.Decision], ...]:
    return tuple(sorted(drawn.decisions.items()))


@pytest.mark.parametrize("family", ["cpu", "mali", "gpu"])
def test_schedules_of_kin_come_first_and_fit_the_new_extents(family: str) -> None:
    theirs = batches(32, 64, 32, family=family).next().proposals
    batch = batches(64, 128, 48, related=["nonsense", *(p.trace for p in theirs)], family=family).next()
    assert batch.way is SearchStrategy.RELATED
    assert 0 < len(batch.proposals) <= SIZE
    extents = {tuple(t.extent for t in tiles(p)) for p in theirs}
    assert all(not tiles(p) or tuple(t.extent for t in tiles(p)) not in extents for p in batch.proposals)


def test_a_gpu_s_first_product_begins_with_tables() -> None:
    one = batches(256, 256, 64, family="gpu")
    assert [one.next().way for _ in range(2)] == [SearchStrategy.TABLES, SearchStrategy.EVOLUTION]


def test_where_nothing_is_kin_evolution_begins() -> None:
    assert (
        batches(32, 64, 32, related=['[[["GetSBlock",[],["b","main"],["b0"]]],[]]']).next().way
        is SearchStrategy.EVOLUTION
    )


def test_the_best_is_descended_from_while_that_wins() -> None:
    search = batches(64, 128, 64)
    seen: set[str] = set()
    seconds = 1.0
    for _ in range(EVOLVED_FIRST):
        batch = search.next()
        assert batch.way is SearchStrategy.EVOLUTION
        for proposal in batch.proposals:
            seconds -= 0.01
            search.know(proposal.trace, seconds)
            seen.add(proposal.id)
    best = traces.read(batch.proposals[-1].trace)
    beside = {numbers(one) for one in neighbours(best)}
    batch = search.next()
    assert batch.way is SearchStrategy.DESCENT
    assert any(numbers(traces.read(p.trace)) in beside for p in batch.proposals)
    assert seen.isdisjoint(p.id for p in batch.proposals)
    for proposal in batch.proposals:
        search.know(proposal.trace, float("inf"))
    batch = search.next()
    assert batch.way is SearchStrategy.EVOLUTION, "descent won nothing"
    search.know(batch.proposals[0].trace, seconds / 2)
    assert search.next().way is SearchStrategy.DESCENT


@pytest.mark.slow
def test_that_nothing_beside_the_best_is_left_is_said_by_the_last_batches() -> None:
    search, ways = batches(4, 16, 4), []
    for _ in range(40):
        batch = search.next()
        ways.append((batch.way, batch.last))
        for n, proposal in enumerate(batch.proposals):
            search.know(proposal.trace, 1.0 + n)
        if batch.last:
            break
    assert ways[-1] == (SearchStrategy.EVOLUTION, True)
    assert all(not last for _, last in ways[:-1])
