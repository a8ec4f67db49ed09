"""What is believed of a family's schedules before any was measured on the device at hand.

A prior is a cost model, one for each family of devices, that ships with the package or is an administrator's
own, learned by `honed.tuner.learn` from records. It scores schedules by their features, as the cost model of
a device does, between 0 and 1: the best time of the task over the schedule's own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from honed.jobs import priorfile
from honed.jobs.priorfile import PriorFile
from honed.runtime.origin import Origin, ScheduleSource

from .costmodel import Array
from .features import WIDTH
from .shipped import shipped

if TYPE_CHECKING:
    import xgboost

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prior:
    """The prior of a family; `name` says which, as `hone show` tells it."""

    name: str
    booster: xgboost.Booster
    knows_rules: bool  # it learned how default rules do beside draws, and scores them rightly

    def predict(self, features: Array) -> Array:
        """Scores [n] of features [n, WIDTH]."""
        import xgboost

        found: Array = self.booster.predict(xgboost.DMatrix(features, nthread=1))
        return found


def prior_of(family: str) -> Prior | None:
    """The family's prior, an own one first, as it is now; None where there is none."""
    own = priorfile.own(family)
    if own is not None and (found := _loaded(own, f"{family}-own-{own.digest}")):
        return found
    file = shipped(family)
    return None if file is None else _loaded(file, f"{family}-{file.digest}")


@lru_cache(maxsize=8)
def _loaded(file: PriorFile, name: str) -> Prior | None:
    """The prior; None, with a word in the log, where XGBoost or its features are of another honed."""
    import xgboost

    booster = xgboost.Booster(params={"nthread": 1})
    try:
        booster.load_model(bytearray(file.model))
        if booster.num_features() != WIDTH:
            raise ValueError(f"{name} was learned from {booster.num_features()} features, not {WIDTH}")
    except ValueError as error:
        _log.warning("%s; it is not used", error)
        return None
    return Prior(str(Origin(ScheduleSource.PRIOR, name)), booster, file.knows_rules)
