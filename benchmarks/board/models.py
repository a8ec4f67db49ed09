"""Five models as a user meets them: served at first, tuned for a short time, and served then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .hone import Failed, Service, hone

_FOLDER = Path(__file__).parents[2] / "tests" / "models"
_MODELS = (
    ("mobilenet", "mobilenet_v2_035_128.onnx", "--shape=input_1=1,3,128,128"),
    ("squeezenet", "squeezenet_fp16.onnx", ""),
    ("super-resolution", "super_resolution.onnx", ""),
    ("yolox-nano", "yolox_nano.onnx", ""),
    ("lightglue", "", ""),  # written by `hone demo`
)
_RUNS = 10
_LEAST = 15.0  # seconds that are worth beginning to tune, or to add, for
_LONGEST = 300.0  # seconds one command may take


@dataclass(slots=True, kw_only=True)
class Served:
    """One model: seconds until it was served, milliseconds of an inference at first and tuned.

    What failed says so in `text`, as the tuner says what it won.
    """

    name: str
    added_s: float | None = None
    first_ms: float | None = None
    trials: int | None = None
    tuned_ms: float | None = None
    text: str = ""


def measure(service: Service, seconds: float) -> Iterator[Served]:
    """Each model in its turn, as far as the time goes: what was begun is ended."""
    end = time.monotonic() + seconds
    for n, (name, file, shape) in enumerate(_MODELS):
        found = Served(name=name)
        left = end - time.monotonic()
        try:
            if left < _LEAST:
                raise Failed("no time was left for it")
            _measure(service, found, file, shape, left / (len(_MODELS) - n))
        except Failed as failed:
            found.text = str(failed)
        yield found


def _measure(service: Service, found: Served, file: str, shape: str, seconds: float) -> None:
    path = _FOLDER / file if file else service.folder / f"{found.name}.onnx"
    if not file:
        hone("demo", found.name, f"--output={path}", seconds=_LONGEST)
    began = time.monotonic()
    service("add", str(path), f"--name={found.name}", *filter(None, [shape]), seconds=_LONGEST)
    found.added_s = time.monotonic() - began
    found.first_ms = _bench(service, found.name)
    # What was found is compiled and compared afterwards, which takes about as long as adding did.
    left = seconds - 2 * (time.monotonic() - began)
    if left < _LEAST:
        raise Failed("no time was left to tune it")
    tuned = service("tune", found.name, seconds=_LONGEST, enough=left)
    found.trials, found.text = int(tuned["trials"]), str(tuned["sentence"])
    found.tuned_ms = _bench(service, found.name)


def _bench(service: Service, name: str) -> float:
    return float(service("bench", name, f"--runs={_RUNS}", seconds=_LONGEST)["median_ms"])
