"""Answers of models of each kind, made into detections."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from honed.frigate import detections
from honed.protocol.errors import InvalidArgument

from . import frigate_reference

WIDTH, HEIGHT = 64, 96
CELLS = sum((WIDTH // s) * (HEIGHT // s) for s in (8, 16, 32))


@given(
    arrays.arrays(
        np.float32, (CELLS, 9), elements=st.floats(-2, 3, width=32), fill=st.floats(-2, 3, width=32)
    )
)
def test_yolox_as_the_reference_has_it(found: np.ndarray) -> None:
    found[:, 4:] = np.clip(found[:, 4:], 0, 1)
    made = detections.decoder("yolox")([found[None].copy()], WIDTH, HEIGHT)
    wanted = frigate_reference.yolox(found[None].astype(np.float64), WIDTH, HEIGHT)
    if not _close_calls(found):
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-4)


def _close_calls(found: np.ndarray) -> bool:
    """Whether rounding decides: equal scores, or one at the threshold."""
    scores = (found[:, 4:5].astype(np.float64) * found[:, 5:]).max(axis=1)
    scores = np.sort(scores[scores > 0.39])
    return bool((np.abs(scores - 0.4) < 1e-5).any() or (np.diff(scores) < 1e-6).any())


def test_one_object_in_each_layout_of_yolo_generic() -> None:
    """A box around (32, 48) of 16 x 24, class 2, and one that overlaps it."""
    rows = np.zeros((30, 4 + 3), np.float32)
    rows[3] = 32, 48, 16, 24, 0.1, 0.2, 0.9
    rows[4] = 32.5, 48, 16, 24, 0.1, 0.2, 0.8
    wanted = np.zeros((20, 6), np.float32)
    wanted[0] = 2, 0.9, 36 / HEIGHT, 24 / WIDTH, 60 / HEIGHT, 40 / WIDTH
    for output in (rows[None], rows.T[None]):
        for name in ("yolo-generic", "yologeneric"):
            np.testing.assert_allclose(detections.decoder(name)([output], WIDTH, HEIGHT), wanted, rtol=1e-6)


def test_one_object_in_the_three_grids_of_yolo_generic() -> None:
    outputs = [np.zeros((1, 3 * 8, HEIGHT // s, WIDTH // s), np.float32) for s in (8, 16, 32)]
    cell = outputs[1].reshape(1, 3, 8, HEIGHT // 16, WIDTH // 16)[0, 1, :, 2, 3]
    cell[:] = 0.5, 0.75, 0.5, 0.25, 0.9, 0, 0.8, 0.1
    made = detections.decoder("yolo-generic")(outputs, WIDTH, HEIGHT)
    x, y, w, h = (0.5 + 3) * 16, (1.0 + 2) * 16, 76, 55 / 4
    low, high = (max(x - w / 2, 0), y - h / 2), (min(x + w / 2, WIDTH), y + h / 2)
    wanted = [1, 0.72, low[1] / HEIGHT, low[0] / WIDTH, high[1] / HEIGHT, high[0] / WIDTH]
    np.testing.assert_allclose(made[0], wanted, rtol=1e-6)
    assert not made[1:].any()


def test_yolonas_ends_where_it_is_filled_up() -> None:
    rows = np.array(
        [[0, 8, 12, 32, 48, 0.9, 3], [0, 0, 0, 64, 96, 0.5, 1], [0, 1, 1, 1, 1, 0.4, -1], [0] * 7], np.float32
    )
    made = detections.decoder("yolonas")([rows], WIDTH, HEIGHT)
    np.testing.assert_allclose(made[0], [3, 0.9, 12 / HEIGHT, 8 / WIDTH, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(made[1], [1, 0.5, 0, 0, 1, 1], rtol=1e-6)
    assert not made[2:].any()


def test_ssd_gives_the_first_twenty() -> None:
    rows = np.zeros((1, 1, 100, 7), np.float32)
    rows[0, 0, :, 1] = np.arange(100)
    rows[0, 0, :, 2:] = 0.9, 0.1, 0.2, 0.3, 0.4
    made = detections.decoder("ssd")([rows], WIDTH, HEIGHT)
    np.testing.assert_allclose(made[7], [7, 0.9, 0.2, 0.1, 0.4, 0.3], rtol=1e-6)
    assert made[19, 0] == 19


@pytest.mark.parametrize("kind", ["ssd", "yolonas", "yolox", "yolo-generic"])
@given(
    outputs=st.lists(
        arrays.arrays(
            np.float32,
            arrays.array_shapes(min_dims=1, max_dims=5, min_side=1, max_side=9),
            elements=st.floats(width=32),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_whatever_a_model_answers_is_detections_or_a_sentence(kind: str, outputs: list[np.ndarray]) -> None:
    with np.errstate(all="ignore"):
        try:
            made = detections.decoder(kind)(outputs, WIDTH, HEIGHT)
        except InvalidArgument:
            return
    assert (made.shape, made.dtype) == ((20, 6), np.float32)


def test_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="use yolo-generic, yolonas, yolox or ssd"):
        detections.decoder("dfine")


@given(
    arrays.arrays(np.float32, (12, 4), elements=st.floats(-50, 450, width=32)),
    arrays.arrays(np.float32, (12,), elements=st.floats(0, 1, width=32), unique=True),
)
def test_what_is_kept_overlaps_nothing_better(found: np.ndarray, scores: np.ndarray) -> None:
    kept = detections.best(found, scores, 100)
    assert list(kept) == sorted(kept, key=lambda i: -scores[i])
    assert (scores[kept] > 0.4).all()
    for index in set(range(12)) - set(kept.tolist()):
        better = [k for k in kept if scores[k] > scores[index]]
        one = found[index].astype(np.float64)
        over = detections._overlaps(one, found[better].astype(np.float64))
        assert scores[index] <= np.float32(0.4) or (over > 0.4).any() or np.isnan(over).any()
