"""Decodes models' outputs to the detections that Frigate accepts: float32 [20, 6].

A row is class, score, then top, left, bottom, right, as fractions of the picture's height and width; unused
rows are zeros. Each kind of model is decoded as Frigate's own detectors do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument

SCORE: Final = np.float32(0.4)  # Minimum score of a candidate
_OVERLAP: Final = np.float32(0.4)  # Maximum intersection over union with a better box
_EPSILON: Final = np.finfo(np.float64).eps
ROWS: Final = 20
Array = NDArray[Any]
Decoder = Callable[[Sequence[Array], int, int], Array]
_STRIDES: Final = (8, 16, 32)
_ANCHORS: Final = (  # YOLOv7's anchors in pixels, for each of the three outputs
    ((12, 16), (19, 36), (40, 28)),
    ((36, 75), (76, 55), (72, 146)),
    ((142, 110), (192, 243), (459, 401)),
)


def best(boxes: NDArray[Any], scores: NDArray[np.float32], most: int) -> NDArray[np.intp]:
    """Return the indices of at most `most` boxes, best first, none of which overlaps a better one much.

    The result is that of OpenCV's `dnn.NMSBoxes`; `boxes` is [n, 4], scores [n]. OpenCV reads the last two
    numbers of a box as width and height. Frigate passes the lower right corner there, and this function must
    keep the boxes that Frigate keeps.
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
    """Return the intersection over union of [x, y, width, height]; boxes without area count as equal."""
    low = np.maximum(box[:2], others[:, :2])
    high = np.minimum(box[:2] + box[2:], others[:, :2] + others[:, 2:])
    sides = high - low
    shared = np.where((sides > 0).all(axis=1), sides[:, 0] * sides[:, 1], 0.0)
    areas = box[2] * box[3] + others[:, 2] * others[:, 3]
    nothing = areas <= _EPSILON
    with np.errstate(invalid="ignore"):  # Boxes may be infinite
        distance = 1.0 - shared / np.where(nothing, 1.0, areas - shared)
    return np.float32(1.0) - np.where(nothing, 0.0, distance).astype(np.float32)


def nothing() -> Array:
    """Return an array with no detection."""
    return np.zeros((ROWS, 6), np.float32)


def decoder(model_type: str) -> Decoder:
    """Return the decoder of the outputs of that kind of model, given the picture's width and height.

    Raises InvalidArgument for kinds not known; the decoder raises it for outputs of the wrong shape.
    """
    found = _DECODERS.get(model_type.replace("-", ""))
    if found is None:
        raise InvalidArgument(
            f"model_type {model_type!r} is not supported; use yolo-generic, yolonas, yolox or ssd"
        )
    return found


def ssd(outputs: Sequence[Array], width: int, height: int) -> Array:
    """Decode one output [1, 1, n, 7].

    A row is number of the picture, class, score, left, top, right, bottom, as fractions of the picture.
    """
    rows = _check_shape(outputs, (1, 1, None, 7), "ssd")[0, 0, :ROWS]
    made = nothing()
    made[: len(rows)] = rows[:, [1, 2, 4, 3, 6, 5]]
    return made


def yolonas(outputs: Sequence[Array], width: int, height: int) -> Array:
    """Decode one output [n, 7], flat.

    A row is number of the picture, left, top, right, bottom in pixels, score, class.
    """
    rows = _check_shape(outputs, (None, 7), "yolonas")[:ROWS]
    ends = np.flatnonzero(rows[:, 6] < 0)  # A negative class begins the padding
    rows = rows[: ends[0]] if len(ends) else rows
    return _rows(rows[:, 6], rows[:, 5], rows[:, 1:5], width, height)


def yolox(outputs: Sequence[Array], width: int, height: int) -> Array:
    """Decode one output [1, n, 5 + classes].

    A row is middle and size in cells, objectness, and a score for each class.
    """
    found = _check_shape(outputs, (1, None, None), "yolox")[0].astype(np.float32)
    grid, strides = _cells(width, height)
    if len(found) != len(grid) or found.shape[1] < 6:
        raise InvalidArgument(
            f"a yolox model for {width}x{height} pixels gives [1, {len(grid)}, 5 + classes] and this one "
            f"{list(outputs[0].shape)}; correct width, height or model_type of Frigate's model"
        )
    with np.errstate(over="ignore"):  # A wild size is an infinite box
        found[:, :2] = (found[:, :2] + grid) * strides
        found[:, 2:4] = np.exp(found[:, 2:4]) * strides
    scores = found[:, 4:5] * found[:, 5:]
    classes = scores.argmax(axis=1)
    return _best_rows(_corners(found), scores[np.arange(len(classes)), classes], classes, width, height)


