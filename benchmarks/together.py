"""Sequences that generate at once: `python -m benchmarks.together MODEL.onnx [--tokens N] [--sequences N]`.

Two services serve the model by compiled forms with room for 256 tokens, or with `--engine onnxruntime` by
that: one runs steps of several sequences as one, the other one by one. `hone bench --tokens` measures both in
turns. Shown are tokens a second of all sequences, medians of the turns, and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from honed.daemon.features.decoding import FORMS, JOINT, Decoder, Form
from honed.runtime.client import Client

from .forms import decoder_in
from .serving import service

_QUIET, _BUSY = "quiet_seconds = 0.2", "quiet_seconds = 86400"
_CONFIG = f"""
[serve]
engine = "fastest"
[tuner]
spawn = false
[sequences]
max_mib = 2048
[variants]
memory_mib = 8192
requests = 1000000
[idle]
{_QUIET}
settle_seconds = 0
max_pressure_percent = 100
max_load_per_core = 1000
"""
_ROOM = 256
_TURNS = 5
_DECIDED = re.compile("from now on|take longer than one by one|is not used")
_SECONDS = 600.0  # for the service to have compared its forms with ONNX Runtime


def main() -> None:
    """Print a row for each number of sequences."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.together", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engine", choices=("opencl", "onnxruntime"), default="opencl")
    options = parser.parse_args()
    known = decoder_in(options.model)
    single = [form for form in FORMS if form.capacity == _ROOM]
    joint = [form for form in JOINT if form.capacity == _ROOM]
    with ExitStack() as opened:
        if options.engine == "opencl":
            sockets = [_compiled(opened, options.model, known, each) for each in (single, [*single, *joint])]
        else:
            sockets = [_by_file(opened, options.model, compares=each) for each in (False, True)]
        print("| model | sequences | one by one, tokens/s | as one, tokens/s | times as fast |")
        print("|---|---|---|---|---|", flush=True)
        for count in options.sequences:
            found: list[list[float]] = [[], []]
            for _ in range(_TURNS):
                for socket, rates in zip(sockets, found, strict=True):
                    rates.append(_rate(socket, options.tokens, options.prompt, count))
            apart, together = map(median, found)
            row = f"{count} | {apart:.1f} | {together:.1f} | {together / apart:.2f}"
            print(f"| {options.model.parent.name} | {row} |", flush=True)


def _compiled(opened: ExitStack, path: Path, known: Decoder, forms: Sequence[Form]) -> Path:
    """Return the socket of a service that serves the model by these forms."""
    folder, client = _service(opened, _CONFIG)
    client.add(path, name="m", variants=[known.shapes(form) for form in forms])
    for variant in client.show("m")["variants"]:
        client.pin(variant["name"], engine="opencl")
    _wait_decided(folder, len(forms))
    return folder / "s"


def _by_file(opened: ExitStack, path: Path, *, compares: bool) -> Path:
    """Return the socket of a service that runs steps as one only where it `compares` their times."""
    folder, client = _service(opened, _CONFIG if compares else _CONFIG.replace(_QUIET, _BUSY))
    client.add(path, name="m", engine="onnxruntime")
    for count in (2, 4) if compares else ():  # steps that overlap
        _rate(folder / "s", 8, 8, count)
    _wait_decided(folder, 2 if compares else 0)
    return folder / "s"


def _service(opened: ExitStack, config: str) -> tuple[Path, Client]:
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="honed-together-")))
    return folder, opened.enter_context(service(folder, config))


def _wait_decided(folder: Path, count: int) -> None:
    """Return once the service has decided on so many forms."""
    end = time.monotonic() + _SECONDS
    while len(_DECIDED.findall(log := (folder / "log").read_text())) < count:
        if time.monotonic() > end:
            raise SystemExit(f"the forms do not serve:\n{log}")
        time.sleep(1.0)


def _rate(socket: Path, tokens: int, prompt: int, sequences: int) -> float:
    """Return how many tokens a second all sequences had together."""
    command = [sys.executable, "-m", "honed.tool.main", f"--socket={socket}", "bench", "m", "--json"]
    command += [f"--tokens={tokens}", f"--prompt={prompt}", f"--sequences={sequences}"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if len(found["engines"]) != 1:
        raise SystemExit(f"several engines answered: {found['engines']}")
    rate: float = found["tokens_per_second"]
    return rate


if __name__ == "__main__":
    main()
