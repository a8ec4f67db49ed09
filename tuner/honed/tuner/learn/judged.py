"""Priors learned from samples, and how well one picks for tasks that it did not learn from."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

import numpy as np
import xgboost

from honed.jobs.events import LearnedTask
from honed.tuner.search.costmodel import Array, ranking

from .samples import Samples

LEAST_TASKS = 5  # to be judged by
LEAST_CANDIDATES = 8  # of a task that is judged
_FOLDS = 5
_ROUNDS = 160
_PARAMETERS = {
    "objective": "reg:squarederror",
    "max_depth": 7,
    "eta": 0.1,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "min_child_weight": 2,
    "tree_method": "hist",
    "verbosity": 0,
    "seed": 0,
    "nthread": 1,  # several wait for each other longer than they help where others use the processor
}


def learned(samples: Samples) -> xgboost.Booster:
    """A prior; the same for the same samples."""
    data = xgboost.DMatrix(samples.features, label=samples.scores(), nthread=1)
    return xgboost.train(_PARAMETERS, data, num_boost_round=_ROUNDS)


def held_out(samples: Samples) -> list[LearnedTask]:
    """Each task of enough candidates, judged by a prior that saw none of its workload on any device."""
    return sorted(_judged(samples), key=lambda one: one.task)


def better(tasks: list[LearnedTask]) -> bool:
    """Whether the prior's picks are faster than those without one, over all tasks."""
    return mean(one.prior for one in tasks) > mean(one.without for one in tasks)


def _judged(samples: Samples) -> Iterator[LearnedTask]:
    workloads = np.unique(samples.workloads)
    folds = min(_FOLDS, len(workloads))
    for fold in range(folds):
        out = np.isin(samples.workloads, workloads[fold::folds])
        if out.all():
            return
        mine, booster = samples.where(out), learned(samples.where(~out))
        predicted, scores = booster.predict(xgboost.DMatrix(mine.features, nthread=1)), mine.scores()
        for task in np.unique(mine.tasks):
            of_task = np.flatnonzero(mine.tasks == task)
            if len(of_task) >= LEAST_CANDIDATES and scores[of_task].max() > 0:
                yield _one(mine, of_task, predicted[of_task], scores[of_task])


def _one(samples: Samples, of_task: np.ndarray, predicted: Array, scores: Array) -> LearnedTask:
    """Without a prior the default rule is taken; where it was not recorded, any of the candidates."""
    ruled = samples.ruled[of_task]
    ranked = ranking(predicted, samples.seconds[of_task])
    assert ranked is not None  # one candidate is right
    return LearnedTask(
        task=str(samples.workloads[of_task[0]]),
        candidates=len(of_task),
        correlation=float(np.nan_to_num(ranked.correlation)),
        prior=float(scores[np.argmax(predicted)]),
        without=float(scores[ruled].max() if ruled.any() else scores.mean()),
        rule=bool(ruled.any()),
    )
