"""Listens with a model that has state, which the service keeps: `python3 voice.py MODEL SECONDS`.

For models that take a frame `input` and its rate `sr`, as silero_vad.onnx does.
"""

from __future__ import annotations

import sys

import numpy as np

from honed.runtime import Client

RATE, FRAME = 16_000, 512  # samples a second, and in a frame


def main(model: str, seconds: float) -> None:
    """Tell for each frame of a made-up sound how sure the model is that somebody speaks."""
    sound = np.random.default_rng(0).normal(scale=0.1, size=int(seconds * RATE)).astype(np.float32)
    frames = sound[: len(sound) // FRAME * FRAME].reshape(-1, 1, FRAME)
    rate = np.array(RATE, np.int64)
    with Client() as client, client.sequence(model) as sequence:
        for frame in frames:
            outputs = sequence.infer({"input": frame, "sr": rate})
            print(f"{outputs['output'].item():.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
