"""Requests in many shapes: `python -m benchmarks.shapes [MODEL.onnx INPUT=1,3,48,a ...]`.

A service of its own, on the best OpenCL device, serves a model with open sizes: letters in the shapes of its
inputs; by default, a LightGlue with two open numbers of points. Sizes of requests are drawn from a range, one
for each letter and all different; each request runs in turns with ONNX Runtime in this process, and every
answer is compared with that. Some sizes are common; after a pause the common ones are requested again. Ratios
are those of whole requests, including the socket, and of their runs alone, over ONNX Runtime's runs. Other
load on the machine is not excluded.
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
from honed.onnxfile.reading import forget_names
from honed.runtime.client import Client
from honed.tuner import lightglue

_FIRST, _SHARE = 1.2, 0.3  # Largest ratio of a first answer; share of common pairs
_SIZE = 64
_TOLERANCE = 1e-3  # Share of the largest value of an output
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
Sizes = tuple[int, ...]  # Sizes of the letters, in order
Shapes = dict[str, tuple[str, ...]]  # Shapes of inputs: numbers, and letters for open sizes
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its milliseconds, those of its run in the service, and ONNX Runtime's."""

    sizes: Sizes
    new: bool
    honed_ms: float
    run_ms: float
    onnxruntime_ms: float
    engine: str
    error: float

    @property
    def ratio(self) -> float:
        """The service's time over ONNX Runtime's."""
        return self.honed_ms / self.onnxruntime_ms


def main() -> int:
    """Run the command line; 1 where an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("shapes", nargs="*", metavar="INPUT=SHAPE")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--least", type=int, default=50, help="size that is drawn (50)")
    parser.add_argument("--most", type=int, default=400, help="(400)")
    parser.add_argument("--common", type=int, default=2, help="sets of sizes that come again and again (2)")
    parser.add_argument("--idle", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--settled", action="store_true", help="begin when the model itself is compiled")
    parser.add_argument("--tune", action="store_true", help="with the service's tuner in idle time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model, shapes = _lightglue() if options.model is None else _given(options.model, options.shapes)
    letters = sorted({size for shape in shapes.values() for size in shape if size.isalpha()})
    draw = _Draw(len(letters), options.least, options.most, options.common)
    with (
        tempfile.TemporaryDirectory(prefix="honed-shapes-") as folder,
        service(
            Path(folder), _CONFIG.format(requests=5, quiet=2.0, tuner=str(options.tune).lower())
        ) as client,
    ):
        file = Path(folder) / "model.onnx"
        file.write_bytes(model)
        client.add(file, shapes=_first(shapes) if options.settled else None, wait=options.settled)
        both = _Both(client, model, shapes, letters)
        asked = [both.ask(draw.sizes()) for _ in range(options.requests)]
        _wait(client, options.idle, options.common, tune=options.tune)
        again = [both.ask(sizes) for _ in range(20) for sizes in draw.common]
        variants = client.show("model")["variants"]
    _print(asked, again, variants, as_json=options.json)
    return int(max(each.error for each in (*asked, *again)) > _TOLERANCE)


def _lightglue() -> tuple[bytes, Shapes]:
    width = str(lightglue.WIDTH)
    shapes: Shapes = {f"kpts{i}": ("1", size, "2") for i, size in enumerate("ab")}
    shapes |= {f"desc{i}": ("1", size, width) for i, size in enumerate("ab")}
    return lightglue.build(None).SerializeToString(), shapes


def _given(file: Path, shapes: Sequence[str]) -> tuple[bytes, Shapes]:
    parsed = (each.partition("=") for each in shapes)
    return file.read_bytes(), {name: tuple(shape.split(",")) for name, _, shape in parsed}


def _first(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the model is compiled for first."""
    return {name: tuple(_SIZE if n.isalpha() else int(n) for n in shape) for name, shape in shapes.items()}


