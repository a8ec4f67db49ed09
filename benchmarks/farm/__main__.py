"""Measures what boards add to a search: `python -m benchmarks.farm`.

A farm of one real board, an OpenCL device of this machine, tunes LightGlue with 64 keypoints, and is
recorded. Then farms of one, two and four stand-ins with the recorded times, each a process, take turns at the
same candidates, through the real scheduler and TLS: once as if proposing took no time, once with the recorded
seconds of searching, which for each batch run while the previous one is measured. Prints candidates a second,
and the seconds to 90 % of the final gain.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tests.extensions.farm.running import RunningFarm

from honed.farm import rows
from honed.farm.boards import FarmChoice, join
from honed.farm.certificates import issue
from honed.farm.measurer import FarmMeasurer
from honed.machine import devices, peaks
from honed.tuner import lightglue
from honed.tuner.records.rows import Outcome

from .recorded import Recording, keep, record

_BOARDS = (1, 2, 4)
_SHARE = 0.9  # Share of the final gain


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay: candidates judged in `seconds`, and the seconds to 90 % of the gain, `ninety`."""

    candidates: int
    seconds: float
    ninety: float


def main() -> None:
    """Record one board, replay farms, and print the times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.farm", description=__doc__)
    parser.add_argument("--trials", type=int, default=192, help="candidates to record (192)")
    parser.add_argument("--turns", type=int, default=2, help="of each farm (2)")
    parser.add_argument("--device", metavar="SPEC", help="the OpenCL device; the best one where not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="honed-farm-bench-") as name:
        folder = Path(name)
        issue(folder / "certificates", ["pc", "board"])
        device = devices.select(options.device)
        peaks.load_or_measure(device, folder / "cache")
        model = folder / "lightglue.onnx"
        lightglue.write(model, 64, False, 0)
        with RunningFarm(folder, folder / "certificates", folder / "cache") as farm:
            recording = record(farm, device, model, folder, options.trials)
        keep(recording, folder / "recording")
        found: dict[tuple[bool, int], list[Replayed]] = {}
        for _ in range(options.turns):
            for searching in (False, True):
                for count in _BOARDS:
                    replayed = _farm(recording, folder, count, searching)
                    found.setdefault((searching, count), []).append(replayed)
    _print(recording, device.profile.identity.name, found)


def _farm(recording: Recording, folder: Path, count: int, searching: bool) -> Replayed:
    """Start a farm of stand-ins, and replay the recorded search on it."""
    certificates = folder / "certificates"
    with RunningFarm(folder, certificates, folder / "cache") as farm:
        command = [sys.executable, "-m", "benchmarks.farm.standin", str(folder / "recording")]
        command += [str(certificates / "board"), farm.url]
        standins = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        try:
            for standin in standins:
                assert standin.stdout is not None
                while "in the farm" not in standin.stdout.readline():
                    pass
            return _replay(recording, farm, folder, count, searching)
        finally:
            for standin in standins:
                standin.kill()
                standin.communicate()


def _replay(recording: Recording, farm: RunningFarm, folder: Path, count: int, searching: bool) -> Replayed:
    joined = join(FarmChoice(url=farm.url, certificates=farm.certificates / "pc"))
    measurer = FarmMeasurer(joined.boards, joined.profile, "", lambda _: None, print, ahead=64)
    workloads = {}
    for task, memory in recording.memories.items():
        place = folder / f"memory-{task}"
        place.mkdir(exist_ok=True)
        workloads[task] = rows.workload_in(place, rows.unpack(rows.BoardMemory, memory))
    measurer.load(workloads[recording.batches[0].task])
    while measurer.board_count < count:
        measurer.settle()
    best, began = dict(recording.defaults), time.monotonic()
    curve, judged, ready = [(0.0, recording.total(best))], 0, began
    for number, batch in enumerate(recording.batches):
        if searching:
            ready += batch.search if number == 0 else 0.0
            time.sleep(max(0.0, ready - time.monotonic()))
            following = recording.batches[number + 1 : number + 2]
            ready = time.monotonic() + sum(each.search for each in following)
        measurer.load(workloads[batch.task])
        sent = [recording.sent[name] for name in batch.candidates]
        given = [
            rows.candidate_of(rows.FarmTrial(search="", task="", candidate=one, best=None)) for one in sent
        ]
        for candidate in given:
            measurer.prepare(candidate)
        for candidate in given:
            verdict = measurer.measure(candidate, best.get(batch.task))
            judged += 1
            if verdict.outcome is Outcome.RIGHT and verdict.timing is not None and batch.task in best:
                best[batch.task] = min(best[batch.task], verdict.timing.median_s)
            curve.append((time.monotonic() - began, recording.total(best)))
        measurer.forget()
    seconds = time.monotonic() - began
    measurer.close()
    goal = curve[0][1] - _SHARE * (curve[0][1] - curve[-1][1])
    return Replayed(judged, seconds, next(at for at, total in curve if total <= goal))


def _print(recording: Recording, device: str, found: dict[tuple[bool, int], list[Replayed]]) -> None:
    candidates = sum(len(batch.candidates) for batch in recording.batches)
    rulings = list(map(rows.answer, recording.rulings.values()))
    board = sum(r.verdict["seconds"] for r in rulings if isinstance(r, rows.BoardVerdict))
    search = sum(batch.search for batch in recording.batches)
    table = Table(
        "boards", "searching", "candidates/s", "beside one", "90 % of the gain", "beside one", box=None
    )
    for searching in (False, True):
        one = found[searching, 1]
        for count in _BOARDS:
            mine = found[searching, count]
            rate = median(r.candidates / r.seconds for r in mine)
            ninety = median(r.ninety for r in mine)
            table.add_row(
                str(count),
                "as recorded" if searching else "no time",
                f"{rate:.2f}",
                f"{rate / median(r.candidates / r.seconds for r in one):.2f}",
                f"{ninety:.1f} s",
                f"{median(r.ninety for r in one) / ninety:.2f}",
            )
    console = Console()
    console.print(
        f"{candidates} candidates in {len(recording.batches)} batches, recorded on {device}: "
        f"{board:.0f} s on the board, {search:.0f} s of searching."
    )
    console.print(table)


if __name__ == "__main__":
    main()
