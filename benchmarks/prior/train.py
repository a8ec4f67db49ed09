"""Learns the prior of a family: `python -m benchmarks.prior.train FAMILY COST_MODEL.npz...`.

The files are the cost models that tuning keeps (`cost-models/` in its cache), with the features and times of
every candidate measured. Prints how well a prior learned without a task's file picks from that task's
candidates: the best time over the time of its pick, 1 for the best.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median

import numpy as np
import xgboost

from honed.runtime.families import FAMILIES
from honed.tuner.search.costmodel import CostModel
from honed.tuner.search.features import WIDTH
from honed.tuner.search.prior import FOLDER, RULES, VERSION

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
}
_LEAST = 8  # candidates of a task that a pick is told of


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prior.train", description=__doc__)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument(
        "--with-rules", action="store_true", help="the default rules' schedules are among the candidates"
    )
    options = parser.parse_args()
    models = [CostModel.load(path, WIDTH) for path in options.files]
    picks = [pick for n in range(len(models)) for pick in _picks(models, n)]
    if picks:
        print(f"{len(picks)} tasks held out: median {median(picks):.2f}, mean {mean(picks):.2f}")
    booster = _learned(models)
    booster.set_attr(**{RULES: str(options.with_rules)})
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{options.family}-{VERSION}.ubj"
    booster.save_model(path)
    samples = sum(model.samples for model in models)
    print(f"{path}: {samples} candidates, {path.stat().st_size / 1e6:.2f} MB")
    return 0


def _learned(models: list[CostModel]) -> xgboost.Booster:
    features = np.concatenate([model.features for model in models])
    scores = np.concatenate([model.scores() for model in models])
    return xgboost.train(_PARAMETERS, xgboost.DMatrix(features, label=scores), num_boost_round=_ROUNDS)


def _picks(models: list[CostModel], held_out: int) -> list[float]:
    """For each task of one file the score of what a prior learned from the others picks."""
    others = [model for n, model in enumerate(models) if n != held_out]
    if not others:
        return []
    one, booster = models[held_out], _learned(others)
    predicted, scores = booster.predict(xgboost.DMatrix(one.features)), one.scores()
    found = []
    for task in np.unique(one.tasks):
        mine = np.flatnonzero(one.tasks == task)
        if len(mine) >= _LEAST and scores[mine].max() > 0:
            found.append(float(scores[mine[np.argmax(predicted[mine])]]))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
