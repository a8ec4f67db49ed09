"""Requests in many shapes against a service: `python -m benchmarks.shapes`.

A service of its own, on the best OpenCL device there is, has a LightGlue whose numbers of points are open.
Requests come with numbers drawn from a range, different for both images, each in turns with ONNX Runtime in
this process, and every answer is compared with that. Some numbers are common; then nobody asks for a while,
and the common ones are asked for again. Ratios are those of whole requests, the socket included, over ONNX
Runtime's runs. Everything else on the machine counts as it comes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import onnx
import onnxruntime

from benchmarks.serving import service
from honed.onnxfile.dimensions import forget_names
from honed.runtime.client import Client
from honed.tuner.demo import lightglue

NAME = "lightglue"
_FIRST, _SHARE = 1.2, 0.3  # how slow a first answer may be; of requests that have one of the common pairs
_TOLERANCE = 1e-3  # of the largest value of an output
_CONFIG = """
[serve]
engine = "fastest"
[variants]
requests = {requests}
[idle]
quiet_seconds = {quiet}
settle_seconds = 1
max_pressure_percent = 100
max_load_per_core = 1000
[tuner]
spawn = {tuner}
"""
T = TypeVar("T")
Pair = tuple[int, int]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: milliseconds of the service and of ONNX Runtime, who answered, and the largest error."""

    pair: Pair
    new: bool
    honed_ms: float
    onnxruntime_ms: float
    engine: str
    error: float

    @property
    def ratio(self) -> float:
        """How many times as long the service took."""
        return self.honed_ms / self.onnxruntime_ms


def main() -> int:
    """Run the command line; 1 where an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--least", type=int, default=50, help="points of an image")
    parser.add_argument("--most", type=int, default=400)
    parser.add_argument("--common", type=int, default=2, help="pairs of numbers that come again and again")
    parser.add_argument("--idle", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--tune", action="store_true", help="with the service's tuner in idle time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = lightglue.build(None).SerializeToString()
    draw = _Draw(options.least, options.most, options.common)
    with (
        tempfile.TemporaryDirectory(prefix="honed-shapes-") as folder,
        service(
            Path(folder), _CONFIG.format(requests=5, quiet=2.0, tuner=str(options.tune).lower())
        ) as client,
    ):
        file = Path(folder) / f"{NAME}.onnx"
        file.write_bytes(model)
        client.add(file, wait=False)
        both = _Both(client, model)
        asked = [both.ask(draw.pair()) for _ in range(options.requests)]
        _wait(client, options.idle, options.common, tune=options.tune)
        again = [both.ask(pair) for _ in range(20) for pair in draw.common]
        variants = client.show(NAME)["variants"]
    _print(asked, again, variants, as_json=options.json)
    return int(max(each.error for each in (*asked, *again)) > _TOLERANCE)


class _Draw:
    """Pairs of numbers of points; the same every time."""

    def __init__(self, least: int, most: int, common: int) -> None:
        self._random = np.random.default_rng(0)
        self._range = least, most + 1
        self.common = [self._any() for _ in range(common)]

    def pair(self) -> Pair:
        """One of the common pairs now and then, else any."""
        if self._random.random() < _SHARE:
            return self.common[self._random.integers(len(self.common))]
        return self._any()

    def _any(self) -> Pair:
        one, other = self._random.choice(np.arange(*self._range), 2, replace=False)
        return int(one), int(other)


class _Both:
    """Asks the service and ONNX Runtime in turns."""

    def __init__(self, client: Client, model: bytes) -> None:
        self._client = client
        settings = onnxruntime.SessionOptions()
        # Its threads would take the cores from the service after each run.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(
            _unnamed(model), settings, providers=["CPUExecutionProvider"]
        )
        self._random = np.random.default_rng(1)
        self._seen: set[Pair] = set()
        self._first = itertools.cycle((True, False))

    def ask(self, pair: Pair) -> Asked:
        inputs = self._inputs(pair)
        new = pair not in self._seen
        self._seen.add(pair)
        before = self._answered()
        if next(self._first):
            found, honed_ms = _timed(lambda: self._client.infer(NAME, inputs))
            expected, own_ms = _timed(lambda: self._session.run(None, inputs))
        else:
            expected, own_ms = _timed(lambda: self._session.run(None, inputs))
            found, honed_ms = _timed(lambda: self._client.infer(NAME, inputs))
        after = self._answered()
        engine = next(kind for kind, count in after.items() if count > before.get(kind, 0))
        names = [output.name for output in self._session.get_outputs()]
        error = max(_error(found[name], value) for name, value in zip(names, expected, strict=True))
        return Asked(pair, new, honed_ms, own_ms, engine, error)

    def _answered(self) -> dict[str, int]:
        return dict(self._client.metrics()["models"][0]["engines"])

    def _inputs(self, pair: Pair) -> Arrays:
        inputs: Arrays = {}
        for image, points in enumerate(pair):
            inputs[f"kpts{image}"] = self._random.uniform(-0.9, 0.9, (1, points, 2)).astype(np.float32)
            drawn = self._random.standard_normal((1, points, lightglue.WIDTH))
            inputs[f"desc{image}"] = drawn.astype(np.float32)
        return inputs


def _unnamed(model: bytes) -> bytes:
    """Without the name that both numbers have in the file, which ONNX Runtime takes to be one size."""
    proto = onnx.ModelProto.FromString(model)
    forget_names(proto)
    data: bytes = proto.SerializeToString()
    return data


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    begun = time.perf_counter()
    found = run()
    return found, (time.perf_counter() - begun) * 1e3


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _wait(client: Client, seconds: float, common: int, *, tune: bool) -> None:
    """Until the common pairs have variants, or so long; with a tuner always so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not tune and len(client.show(NAME)["variants"]) >= common:
            return
        time.sleep(2.0)


def _print(
    asked: Sequence[Asked], again: Sequence[Asked], variants: list[dict[str, object]], *, as_json: bool
) -> None:
    if as_json:
        each = {"asked": list(map(asdict, asked)), "again": list(map(asdict, again)), "variants": variants}
        print(json.dumps(each))
        return
    print(f"largest error: {max(each.error for each in (*asked, *again)):.2g} of the largest value")
    _row("a new pair", [each for each in asked if each.new][1:])
    _row("a pair seen before", [each for each in asked if not each.new])
    for pair in sorted({each.pair for each in again}):
        _row(f"{pair[0]} x {pair[1]} after idle time", [each for each in again if each.pair == pair])
    for variant in variants:
        print(f"{variant['name']}: {variant['state']}, {variant['engine']}: {variant['why']}")


def _row(what: str, asked: Sequence[Asked]) -> None:
    if not asked:
        return
    ratios = sorted(each.ratio for each in asked)
    engines = ", ".join(sorted({each.engine for each in asked}))
    slow = sum(ratio > _FIRST for ratio in ratios)
    print(
        f"{what}: {len(asked)} requests by {engines}, {median(each.honed_ms for each in asked):.1f} ms, "
        f"{median(ratios):.2f} times ONNX Runtime (worst {ratios[-1]:.2f}, {slow} above {_FIRST})"
    )


if __name__ == "__main__":
    sys.exit(main())
