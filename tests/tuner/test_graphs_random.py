"""Random models are valid, the same for the same seed, and of many operators."""

from __future__ import annotations

import numpy as np

from .graphs_random import answers, feeds, random_model


def test_seeds_name_models_that_run() -> None:
    operators: set[str] = set()
    for seed in range(40):
        model = random_model(seed)
        operators.update(node.op_type for node in model.graph.node)
        assert all(np.isfinite(one).all() for one in answers(model, feeds(model, seed)))
    assert len(operators) > 60
    assert random_model(3).SerializeToString() == random_model(3).SerializeToString()
    assert random_model(3) != random_model(4)


def test_heads_of_a_long_row_have_no_weights_of_gigabytes() -> None:
    assert random_model(300483).ByteSize() < 1 << 20
