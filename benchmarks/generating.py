"""Tokens a second of decoders: `python -m benchmarks.generating MODEL.onnx... [--tokens N] [--prompt N]`.

Each model generates greedily in a sequence of a service of its own, by ONNX Runtime, and, in turns of 16
tokens, in ONNX Runtime with its defaults and its cache in the app. Its threads spin for a while after a run,
so turns of one token would measure those. Prints medians, their ratio, and the bytes that cross the socket.
The models are those of `benchmarks.decoders`, or others in Optimum's or onnxruntime-genai's convention. With
`--encoder FILE` the model attends to the encoder's output for a made-up input, as Whisper's merged decoder
does: 30 s of audio are [1, 80, 3000].
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
_VOCABULARY = 100  # Tokens of the prompt are below
_TURNS = 3
_BLOCK = 16
_QUIET = 0.05  # Seconds of processor time within one
_ALLOWED = 0.05  # Share of the largest value: products in int8 depend on the threads
_AUDIO = (1, 80, 3000)  # Whisper's features of 30 s
Array = NDArray[Any]
_Row = tuple[str, float, float, int]  # Model, ms by honed, ms in the app, bytes over the socket


class _InApp:
    """A decoder whose cache the app has, as arrays."""

    def __init__(self, path: Path, hidden: Array | None) -> None:
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
        self._tokens, self._hidden = 0, hidden

    def step(self, ids: Array) -> Array:
        """Return the logits of tokens [1, n]."""
        before, self._tokens = self._tokens, self._tokens + ids.shape[1]
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones((1, self._tokens), np.int64),
            "position_ids": np.arange(before, self._tokens)[None],
            "encoder_hidden_states": self._hidden,
            "use_cache_branch": np.array([before > 0]),
        }
        feed = {name: value for name, value in feed.items() if name in self._names}
        found = dict(zip(self._outputs, self._session.run(None, {**feed, **self._state}), strict=True))
        self._state = {
            # The encoder's keys and values stay.
            name: found[name.replace("past_key_values", "present")]
            if not before or ".encoder." not in name
            else value
            for name, value in self._state.items()
        }
        logits: Array = found["logits"]
        return logits


def _begins(shape: list[int | str]) -> list[int]:
    """Return the shape of an empty cache for one sequence."""
    return [size if isinstance(size, int) else int(not axis) for axis, size in enumerate(shape)]


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generating", description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--encoder", type=Path)
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
            hidden: Array | None = None
            measured: list[_Row] = []
            if options.encoder is not None:
                client.add(options.encoder, name="e", engine="onnxruntime")
                hidden, measured = _encoded(client, options.encoder)
            measured += _measured(client, path, hidden, options.prompt, options.tokens)
        for what, own, app, nbytes in measured:
            name = path.parent.name
            print(f"| {name} | {what} | {own:.2f} | {app:.2f} | {app / own:.2f} | {nbytes} |", flush=True)


def _quiet() -> None:
    """Wait until the service has examined the added model."""
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


def _encoded(client: Client, path: Path) -> tuple[Array, list[_Row]]:
    """Return what the encoder gives, and how long it takes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    shape = [size if isinstance(size, int) else _AUDIO[axis] for axis, size in enumerate(given.shape)]
    features = {given.name: np.random.default_rng(0).standard_normal(shape).astype(_TYPES[given.type])}
    times: tuple[list[float], list[float]] = ([], [])
    _quiet()
    for _ in range(_TURNS):
        begun = time.perf_counter()
        hidden = next(iter(client.infer("e", features).values()))
        middle = time.perf_counter()
        expected = session.run(None, features)[0]
        times[0].append(middle - begun)
        times[1].append(time.perf_counter() - middle)
        _check(hidden, expected, "the encoder")
    return expected, [_row("encoder", times, features[given.name].nbytes + hidden.nbytes)]


def _check(found: Array, expected: Array, what: str) -> None:
    if float(np.abs(found - expected).max()) > _ALLOWED * float(np.abs(expected).max()):
        raise SystemExit(f"the answers of {what} differ")


def _row(what: str, times: tuple[list[float], list[float]], nbytes: int) -> _Row:
    own, app = (1e3 * float(np.median(each)) for each in times)
    return what, own, app, nbytes


def _measured(client: Client, path: Path, hidden: Array | None, prompt: int, tokens: int) -> list[_Row]:
    """Return the rows of a prompt and of a token."""
    times: dict[str, tuple[list[float], list[float]]] = {"prompt": ([], []), "token": ([], [])}
    nbytes: dict[str, int] = {}
    _quiet()
    for turn in range(_TURNS):
        ids = np.random.default_rng(turn).integers(1, _VOCABULARY, (1, prompt))
        app = _InApp(path, hidden)
        more = {} if hidden is None else {"encoder_hidden_states": hidden}
        with client.sequence("m") as sequence:
            for done in range(0, tokens, _BLOCK):
                given, found = [], []
                for step in range(done, min(done + _BLOCK, tokens)):
                    begun = time.perf_counter()
                    logits = sequence.infer({"input_ids": ids, **more}, last_token=True)["logits"]
                    what = "token" if step else "prompt"
                    times[what][0].append(time.perf_counter() - begun)
                    nbytes[what] = logits.nbytes + ids.nbytes + sum(each.nbytes for each in more.values())
                    more = {}
                    given.append(ids)
                    found.append(logits)
                    ids = logits[:, -1:].argmax(-1)
                for at, (each, logits) in enumerate(zip(given, found, strict=True)):
                    begun = time.perf_counter()
                    expected = app.step(each)[:, -1:]
                    times["token" if done + at else "prompt"][1].append(time.perf_counter() - begun)
                    _check(logits, expected, f"step {done + at}")
    return [_row(what, each, nbytes[what]) for what, each in times.items()]


if __name__ == "__main__":
    main()
