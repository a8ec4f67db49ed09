"""Adds five models as a user does: measures them when first served, and after a short time of tuning."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from .hone import Failed, Service, hone

_FOLDER = Path(__file__).parents[2] / "tests" / "models"
_MODELS = (
    ("mobilenet", "mobilenet_v2_035_128.onnx", "--shape=input_1=1,3,128,128"),
    ("squeezenet", "squeezenet_fp16.onnx", ""),
    ("super-resolution", "super_resolution.onnx", ""),
    ("yolox-nano", "yolox_nano.onnx", ""),
    ("lightglue", "", ""),  # Written by `hone demo`
)
_RUNS = 10
# Seconds of tuning that are worth beginning: it makes and times every default schedule first, which takes
# up to twice as long as adding the model did (MobileNet on PoCL, on two busy cores).
_LEAST, _BASELINE = 40.0, 2.0
_FEW = 60.0  # Seconds for short commands, and for ending what was begun


@dataclass(slots=True, kw_only=True)
class Served:
    """The results for a model: seconds until it was served, milliseconds of an inference at first and tuned.

    `text` is the tuner's summary, or what failed.
    """

    name: str
    added_s: float | None = None
    first_ms: float | None = None
    trials: int | None = None
    tuned_ms: float | None = None
    text: str = ""


def measure(service: Service, seconds: float) -> list[Served]:
    """Add all models, then tune them as time permits, those first that need least of it.

    Adding a model may take half of the time, so that on a slow machine another has its turn.
    """
    end = time.monotonic() + seconds
    found = [_served(service, *model, end, seconds / 2) for model in _MODELS]
    waiting = sorted((one.added_s or 0.0, one.name, one) for one in found if one.first_ms is not None)
    for n, (added, _, one) in enumerate(waiting):
        # The result of tuning is compiled and compared afterwards, which takes about as long as adding did.
        left = end - time.monotonic() - added
        least = _LEAST + _BASELINE * added
        if left < least:
            one.text = "no time was left to tune it"
            continue
        try:
            _tune(service, one, max(least, left / (len(waiting) - n)), end)
        except Failed as failed:
            one.text = str(failed)
    return found


def _served(service: Service, name: str, file: str, shape: str, end: float, longest: float) -> Served:
    found = Served(name=name)
    left = min(longest, end - time.monotonic())
    if left <= 0:
        found.text = "no time was left for it"
        return found
    path = _FOLDER / file if file else service.folder / f"{name}.onnx"
    try:
        if not file:
            hone("demo", name, f"--output={path}", seconds=left)
        began = time.monotonic()
        service("add", str(path), f"--name={name}", *filter(None, [shape]), seconds=left)
        found.added_s = time.monotonic() - began
        found.first_ms = _bench(service, name, end)
    except Failed as failed:
        found.text = str(failed)
    return found


def _tune(service: Service, found: Served, enough: float, end: float) -> None:
    closing = _at_least_few(end - time.monotonic() - enough)
    tuned = service("tune", found.name, seconds=closing, enough=enough)
    found.trials, found.text = int(tuned["trials"]), str(tuned["sentence"])
    found.tuned_ms = _bench(service, found.name, end)


def _bench(service: Service, name: str, end: float) -> float:
    left = _at_least_few(end - time.monotonic())
    return float(service("bench", name, f"--runs={_RUNS}", seconds=left)["median_ms"])


def _at_least_few(seconds: float) -> float:
    return max(_FEW, seconds)
