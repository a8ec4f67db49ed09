"""How well ONNX Runtime's settings are chosen: `python -m benchmarks.sessions MODEL[:INPUT=SIZES]...`.

A service that is idle gets each model and chooses how ONNX Runtime runs it. Then each setting is run in turns
in this process: with one thread and with all, which spin or not, with and without a memory arena, and the
chosen one optimised less. Printed are medians of a run in milliseconds, of what was chosen over the fastest
and over ONNX Runtime with its defaults. Give it quiet cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime

from benchmarks.engines import made_inputs
from benchmarks.passage.scenario import IDLE
from benchmarks.running import Arrays, in_turns
from benchmarks.serving import service
from honed.jobs.commands import shape
from honed.machine.processors import first_placement, processors
from honed.protocol.results import SessionSettings
from honed.protocol.strict import from_plain
from honed.runtime.client import Client
from honed.runtime.engines import HIGHEST, LEVELS, session_options

_CONFIG = '[serve]\nengine = "onnxruntime"\n' + IDLE.replace("spawn = true", "spawn = false")
_SECONDS = 600.0  # for a choice
Settings = tuple[int, bool, bool, str]  # threads, whether they spin, whether there is an arena, the level


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL[:INPUT=SIZES]...")
    parser.add_argument("--turns", type=int, default=60, help="of each (60)")
    options = parser.parse_args()
    print("| model | chosen | ms | over the fastest | which | over the defaults |\n|---|---|---|---|---|---|")
    for model in options.models:
        file, *given = model.split(":")
        path = Path(file)
        with (
            tempfile.TemporaryDirectory(prefix="honed-sessions-") as folder,
            service(Path(folder), _CONFIG) as client,
        ):
            plain = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            inputs = made_inputs(plain, dict(map(shape, given)), {})
            client.add(path, name="m", shapes={name: one.shape for name, one in inputs.items() if one.shape})
            chosen = _chosen(client)
        print(_row(path, chosen, partial(plain.run, None, inputs), inputs, options.turns), flush=True)
    return 0


def _chosen(client: Client) -> Settings:
    """What the service takes for its model."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        found = client.history("m").get("session")
        checked = client.show("m")["optimisation"]
        if checked is not None and not checked["checked"]:
            raise ValueError(f"the service chooses nothing for it: {checked['why']}")
        if found is not None:
            settings = from_plain(SessionSettings, found, where="session", none_omitted=True)
            threads = settings.threads or _threads()
            return threads, settings.spinning, settings.arena is not False, HIGHEST
        time.sleep(0.5)
    raise TimeoutError(f"nothing was chosen within {_SECONDS:.0f} s")


def _row(path: Path, chosen: Settings, plain: Callable[[], object], inputs: Arrays, turns: int) -> str:
    several = itertools.product((True, False), repeat=2)
    every = {(1, True, True, HIGHEST), (1, True, False, HIGHEST), chosen}
    every |= {(_threads(), spins, arena, HIGHEST) for spins, arena in several}
    every |= {(*chosen[:3], level) for level in LEVELS}
    runs = {"defaults": plain}
    for threads, spinning, arena, level in sorted(every):
        options = session_options(onnxruntime, threads, level, spinning=spinning, arena=arena)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        runs[_named((threads, spinning, arena, level))] = partial(session.run, None, inputs)
    times = in_turns(runs, turns)
    own, default = times[_named(chosen)], times.pop("defaults")
    fastest = min(times, key=times.__getitem__)
    return (
        f"| {path.stem} | {_named(chosen)} | {own * 1e3:.3f} | {own / times[fastest]:.2f} | {fastest} | "
        f"{own / default:.2f} |"
    )


def _threads() -> int:
    return first_placement(processors(Path("/"), os.sched_getaffinity(0))).threads


def _named(settings: Settings) -> str:
    threads, spinning, arena, level = settings
    words = [f"{threads} thread{'s' * (threads > 1)}"]
    words += [] if spinning or threads == 1 else ["that do not spin"]
    words += [] if arena else ["no arena"]
    return ", ".join([*words, *([] if level == HIGHEST else [level])])


if __name__ == "__main__":
    sys.exit(main())
