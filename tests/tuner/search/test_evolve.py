"""The search proposes what it has not proposed before, and every trace makes the schedule it stands for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tvm import te
from tvm_ffi import structural_equal

from honed.tuner.lower.opencl import LoweringFailed
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules, traces
from honed.tuner.search.batches import Evolution
from honed.tuner.search.costmodel import WIDTH, CostModel

from .search_functions import dense, draws, imagined

pytestmark = pytest.mark.tvm

BATCH = 8


def search(model: CostModel, family: str = "cpu", seed: int = 3) -> Evolution:
    func, one = dense(32, 64, 32), imagined(family)
    return Evolution(
        func,
        target_for(one),
        rules.space(func, target_for(one), one),
        model,
        batch=BATCH,
        seed=seed,
        postprocs=rules.postprocs(one),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cpu", "gpu"])
def test_proposals_are_new_and_replay(family: str) -> None:
    evolution = search(CostModel(WIDTH), family)
    first = evolution.propose()
    assert 0 < len(first) <= BATCH
    for proposal in first:
        evolution.know(proposal.trace, 1e-3)
        again = traces.apply(proposal.trace, dense(32, 64, 32)).mod["main"]
        assert structural_equal(again, proposal.scheduled)
        assert proposal.id == traces.identity(proposal.trace)
        assert proposal.features.shape == (WIDTH,)
        assert proposal.features.any()
        assert proposal.score is None  # nothing was learned
    ids = {proposal.id for proposal in first}
    assert len(ids) == len(first)
    assert ids.isdisjoint(proposal.id for proposal in evolution.propose())


def test_what_is_known_is_not_proposed() -> None:
    known = search(CostModel(WIDTH)).propose()
    evolution = search(CostModel(WIDTH))
    for proposal in known:
        evolution.know(proposal.trace, float("inf"))
    assert {p.id for p in known}.isdisjoint(p.id for p in evolution.propose())


def test_a_trained_model_scores_proposals() -> None:
    model = CostModel(WIDTH)
    rng = np.random.default_rng(1)
    model.add("other", rng.random((40, WIDTH)).astype(np.float32), rng.random(40) + 0.1)
    model.train()
    assert all(proposal.score is not None for proposal in search(model).propose())


def test_a_trace_fits_the_same_function_at_another_size() -> None:
    one = imagined("cpu")
    func = dense(32, 64, 32)
    small = draws(func, one, rules.space(func, target_for(one), one), 1)[0]
    wider = dense(64, 128, 64)
    assert traces.apply(traces.to_text(small.trace), wider).mod["main"].body is not None


@pytest.mark.parametrize("text", ["[]", "[[], 1]", json.dumps([[["Nothing", [], [], []]], []]), "{}"])
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(LoweringFailed):
        traces.apply(text, dense(8, 8, 8))


def test_a_trace_of_another_function_is_refused() -> None:
    one = imagined("cpu")
    func = dense(32, 64, 32)
    text = traces.to_text(draws(func, one, rules.space(func, target_for(one), one), 1)[0].trace)
    x = te.placeholder((4,), name="x")
    with pytest.raises(LoweringFailed):
        traces.apply(text, te.create_prim_func([x, te.compute((4,), lambda i: x[i] + 1.0)]))
