"""The job that learns a prior, and says how well it picks for tasks that it did not learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from statistics import mean

import numpy as np
import xgboost

from honed.jobs import commands, events
from honed.jobs.events import LearnedTask, News, Note
from honed.jobs.priorfile import PriorFile
from honed.machine import devices, profilefile
from honed.machine.files import replacing
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import InvalidArgument
from honed.tuner.search.costmodel import Array, ranking
from honed.valhall.bench import BENCHES, predicted

from .samples import Samples, files, functions, records, samples

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


# ---- The job that learns a prior ----


def learn(job: commands.Learn, emit: Callable[[News], None]) -> events.Learned:
    """Learn, judge, and write the prior where it picks better than what serves without one."""
    profile, found = _profile(job), files(job.file)
    known = functions(job.models, profile, emit)
    lines = chain.from_iterable(records(path) for path in found)
    gathered, left_out = samples(lines, known, profile, emit)
    emit(events.Stage(stage="learn", fraction=0.0, text=f"learn from {len(gathered)} candidates"))
    tasks = held_out(gathered)
    if len(tasks) < LEAST_TASKS:
        reasons = "".join(f"; {count} are {why}" for why, count in left_out.most_common())
        raise InvalidArgument(
            f"a prior is judged by {LEAST_TASKS} tasks with {LEAST_CANDIDATES} candidates at least, and of "
            f"these there are {len(tasks)}{reasons}; give more records, and the models that they are of"
        )
    good = better(tasks)
    if good:
        made = PriorFile(
            family=profile.rules.family,
            knows_rules=gathered.knows_rules,
            model=bytes(learned(gathered).save_raw("ubj")),
        )
        with replacing(job.output) as file:
            file.write(made.written())
    for why, count in left_out.most_common():
        emit(Note(text=f"{count} records are {why}, and were left out"))
    return events.Learned(
        output=str(job.output) if good else None,
        family=profile.rules.family,
        tasks=tuple(tasks),
        candidates=len(gathered),
        left_out=dict(left_out),
        prior=mean(one.prior for one in tasks),
        without=mean(one.without for one in tasks),
        correlation=mean(one.correlation for one in tasks),
    )


def _profile(job: commands.Learn) -> DeviceProfile:
    if job.bench is not None:
        if job.bench not in BENCHES:
            raise InvalidArgument(f"there is no bench {job.bench!r}; there is {', '.join(BENCHES)}")
        return predicted(job.bench)
    return profilefile.load(job.profile) if job.profile else devices.select(job.device).profile
