"""Records for the prior of Malis: `python -m benchmarks.prior.predict OUT.jsonl [--layers N] [--seed S]`.

Draws schedules of made-up layers in halves and in singles, and the Valhall bench judges them for a class of
drivers: predicted times, as there is no Mali to measure on. Mesa 25.0's code makes two records of each, for
its own driver and, with paired halves, for Arm's.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from honed.machine.families import DriverClass
from honed.machine.profile import DeviceProfile
from honed.tuner.measure.candidate import Candidate, inference_launches
from honed.tuner.records.rows import StoredOutcome, Timing
from honed.tuner.tune.extract import Extracted, extract, workload
from honed.valhall.bench import bench_profile
from honed.valhall.compiler import ROOTS, Dump, OfflineCompileFailed, OfflineCompiler
from honed.valhall.judge import JudgedLaunch, MachineCodeJudge, seconds

from .schedules import Tried, record, schedules
from .zoo import add_kinds, write

_ARM = bench_profile("mali-g610")
_Item = TypeVar("_Item")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prior.predict", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--judge", choices=ROOTS, default="25.0", help="an offline compiler, by Mesa's version"
    )
    parser.add_argument("--jobs", type=int, help="processes of the compiler (one for each processor)")
    parser.add_argument("--minutes", type=float, default=60.0)
    add_kinds(parser)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    mesa = bench_profile("mali-g610", options.judge)
    devices = [mesa] if mesa.driver is DriverClass.MESA_26 else [mesa, _ARM]
    with (
        tempfile.TemporaryDirectory() as folder,
        OfflineCompiler(ROOTS[options.judge], options.jobs) as compiler,
        options.output.open("wb") as file,
    ):
        judge = MachineCodeJudge(compiler)
        tasks = _tasks(write(Path(folder), options.layers, options.seed, options.kinds), options.seed, end)
        for one, begun in _one_ahead(_begun(tasks, judge, options.seed, mesa)):
            for tried, dump in begun:
                judged = _judged(one, tried, dump, judge)
                outcome = StoredOutcome.RIGHT if judged else StoredOutcome.NOT_BUILT
                for device in devices:
                    taken = seconds(judged, device.driver)
                    timing = Timing(median_s=taken, low_s=taken, high_s=taken, repeats=1) if judged else None
                    file.write(record(one, tried, device.identity, outcome, timing))
            file.flush()
            print(f"{one.task.name[:60]}: {len(begun)} judged", flush=True)
    return 0


def _tasks(paths: Iterable[Path], seed: int, end: float) -> Iterator[Extracted]:
    """Yield the models' tasks, a quarter of them in singles, until the monotonic clock reaches `end`."""
    rng = random.Random(seed)
    for path in paths:
        if time.monotonic() > end:
            return
        yield from extract(path, {}, "fp32" if rng.random() < 0.25 else "fp16", _ARM).tasks


def _begun(
    tasks: Iterable[Extracted], judge: MachineCodeJudge, seed: int, profile: DeviceProfile
) -> Iterator[tuple[Extracted, list[tuple[Tried, Future[Dump]]]]]:
    """Yield each task with its schedules, which are being compiled in parallel."""
    for one in tasks:
        yield one, [(each, judge.begin(each.lowered.source)) for each in schedules(one, profile, seed)]


def _one_ahead(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield each item after the next was taken: kernels of one are compiled while the next are lowered."""
    last: list[_Item] = []
    for item in items:
        yield from last
        last = [item]
    yield from last


def _judged(one: Extracted, tried: Tried, begun: Future[Dump], judge: MachineCodeJudge) -> list[JudgedLaunch]:
    """Return the launches of a schedule in each inference; none if Mesa's compiler cannot build it."""
    task = workload(one.task.key, one.func, one.task.outputs, Path(), None, one.task.constants)
    launches = inference_launches(task, Candidate.of("", tried.lowered))
    try:
        return judge.judge(tried.lowered.source, launches, begun)
    except OfflineCompileFailed:
        return []


if __name__ == "__main__":
    raise SystemExit(main())
