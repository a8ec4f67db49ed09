"""The real models with trained weights that lie beside the repository, and pictures to show them.

The models are test data and no part of the package: a test that needs one calls `path`, which skips it and
says so where the file is not there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "models"


def path(name: str) -> Path:
    """The file of a model by its name without `.onnx`; skips the test where it is not there."""
    file = SHARED / f"{name}.onnx"
    if not file.is_file():
        pytest.skip(f"{file} is not there; the models are handed out beside the repository")
    return file


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """A made-up photograph: float32 [3, height, width] in 0..255, with shading, shapes, edges and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    tilt = rng.uniform(-1, 1, (3, 2, 1, 1))
    image = 0.5 + 0.3 * (tilt[:, 0] * (x - 0.5) + tilt[:, 1] * (y - 0.5))
    for _ in range(12):
        centre, size, colour = rng.uniform(0, 1, 2), rng.uniform(0.04, 0.3, 2), rng.uniform(0, 1, (3, 1))
        distance = ((x - centre[0]) / size[0]) ** 2 + ((y - centre[1]) / size[1]) ** 2
        image[:, distance < 1] = colour + 0.2 * (distance[distance < 1] - 0.5)
    image += rng.normal(0, 0.01, image.shape)
    return np.asarray(np.clip(255 * image, 0, 255), np.float32)
