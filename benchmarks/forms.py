"""Compiled forms of decoders beside ONNX Runtime.

python -m benchmarks.forms MODEL.onnx... [--room N] [--kernels]

A step of one token and the longest that the device has a form for, with half of the room taken, by kernels
that need no trial and by ONNX Runtime with its defaults, in turns: medians, the ratio, and how far the logits
are apart. With `--kernels`, where the time of a form goes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime

from honed.cpu.session import Session
from honed.daemon.features.decoding import DecoderBucket, DecoderModel, decoder_of, longest_chunk
from honed.daemon.worker.step_inputs import StepSize
from honed.daemon.worker.steps import growth
from honed.machine.devices import select

from .running import Arrays, apart, first_served, in_turns, normalised, ready

_TURNS = 30
_VOCABULARY = 100  # Made-up tokens are below


def main() -> None:
    """Print a row for each model and form."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forms", description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--room", type=int, default=256)
    parser.add_argument("--kernels", action="store_true", help="print what each kernel takes, in us")
    options = parser.parse_args()
    print("| model | tokens | launches | the form, ms | ONNX Runtime, ms | times as fast | apart |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for path in options.models:
        known = decoder_in(path)
        for tokens in (1, longest_chunk(select(None).profile)):
            form = DecoderBucket(tokens, max(options.room, 2 * tokens))
            for line in _lines(path, known, form, kernels=options.kernels):
                print(line, flush=True)


def decoder_in(path: Path) -> DecoderModel:
    """Return the decoder in a file; raise SystemExit if it has no compiled forms."""
    known = decoder_of(Session(path, 1).interface, {})
    if known is None or not known.has_forms:
        raise SystemExit(f"{path} is no decoder that has forms")
    return known


def _lines(path: Path, known: DecoderModel, form: DecoderBucket, *, kernels: bool) -> Iterator[str]:
    device, before = select(None), form.capacity // 2
    model = normalised(path, device.profile, known.shapes(form))
    growing = growth(known.state_tensors(StepSize(1, form.tokens, 0)))
    state, given, whole = values(known, form, before)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    with ready(model, first_served(model, device.profile), device) as executor:
        executor.restore(growing, state)
        found = executor.step(given, growing, before, form.tokens)
        expected = dict(zip(names, session.run(None, whole | state), strict=True))
        differ = max(apart(expected[name], value) for name, value in found.items())
        times = in_turns(
            {
                "form": lambda: executor.step(given, growing, before, form.tokens),
                "file": lambda: session.run(None, whole | state),
            },
            _TURNS,
        )
        one, other = 1e3 * times["form"], 1e3 * times["file"]
        measured = f"{executor.launches} | {one:.2f} | {other:.2f} | {other / one:.2f} | {differ:.1e}"
        yield f"| {path.parent.name} | {form.tokens} | {measured} |"
        if kernels:
            zeros = {t.name: np.zeros(t.shape, t.dtype) for t in executor.model.inputs}
            for row in executor.profile(zeros | given).kernels:
                yield f"  {row.us:9.1f} {row.count:4d} {row.name} {row.schedule}"


def values(known: DecoderModel, form: DecoderBucket, before: int) -> tuple[Arrays, Arrays, Arrays]:
    """Return made-up state, and the other inputs of a form and of the file, after `before` tokens."""
    rng = np.random.default_rng(0)
    state: Arrays = {}
    for each in known.state_tensors(StepSize(1, form.tokens, 0)):
        shape = [before if axis == each.axis else size for axis, size in enumerate(each.initial_shape)]
        state[each.input] = (0.5 * rng.standard_normal(shape)).astype(each.dtype)
    ids = rng.integers(1, _VOCABULARY, (1, form.tokens))
    after = before + form.tokens
    whole = {
        "input_ids": ids,
        "attention_mask": np.ones((1, after), np.int64),
        "position_ids": np.arange(before, after)[None],
    }
    names = {tensor.name for tensor in known.interface.inputs}
    whole = {name: value for name, value in whole.items() if name in names}
    given = dict(whole)
    for name in whole.keys() & {"attention_mask"}:
        mask = given[name] = np.zeros(known.shapes(form)[name], np.int64)
        mask[0, :before] = 1
        first = before if known.in_place else form.capacity
        mask[0, first : first + form.tokens] = 1
    return state, given, whole


if __name__ == "__main__":
    main()