class _Draw:
    """Sets of sizes; the same every time."""

    def __init__(self, letters: int, least: int, most: int, common: int) -> None:
        self._random = np.random.default_rng(0)
        self._range, self._letters = (least, most + 1), letters
        self.common = [self._any() for _ in range(common)]

    def sizes(self) -> Sizes:
        """Return one of the common sets with probability _SHARE, else any."""
        if self._random.random() < _SHARE:
            return self.common[self._random.integers(len(self.common))]
        return self._any()

    def _any(self) -> Sizes:
        drawn = self._random.choice(np.arange(*self._range), self._letters, replace=False)
        return tuple(int(size) for size in drawn)


class _Both:
    """Asks the service and ONNX Runtime in turns."""

    def __init__(self, client: Client, model: bytes, shapes: Shapes, letters: Sequence[str]) -> None:
        self._client, self._shapes, self._letters = client, shapes, letters
        settings = onnxruntime.SessionOptions()
        # Spinning threads would take the cores from the service after each run.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(
            _unnamed(model), settings, providers=["CPUExecutionProvider"]
        )
        self._random = np.random.default_rng(1)
        self._seen: set[Sizes] = set()
        self._first = itertools.cycle((True, False))

    def ask(self, sizes: Sizes) -> Asked:
        inputs = self._inputs(sizes)
        new = sizes not in self._seen
        self._seen.add(sizes)
        if next(self._first):
            answer, honed_ms = _timed(lambda: self._client.infer_response("model", inputs))
            expected, own_ms = _timed(lambda: self._session.run(None, inputs))
        else:
            expected, own_ms = _timed(lambda: self._session.run(None, inputs))
            answer, honed_ms = _timed(lambda: self._client.infer_response("model", inputs))
        names = [output.name for output in self._session.get_outputs()]
        error = max(_error(answer.outputs[name], value) for name, value in zip(names, expected, strict=True))
        return Asked(sizes, new, honed_ms, answer.compute_us / 1e3, own_ms, answer.engine, error)

    def _inputs(self, sizes: Sizes) -> Arrays:
        """Return normal values; 0 and 1 for integers, which are words or masks."""
        known = dict(zip(self._letters, sizes, strict=True))
        inputs: Arrays = {}
        for given in self._session.get_inputs():
            shape = [known.get(size) or int(size) for size in self._shapes[given.name]]
            if given.type == "tensor(float)":
                inputs[given.name] = self._random.standard_normal(shape).astype(np.float32)
            else:
                inputs[given.name] = self._random.integers(0, 2, shape, np.int64)
        return inputs


def _unnamed(model: bytes) -> bytes:
    """Return the model without names of sizes: ONNX Runtime takes those of one name to be one size."""
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
    """Wait until the common pairs have variants, at most `seconds`; with a tuner always `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not tune and len(client.show("model")["variants"]) >= common:
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
    _row("new sizes", [each for each in asked if each.new][1:])
    _row("sizes seen before", [each for each in asked if not each.new])
    for sizes in sorted({each.sizes for each in again}):
        shown = " x ".join(map(str, sizes))
        _row(f"{shown} after idle time", [each for each in again if each.sizes == sizes])
    for variant in variants:
        print(f"{variant['name']}: {variant['state']}, {variant['engine']}: {variant['why']}")


def _row(what: str, asked: Sequence[Asked]) -> None:
    if not asked:
        return
    ratios = sorted(each.ratio for each in asked)
    engines = ", ".join(sorted({each.engine for each in asked}))
    slow = sum(ratio > _FIRST for ratio in ratios)
    runs = median(each.run_ms / each.onnxruntime_ms for each in asked)
    print(
        f"{what}: {len(asked)} requests by {engines}, {median(each.honed_ms for each in asked):.1f} ms, "
        f"{median(ratios):.2f} times ONNX Runtime (worst {ratios[-1]:.2f}, {slow} above {_FIRST}), "
        f"the run alone {runs:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
