"""The cost model learns, ranks, and is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.tuner.search.costmodel import CostModel, ranking

WIDTH = 8


def samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features whose first column alone decides the time, in seconds."""
    features = np.random.default_rng(seed).random((count, WIDTH)).astype(np.float32)
    return features, 1e-3 * (1.0 + 4.0 * features[:, 0].astype(np.float64))


def trained() -> CostModel:
    model = CostModel(WIDTH)
    model.add("task", *samples(120, 0))
    model.train()
    return model


def test_it_says_nothing_before_it_has_learned() -> None:
    model = CostModel(WIDTH)
    model.add("task", *samples(4, 0))
    model.train()
    assert model.predict(samples(2, 1)[0]) is None


def test_a_prior_speaks_until_it_has_learned(tmp_path: Path) -> None:
    class Prior:
        def predict(self, features: np.ndarray) -> np.ndarray:
            return -features[:, 1]

    prior: Any = Prior()
    model = CostModel(WIDTH, prior)
    features, _ = samples(3, 1)
    np.testing.assert_array_equal(model.predict(features), -features[:, 1])
    model.add("task", *samples(120, 0))
    model.train()
    np.testing.assert_array_equal(model.predict(features), trained().predict(features))
    assert CostModel.load(tmp_path / "none.npz", WIDTH, prior).trained


def test_it_ranks_what_it_has_not_seen() -> None:
    features, seconds = samples(40, 1)
    predicted = trained().predict(features)
    assert predicted is not None
    found = ranking(predicted, seconds)
    assert found is not None
    assert found.correlation > 0.8
    assert found.best_rank <= 5


def test_refused_candidates_score_nothing() -> None:
    model = CostModel(WIDTH)
    features, seconds = samples(120, 0)
    refused = features[:, 1] > 0.5
    model.add("task", features, np.where(refused, np.inf, seconds))
    model.train()
    predicted = model.predict(features)
    assert predicted is not None
    assert predicted[refused].mean() < 0.3 * predicted[~refused].mean()


def test_tasks_of_any_speed_are_learned_together() -> None:
    model = CostModel(WIDTH)
    features, seconds = samples(60, 0)
    model.add("fast", features, seconds)
    model.add("slow", features, seconds * 1000)
    model.train()
    predicted = model.predict(features)
    assert predicted is not None
    assert ranking(predicted, seconds).correlation > 0.9  # type: ignore[union-attr]


def test_tasks_are_told_apart_by_their_whole_keys(tmp_path: Path) -> None:
    """Of one function, packing its weights in each inference and before: the same hash, another mark."""
    features, seconds = samples(20, 0)
    model = CostModel(WIDTH)
    model.add("0123456789abcdef", features, seconds)
    model.add("0123456789abcdef_c1_c12", features, seconds / 10)
    model.save(tmp_path / "m.npz")
    for one in (model, CostModel.load(tmp_path / "m.npz", WIDTH)):
        np.testing.assert_allclose(one.scores()[:20], one.scores()[20:])


def test_it_is_the_same_after_a_restart(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path / "kept" / "model.npz")
    again = CostModel.load(tmp_path / "kept" / "model.npz", WIDTH)
    features, _ = samples(10, 2)
    np.testing.assert_array_equal(model.predict(features), again.predict(features))
    assert again.samples == 120


def test_features_of_another_kind_are_not_used(tmp_path: Path) -> None:
    trained().save(tmp_path / "model.npz")
    assert CostModel.load(tmp_path / "model.npz", WIDTH + 1).samples == 0


def test_ranking_of_a_batch() -> None:
    found = ranking(np.array([0.9, 0.5, 0.1], np.float32), np.array([1.0, 2.0, np.inf]))
    assert found is not None
    assert (found.correlation, found.best_rank, found.batch) == (pytest.approx(1.0), 1, 3)
    assert ranking(np.array([0.1], np.float32), np.array([1.0])) is None
