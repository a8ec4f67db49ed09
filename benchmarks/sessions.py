"""How well ONNX Runtime's settings are chosen: `python -m benchmarks.sessions MODEL[:INPUT=SIZES]...`.

A service that is idle gets each model and chooses how ONNX Runtime runs it. Then each setting is run in turns
in this process: with one thread and with all, which spin or not, with and without a memory arena, and the
chosen one optimised less. Two sessions of the same settings differ by where their memory lies: all are made
anew several times. Printed are medians of a run in milliseconds, of what was chosen over the fastest, over
ONNX Runtime with its defaults, and over another session like itself, which is chance. Give it quiet cores:
on others the service does not settle.
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
from statistics import median

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
_ROUNDS = 5
_DEFAULTS, _AGAIN = "defaults", "again"
Settings = tuple[int, bool, bool, str]  # threads, whether they spin, whether there is an arena, the level


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL[:INPUT=SIZES]...")
    parser.add_argument("--turns", type=int, default=20, help="of each, each time that it is made (20)")
    options = parser.parse_args()
    print("| model | chosen | ms | over the fastest | which | over the defaults | over itself |")
    print("|---|---|---|---|---|---|---|")
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
        print(_row(path, chosen, inputs, options.turns), flush=True)
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
            if settings.others_percent is None:
                threads = settings.threads or _threads()
                return threads, settings.spinning, settings.arena is not False, HIGHEST
        time.sleep(0.5)
    raise TimeoutError(f"nothing was chosen for good within {_SECONDS:.0f} s: other processes run")


def _row(path: Path, chosen: Settings, inputs: Arrays, turns: int) -> str:
    several = itertools.product((True, False), repeat=2)
    every = {(1, True, True, HIGHEST), (1, True, False, HIGHEST), chosen}
    every |= {(_threads(), spins, arena, HIGHEST) for spins, arena in several}
    every |= {(*chosen[:3], level) for level in LEVELS}
    settings: dict[str, Settings | None] = {_named(one): one for one in sorted(every)}
    settings |= {_DEFAULTS: None, _AGAIN: chosen}
    rounds = [
        in_turns({name: _session(path, one, inputs) for name, one in settings.items()}, turns)
        for _ in range(_ROUNDS)
    ]
    times = {name: median(each[name] for each in rounds) for name in settings}
    own, default, again = times[_named(chosen)], times.pop(_DEFAULTS), times.pop(_AGAIN)
    fastest = min(times, key=times.__getitem__)
    return (
        f"| {path.stem} | {_named(chosen)} | {own * 1e3:.3f} | {own / times[fastest]:.2f} | {fastest} | "
        f"{own / default:.2f} | {own / again:.2f} |"
    )


def _session(path: Path, settings: Settings | None, inputs: Arrays) -> Callable[[], object]:
    options = onnxruntime.SessionOptions()
    if settings is not None:
        threads, spinning, arena, level = settings
        options = session_options(onnxruntime, threads, level, spinning=spinning, arena=arena)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return partial(session.run, None, inputs)


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
