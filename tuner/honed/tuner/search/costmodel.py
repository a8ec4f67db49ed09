"""Defines the learned cost model, its features, and the prior in use before anything was measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tvm.s_tir import meta_schedule as ms

from honed.jobs import priorfile
from honed.jobs.events import Ranking
from honed.jobs.priorfile import PriorFile
from honed.machine.families import DriverClass
from honed.machine.files import replacing
from honed.runtime.compiled.model import ScheduleProvenance, ScheduleSource
from honed.tuner.setup import load_shipped_prior

if TYPE_CHECKING:
    import xgboost  # Imported where it is used, because it imports SciPy and most compilers need neither


# A single model serves every task and model of a device, because features describe loops and memory and not
# operators. It is trained again from all its samples after each batch (xgboost's histogram method, well under
# a second for some ten thousand samples) and kept, samples and all, in one `.npz` file per device.

Array = NDArray[np.float32]

MAX_SAMPLES = 20_000  # The oldest are forgotten beyond that
_LEAST_TO_TRAIN = 24
_ROUNDS = 120
_PARAMETERS = {
    "objective": "reg:squarederror",
    "max_depth": 8,
    "eta": 0.15,
    "subsample": 0.9,
    "min_child_weight": 1,
    "tree_method": "hist",
    "verbosity": 0,
    "nthread": 1,
    "seed": 0,
}


class CostModel:
    """A model of scores between 0 and 1: the best known time of the task over the candidate's own time.

    Until it has learned enough, it returns those of the prior. `train` and `predict` are deterministic for a
    given set of samples. Candidates that gave no right answer count with score 0, so that the search learns
    to avoid similar ones.
    """

    def __init__(self, width: int, prior: Prior | None = None) -> None:
        """Set up an empty model; `width` is the length of a feature vector."""
        self.width = width
        self._prior = prior
        self._features = np.empty((0, width), np.float32)
        self._seconds = np.empty(0, np.float64)  # Infinity for those refused
        self._tasks = np.empty(0, np.str_)
        self._booster: xgboost.Booster | None = None

    @property
    def samples(self) -> int:
        """Number of measured candidates it has learned from."""
        return len(self._seconds)

    @property
    def trained(self) -> bool:
        """Return whether `predict` gives scores."""
        return self._booster is not None or self._prior is not None

    def add(self, task: str, features: Array, seconds: NDArray[np.float64]) -> None:
        """Add measured candidates of `task`: features [n, width], seconds [n] with inf for the refused."""
        self._features = np.concatenate([self._features, features])[-MAX_SAMPLES:]
        self._seconds = np.concatenate([self._seconds, seconds])[-MAX_SAMPLES:]
        self._tasks = np.concatenate([self._tasks, np.full(len(seconds), task)])[-MAX_SAMPLES:]

    def train(self) -> None:
        """Learn from all samples; with fewer than 24 it stays as it is."""
        scores = self.scores()
        if len(scores) < _LEAST_TO_TRAIN or float(np.ptp(scores)) == 0.0:
            return
        import xgboost

        data = xgboost.DMatrix(self._features, label=scores)
        self._booster = xgboost.train(_PARAMETERS, data, num_boost_round=_ROUNDS)

    def predict(self, features: Array) -> Array | None:
        """Return scores [n] of features [n, width]; None while untrained, without a prior."""
        if self._booster is None:
            return None if self._prior is None else self._prior.predict(features)
        import xgboost

        found: Array = self._booster.predict(xgboost.DMatrix(features))
        return found

    def scores(self) -> Array:
        """Return the score of each sample, as the function `scores` defines it."""
        return scores(self._tasks, self._seconds)

    def save(self, path: Path) -> None:
        """Write all samples to `path`, whole or not at all; raises as `replacing`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez_compressed(file, features=self._features, seconds=self._seconds, tasks=self._tasks)

    @classmethod
    def load(cls, path: Path, width: int, prior: Prior | None = None) -> CostModel:
        """Return the trained model stored in `path`; an empty one if there is none or its features differ.

        Raises ValueError or OSError where the file cannot be read as a cost model.
        """
        model = cls(width, prior)
        if not path.exists():
            return model
        with np.load(path, allow_pickle=False) as kept:
            features, seconds, tasks = kept["features"], kept["seconds"], kept["tasks"]
        if features.ndim == 2 and features.shape == (len(seconds), width) and len(tasks) == len(seconds):
            model._features, model._seconds, model._tasks = features, seconds, tasks
            model.train()
        return model


