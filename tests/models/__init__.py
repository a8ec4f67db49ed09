"""Real models with trained weights (sources.txt says whose), and pictures to show them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent


def path(name: str) -> Path:
    """The file of a model by its name without `.onnx`."""
    return FOLDER / f"{name}.onnx"


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
