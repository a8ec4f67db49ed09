"""Suppression of boxes that overlap, as OpenCV's `dnn.NMSBoxes` has it, by which Frigate goes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SCORE: Final = np.float32(0.4)  # candidates below are none
_OVERLAP: Final = np.float32(0.4)  # what may be shared with a better one, of the area of both
_EPSILON: Final = np.finfo(np.float64).eps


def best(boxes: NDArray[Any], scores: NDArray[np.float32], most: int) -> NDArray[np.intp]:
    """The indices of at most `most` boxes, best first, none of which overlaps a better one much.

    `boxes` is [n, 4], scores [n]. OpenCV takes the last two numbers of a box for width and height. Frigate
    gives it the lower right corner there, and what is kept has to be the same.
    """
    order = np.flatnonzero(scores > SCORE)
    order = order[np.argsort(-scores[order], kind="stable")]
    left = boxes[order].astype(np.float64)
    kept: list[np.intp] = []
    while len(order) and len(kept) < most:
        kept.append(order[0])
        apart = _overlaps(left[0], left[1:]) <= _OVERLAP
        order, left = order[1:][apart], left[1:][apart]
    return np.array(kept, np.intp)


def _overlaps(box: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float32]:
    """Intersection over union of [x, y, width, height]; those without any area are taken for equal."""
    low = np.maximum(box[:2], others[:, :2])
    high = np.minimum(box[:2] + box[2:], others[:, :2] + others[:, 2:])
    sides = high - low
    shared = np.where((sides > 0).all(axis=1), sides[:, 0] * sides[:, 1], 0.0)
    areas = box[2] * box[3] + others[:, 2] * others[:, 3]
    nothing = areas <= _EPSILON
    with np.errstate(invalid="ignore"):  # of boxes without end
        distance = 1.0 - shared / np.where(nothing, 1.0, areas - shared)
    return np.float32(1.0) - np.where(nothing, 0.0, distance).astype(np.float32)