def yolo_generic(outputs: Sequence[Array], width: int, height: int) -> Array:
    """Decode one output [1, 4 + classes, n] or [1, n, 4 + classes], or YOLOv7's three."""
    if len(outputs) > 1:
        return _three_grids(outputs, width, height)
    found = np.squeeze(outputs[0])
    if found.ndim != 2 or min(found.shape) < 5:
        raise InvalidArgument(
            f"a yolo-generic model gives [1, 4 + classes, n] and this one {list(outputs[0].shape)}; "
            "correct model_type of Frigate's model"
        )
    found = (found.T if found.shape[0] < found.shape[1] else found).astype(np.float32)
    found = found[found[:, 4:].max(axis=1) > SCORE]
    scores = found[:, 4:].max(axis=1)
    return _best_rows(_corners(found), scores, found[:, 4:].argmax(axis=1), width, height)


def _three_grids(outputs: Sequence[Array], width: int, height: int) -> Array:
    """Decode YOLOv7's outputs [1, 3 * (5 + classes), rows, columns], one for each stride."""
    if len(outputs) != len(_STRIDES) or any(out.ndim != 4 or out.shape[1] % 3 for out in outputs):
        raise InvalidArgument(
            "a yolo-generic model gives one output, or three of [1, 3 * (5 + classes), rows, columns], and "
            f"this one {[list(out.shape) for out in outputs]}; correct model_type of Frigate's model"
        )
    boxes, scores, classes = [], [], []
    for output, stride, anchors in zip(outputs, _STRIDES, _ANCHORS, strict=True):
        rows, columns = output.shape[2:]
        found = output[0].reshape(3, -1, rows, columns).transpose(0, 2, 3, 1).astype(np.float32)
        if found.shape[3] < 6:
            raise InvalidArgument(f"an output of {list(output.shape)} has no classes; correct model_type")
        kinds = found[..., 5:].argmax(axis=3)
        sure = found[..., 5:].max(axis=3) * found[..., 4]
        anchor, y, x = np.nonzero(sure >= SCORE)
        cell = found[anchor, y, x]
        middle = (cell[:, :2] * 2 - 0.5 + np.stack([x, y], axis=1)) * stride
        size = (cell[:, 2:4] * 2) ** 2 * np.array(anchors)[anchor]
        low, high = np.maximum(middle - size / 2, 0), np.minimum(middle + size / 2, (width, height))
        boxes.append(np.concatenate([low, high], axis=1))
        scores.append(sure[anchor, y, x])
        classes.append(kinds[anchor, y, x])
    together = np.concatenate(boxes), np.concatenate(scores), np.concatenate(classes)
    return _best_rows(*together, width, height)


def _cells(width: int, height: int) -> tuple[Array, Array]:
    """Return column and row of each cell of the three grids, [n, 2], and the stride of each, [n, 1]."""
    grids = []
    strides = []
    for stride in _STRIDES:
        columns, rows = np.meshgrid(np.arange(width // stride), np.arange(height // stride))
        grids.append(np.stack([columns, rows], axis=2).reshape(-1, 2))
        strides.append(np.full((columns.size, 1), stride))
    return np.concatenate(grids), np.concatenate(strides)


def _corners(boxes: Array) -> Array:
    """Return left, top, right, bottom of boxes given by middle and size."""
    half = boxes[:, 2:4] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _best_rows(boxes: Array, scores: Array, classes: Array, width: int, height: int) -> Array:
    kept = best(boxes, scores, ROWS)
    return _rows(classes[kept], scores[kept], boxes[kept], width, height)


def _rows(classes: Array, scores: Array, boxes: Array, width: int, height: int) -> Array:
    """Return the detections of at most ROWS boxes, [n, 4]: left, top, right, bottom in pixels."""
    made = nothing()
    count = len(boxes)
    made[:count, 0] = classes
    made[:count, 1] = scores
    made[:count, 2:] = boxes[:, [1, 0, 3, 2]] / np.array([height, width, height, width])
    return made


def _check_shape(outputs: Sequence[Array], shape: tuple[int | None, ...], kind: str) -> Array:
    """Return the only output; raise InvalidArgument if there are several, or it has another shape."""
    shapes = [list(output.shape) for output in outputs]
    right = len(outputs) == 1 and outputs[0].ndim == len(shape)
    if not right or any(want not in (None, have) for want, have in zip(shape, outputs[0].shape, strict=True)):
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise InvalidArgument(
            f"a {kind} model gives one output [{wanted}] and this one {shapes}; correct model_type of "
            "Frigate's model, or export the model anew"
        )
    return outputs[0]


_DECODERS: Final[Mapping[str, Decoder]] = {
    "ssd": ssd,
    "yolonas": yolonas,
    "yolox": yolox,
    "yologeneric": yolo_generic,
}
