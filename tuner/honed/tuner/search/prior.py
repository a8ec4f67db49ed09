"""What is believed of a family's schedules before any was measured on the device at hand.

A prior is a cost model that ships with the package, one for each family of devices, learned by
`honed.tuner.learn` from records of draws over made-up layers. It scores schedules by their features, as the
cost model of a device does, between 0 and 1: the best time of the task over the schedule's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from honed.runtime.origin import Origin, ScheduleSource

from .costmodel import Array
from .features import WIDTH

if TYPE_CHECKING:
    import xgboost

FOLDER = Path(__file__).with_name("priors")
# Raised with each new file, and when features or spaces change, so that older files are not used. The default
# schedules of all tasks are others then: `setup._LOWERING` is raised with it, for their times are kept.
VERSION = 1
RULES = "learned-rules"  # the attribute of a file that says whether the prior learned from default rules, too


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


@cache
def prior_of(family: str) -> Prior | None:
    """The family's prior; None where none is shipped."""
    path = FOLDER / f"{family}-{VERSION}.ubj"
    if not path.exists():
        return None
    import xgboost

    booster = xgboost.Booster(params={"nthread": 1}, model_file=path)
    if booster.num_features() != WIDTH:
        raise ValueError(f"{path} was learned from {booster.num_features()} features, not {WIDTH}")
    return Prior(
        str(Origin(ScheduleSource.PRIOR, f"{family}-{VERSION}")), booster, booster.attr(RULES) == str(True)
    )
