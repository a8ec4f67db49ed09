"""Tokens a second of decoders: `python -m benchmarks.generating MODEL.onnx... [--tokens N] [--prompt N]`.

Each model generates greedily in a sequence of a service of its own, by ONNX Runtime, and, in turns of 16
tokens, in ONNX Runtime with its defaults and its cache in the app. Its threads are still busy for a while
after a run, so that turns of one token would measure those. Shown are medians, their ratio, and the bytes
that cross the socket. The models are those of `benchmarks.decoders`, or others in Optimum's or
onnxruntime-genai's convention.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
from numpy.typing import NDArray

from honed.runtime.client import Client

from .serving import service

_CONFIG = '[serve]\nengine = "onnxruntime"\n[tuner]\nspawn = false\n[sequences]\nmax_mib = 2048\n'
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_VOCABULARY = 100  # tokens of the prompt are below
_TURNS = 3
_BLOCK = 16
_QUIET = 0.05  # seconds of processor time within one
_ALLOWED = 0.05  # of the largest value: products in int8 depend on the threads
Array = NDArray[Any]


class _InApp:
    """A decoder whose cache the app has, as arrays."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        given = {each.name: each for each in self._session.get_inputs()}
        self._names = given.keys()
        self._outputs = [each.name for each in self._session.get_outputs()]
        self._state: Mapping[str, Array] = {
            name: np.zeros(_begins(each.shape), _TYPES[each.type])
            for name, each in given.items()
            if name.startswith("past")
        }
        self._tokens = 0

    def step(self, ids: Array) -> Array:
        """Return the logits of tokens [1, n]."""
        before, self._tokens = self._tokens, self._tokens + ids.shape[1]
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones((1, self._tokens), np.int64),
            "position_ids": np.arange(before, self._tokens)[None],
        }
        feed = {name: value for name, value in feed.items() if name in self._names}
        found = dict(zip(self._outputs, self._session.run(None, {**feed, **self._state}), strict=True))
        self._state = {name: found[name.replace("past_key_values", "present")] for name in self._state}
        logits: Array = found["logits"]
        return logits


def _begins(shape: list[int | str]) -> list[int]:
    """Return the shape of an empty cache for one sequence."""
    return [size if isinstance(size, int) else int(not axis) for axis, size in enumerate(shape)]


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generating", description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128)
    options = parser.parse_args()
    print("| model | | honed, ms | in the app, ms | times as fast | bytes |")
    print("|---|---|---|---|---|---|", flush=True)
    for path in options.models:
        with (
            tempfile.TemporaryDirectory(prefix="honed-generating-") as folder,
            service(Path(folder), _CONFIG) as client,
        ):
            client.add(path, name="m", engine="onnxruntime")
            measured = _measured(client, path, options.prompt, options.tokens)
        for what, own, app, nbytes in measured:
            name = path.parent.name
            print(f"| {name} | {what} | {own:.2f} | {app:.2f} | {app / own:.2f} | {nbytes} |", flush=True)


def _quiet() -> None:
    """Wait until the service has looked at what it was given."""
    while True:
        before = _spent()
        time.sleep(1.0)
        if _spent() - before < _QUIET:
            return


def _spent() -> float:
    """Return the processor time of all children that there are, in seconds."""
    spent = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent += sum(child.cpu_times()[:2])
    return spent


def _measured(client: Client, path: Path, prompt: int, tokens: int) -> list[tuple[str, float, float, int]]:
    """Return milliseconds of a prompt and of a token, by honed and in the app, and the bytes of each."""
    times: dict[str, tuple[list[float], list[float]]] = {"prompt": ([], []), "token": ([], [])}
    nbytes: dict[str, int] = {}
    _quiet()
    for turn in range(_TURNS):
        ids = np.random.default_rng(turn).integers(1, _VOCABULARY, (1, prompt))
        app = _InApp(path)
        with client.sequence("m") as sequence:
            for done in range(0, tokens, _BLOCK):
                given, found = [], []
                for step in range(done, min(done + _BLOCK, tokens)):
                    begun = time.perf_counter()
                    logits = sequence.infer({"input_ids": ids}, last_token=True)["logits"]
                    what = "token" if step else "prompt"
                    times[what][0].append(time.perf_counter() - begun)
                    nbytes[what] = logits.nbytes + ids.nbytes
                    given.append(ids)
                    found.append(logits)
                    ids = logits[:, -1:].argmax(-1)
                for at, (each, logits) in enumerate(zip(given, found, strict=True)):
                    begun = time.perf_counter()
                    expected = app.step(each)[:, -1:]
                    times["token" if done + at else "prompt"][1].append(time.perf_counter() - begun)
                    if float(np.abs(logits - expected).max()) > _ALLOWED * float(np.abs(expected).max()):
                        raise SystemExit(f"{path}: the answers of step {done + at} differ")
    return [
        (what, 1e3 * float(np.median(own)), 1e3 * float(np.median(app_times)), nbytes[what])
        for what, (own, app_times) in times.items()
    ]


if __name__ == "__main__":
    main()
