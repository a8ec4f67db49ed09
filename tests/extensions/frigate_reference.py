"""What Frigate makes of a YOLOX model's answer, written out box by box; shares nothing with the bridge."""

from __future__ import annotations

import math
import sys
from typing import IO, Any, cast

import numpy as np
from matplotlib import cbook
from numpy.typing import NDArray
from PIL import Image

THRESHOLD = 0.4


def photograph(width: int, height: int) -> NDArray[np.float32]:
    """A picture with a person, that comes with Matplotlib: [1, 3, height, width], 0 to 255."""
    with cast("IO[bytes]", cbook.get_sample_data("grace_hopper.jpg")) as file, Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB").resize((width, height)), np.float32)
    return np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1)[None])  # blue first


def yolox(output: NDArray[Any], width: int, height: int) -> NDArray[np.float32]:
    """[20, 6] of [1, n, 85]."""
    boxes, row = [], 0
    for stride in (8, 16, 32):
        for y in range(height // stride):
            for x in range(width // stride):
                values = [float(value) for value in output[0, row]]
                row += 1
                score, kind = max((values[4] * p, -k) for k, p in enumerate(values[5:]))
                middle = ((values[0] + x) * stride, (values[1] + y) * stride)
                size = (math.exp(values[2]) * stride, math.exp(values[3]) * stride)
                low = [m - s / 2 for m, s in zip(middle, size, strict=True)]
                high = [m + s / 2 for m, s in zip(middle, size, strict=True)]
                if score > THRESHOLD:
                    boxes.append((score, -kind, [*low, *high]))
    assert row == output.shape[1]
    made, kept = np.zeros((20, 6), np.float32), list[list[float]]()
    for score, kind, box in sorted(boxes, key=lambda each: -each[0]):
        if len(kept) < 20 and all(shared(box, other) <= THRESHOLD for other in kept):
            made[len(kept)] = kind, score, box[1] / height, box[0] / width, box[3] / height, box[2] / width
            kept.append(box)
    return made


def shared(one: list[float], other: list[float]) -> float:
    """Of two boxes, as Frigate hands them to OpenCV: their corners stand where it wants their sizes."""
    sides = [min(one[i] + one[i + 2], other[i] + other[i + 2]) - max(one[i], other[i]) for i in (0, 1)]
    both = max(sides[0], 0) * max(sides[1], 0)
    areas = one[2] * one[3] + other[2] * other[3]
    return both / (areas - both) if areas > sys.float_info.epsilon else 1.0  # without any area, all are equal