def scores(tasks: NDArray[np.str_], seconds: NDArray[np.float64]) -> Array:
    """Return, for each candidate, the best known time of its task over its own; 0 if refused (inf)."""
    found = np.zeros(len(seconds), np.float32)
    for task in np.unique(tasks):
        mine = tasks == task
        best = seconds[mine].min()
        if np.isfinite(best):
            found[mine] = best / seconds[mine]
    return found


def ranking(predicted: Array, seconds: NDArray[np.float64]) -> Ranking | None:
    """Return how `predicted` scores rank candidates that took `seconds` (inf: refused).

    Return None for fewer than three candidates.
    """
    if len(seconds) < 3 or not np.isfinite(seconds).any():
        return None
    speed = np.where(np.isfinite(seconds), 1.0 / seconds, 0.0)
    equal = float(np.ptp(speed)) == 0.0 or float(np.ptp(predicted)) == 0.0
    # Spearman's: Pearson's of the ranks, equals sharing their mean rank.
    correlation = float("nan") if equal else float(np.corrcoef(_ranks(predicted), _ranks(speed))[0, 1])
    order = np.argsort(-predicted, kind="stable")
    best = int(np.flatnonzero(order == int(np.argmax(speed)))[0]) + 1
    return Ranking(correlation=correlation, best_rank=best, batch=len(seconds))


def _ranks(values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts - 1) / 2
    return means[which]


_STORE_WIDTH = 164  # Features of one store in MetaSchedule
WIDTH = 2 * _STORE_WIDTH


def features(context: ms.TuneContext, candidates: Sequence[Any]) -> Array:
    """Return features [n, WIDTH]: over a schedule's stores, the sum and the greatest of the logarithms."""
    found = np.zeros((len(candidates), WIDTH), np.float32)
    if not candidates:
        return found
    extractor = ms.feature_extractor.PerStoreFeature(extract_workload=False)
    for n, array in enumerate(extractor.extract_from(context, list(candidates))):
        stores = np.log1p(np.maximum(array.numpy().astype(np.float32), 0.0))
        if len(stores):
            found[n, :_STORE_WIDTH] = stores.sum(0)
            found[n, _STORE_WIDTH:] = stores.max(0)
    return found


# A prior is a cost model, one for each family of devices, that ships with the package or is an
# administrator's own, learned by `honed.learn` from records. It scores schedules by their features, as the
# cost model of a device does, between 0 and 1: the best time of the task over the schedule's own.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prior:
    """The prior of a family; `name` is its name in `hone show`.

    A prior that learned from several classes of drivers judges schedules for `driver`.
    """

    name: str
    booster: xgboost.Booster
    knows_rules: bool  # True: it learned the times of default rules beside draws, and scores them rightly
    driver: DriverClass

    def predict(self, features: Array) -> Array:
        """Return scores [n] of features [n, WIDTH]."""
        import xgboost

        if self.booster.num_features() > WIDTH:
            features = for_driver(features, self.driver)
        found: Array = self.booster.predict(xgboost.DMatrix(features, nthread=1))
        return found


def for_driver(features: Array, driver: DriverClass) -> Array:
    """Return features [n, WIDTH + 1], the last of which is the class of driver."""
    return np.pad(features, ((0, 0), (0, 1)), constant_values=driver.value)


def prior_of(family: str, driver: DriverClass = DriverClass.ARM) -> Prior | None:
    """Return the family's current prior, a locally trained one first; None where there is none."""
    own = priorfile.own(family)
    if own is not None and (found := _load(own, f"{family}-own-{own.digest}", driver)):
        return found
    file = load_shipped_prior(family)
    return None if file is None else _load(file, f"{family}-{file.digest}", driver)


def import_for(family: str) -> None:
    """Import what the family's prior needs, if it has one, so that processes forked later need not.

    This process does not use it: see `ForkPool`.
    """
    if priorfile.own(family) is not None or load_shipped_prior(family) is not None:
        import_module("xgboost")


@lru_cache(maxsize=8)
def _load(file: PriorFile, name: str, driver: DriverClass) -> Prior | None:
    """Load a prior; log why and return None where it is of another version of XGBoost or of honed."""
    import xgboost

    booster = xgboost.Booster(params={"nthread": 1})
    try:
        booster.load_model(bytearray(file.model))
        if booster.num_features() not in (WIDTH, WIDTH + 1):
            raise ValueError(f"{name} was learned from {booster.num_features()} features, not {WIDTH}")
    except ValueError as error:
        _log.warning("%s; it is not used", error)
        return None
    return Prior(str(ScheduleProvenance(ScheduleSource.PRIOR, name)), booster, file.knows_rules, driver)
