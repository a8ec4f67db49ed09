"""Uses programs by turns, alone and beside a service of the benchmark's own, and compares.

A program is a process that prints a line of JSON for its first use and for each line of its standard input
(turns.py). Beside honed it runs with HONED_ORT_LOG, whose last lines say how many runs were routed and what
switching has cost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import psutil

from benchmarks.serving import service
from honed.runtime.client import Client

CLIENTS = Path("/var/cache/honed-clients")  # Folder of installed programs
# The machine counts as idle whatever else goes on.
_CONFIG = """
[tuner]
spawn = false
[idle]
quiet_seconds = 0.2
settle_seconds = 0
max_pressure_percent = 1000
max_load_per_core = 1000
max_gpu_percent = 100
[apps]
compile_seconds = 86400
"""
_REST_SECONDS = 0.2  # Pause before each use: ONNX Runtime's threads spin for a while after a run
_TURN_SECONDS = 2.0  # Length of a program's turn while all settle
_MOST_SECONDS = 40.0  # Limit of the turns of one program
_QUIET_SECONDS = 120.0  # Limit for the service to finish compiling
_TOLERANCE = 1e-2
_ROUTED = re.compile(r"^honed: .* (\d+) of (\d+) runs routed$", re.MULTILINE)
_COST = re.compile(r"^honed: switching has cost ([\d.]+) ms in ([\d.]+) s$", re.MULTILINE)
_STATE = re.compile(r"^honed: (.*): \w+; own [\d.]+ ms, routed [\d.]+ ms(?:; (.*))?$", re.MULTILINE)
_COLUMNS = (
    "same,own ms,beside ms,ratio,routed,switching ms,of its time,of its uses,"
    "memory own MiB,beside MiB,why not more are routed"
)

# Returns the command line: beside the service of a socket, or alone for "".
Program = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Ended:
    """The summary in a program's log: runs of ONNX Runtime, those routed, and the cost of switching.

    `why` is the most frequent reason that kinds of runs are not routed.
    """

    runs: int
    routed: int
    cost_ms: float
    seconds: float
    why: str


class Running:
    """A program in a process of its own, used on request."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is closed with the program
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.uses, self.total_ms, self.memory_mib = 0, 0.0, 0.0
        self.first_ms = self._answer()

    def use(self) -> float:
        """Use it once more; return the milliseconds that it took."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print("use", file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> Ended:
        """End it, and read its log."""
        processes = [psutil.Process(self._process.pid)]
        processes += processes[0].children(recursive=True)
        self.memory_mib = sum(_peak_mib(each.pid) for each in processes)
        self._process.communicate()
        log = self._read_log()
        counts = [tuple(map(int, each)) for each in _ROUTED.findall(log)]
        costs = [tuple(map(float, each)) for each in _COST.findall(log)]
        routed, runs = (sum(each[i] for each in counts) for i in range(2))
        reasons = Counter(why for why in dict(_STATE.findall(log)).values() if why).most_common(1)
        return Ended(
            runs=runs,
            routed=routed,
            cost_ms=sum(each[0] for each in costs),
            seconds=max((each[1] for each in costs), default=0.0),
            why=reasons[0][0] if reasons else "",
        )

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = "x"
        while line and not line.startswith("{"):  # Programs print, too
            line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._command} ended with {self._process.wait()}: {self._read_log()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        self.found, took = answer["found"], float(answer["ms"])
        self.uses += 1
        self.total_ms += took
        return took

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.communicate()


@dataclass
class _Row:
    """The results for a program."""

    name: str
    alone: Running
    beside: Running
    same: bool = True
    answered: int = 0  # Requests answered by the service while it was measured
    pairs: list[tuple[float, float]] = field(default_factory=list)

    def look(self) -> None:
        """Compare the answers of the latest uses."""
        if self.same and not near(self.beside.found, self.alone.found):
            self.same = False
            print(f"{self.name}: {self.alone.found}\nbeside honed: {self.beside.found}", file=sys.stderr)

    def line(self) -> str:
        """End the program, and return its row of the table."""
        self.alone.end()
        ended = self.beside.end()
        runs = ended.runs / self.beside.uses * len(self.pairs)
        cells = (
            "yes" if self.same else "NO",
            f"{median(own for own, _ in self.pairs):.2f}",
            f"{median(other for _, other in self.pairs):.2f}",
            f"{median(other / own for own, other in self.pairs):.3f}",
            f"{self.answered / runs if runs else 0:.0%}",
            f"{ended.cost_ms:.1f}",
            f"{ended.cost_ms / 1e3 / (ended.seconds or 1):.2%}",
            f"{ended.cost_ms / self.beside.total_ms:.2%}",
            f"{self.alone.memory_mib:.0f}",
            f"{self.beside.memory_mib:.0f}",
            ended.why,
        )
        return f"| {' | '.join((self.name, *cells))} |"


def parse(module: str, description: str | None, *, settle: float) -> argparse.Namespace:
    """Return the options that both benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="those to compare; all")
    parser.add_argument("--folder", type=Path, default=CLIENTS, help="where programs are installed")
    parser.add_argument("--turns", type=int, default=15, help="uses of each by turns, when all have settled")
    parser.add_argument(
        "--settle", type=float, default=settle, help="seconds of uses before, of all programs"
    )
    return parser.parse_args()


def compare(programs: Mapping[str, Program], options: argparse.Namespace) -> int:
    """Let all programs settle, and compare each with itself alone; 1 where answers differ."""
    chosen: Sequence[str] = options.programs or list(programs)
    if unknown := set(chosen) - set(programs):
        raise SystemExit(f"there is no {min(unknown)}; name some of {', '.join(programs)}")
    with (
        tempfile.TemporaryDirectory(prefix="honed-beside-") as folder,
        service(Path(folder), _CONFIG) as client,
        ExitStack() as stack,
    ):
        rows = []
        for name in chosen:
            program = programs[name]
            print(f"{name} starts", file=sys.stderr)
            alone = stack.enter_context(Running(program("")))
            rows.append(_Row(name, alone, stack.enter_context(Running(program(client.socket)))))
            rows[-1].look()
        end = time.monotonic() + options.settle
        while time.monotonic() < end:
            for row in rows:
                until = time.monotonic() + _TURN_SECONDS
                while time.monotonic() < until:
                    row.beside.use()
                    row.look()
        _await_quiet(client)
        for row in rows:
            before = _answered(client)
            end = time.monotonic() + _MOST_SECONDS
            while len(row.pairs) < options.turns and (time.monotonic() < end or not row.pairs):
                time.sleep(_REST_SECONDS)
                own = row.alone.use()
                time.sleep(_REST_SECONDS)
                row.pairs.append((own, row.beside.use()))
                row.look()
            row.answered = _answered(client) - before
        print(f"| program | {' | '.join(_COLUMNS.split(','))} |")
        print("|---|---|" + "---:|" * _COLUMNS.count(","))
        for row in rows:
            print(row.line(), flush=True)
    return int(not all(row.same for row in rows))


def _answered(client: Client) -> int:
    """Return how many requests the service has answered."""
    return sum(int(each["inference_count"]) for each in client.statistics())


def _await_quiet(client: Client) -> None:
    """Wait until the service compiles nothing."""
    served, end = psutil.Process(client.status()["pid"]), time.monotonic() + _QUIET_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):  # A compiler has ended
            children = served.children(recursive=True)
            spent = _processor_seconds(children)
            time.sleep(2)
            if _processor_seconds(children) - spent < 0.2:
                return


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def _peak_mib(pid: int) -> float:
    """Return the most memory that a process has had."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) / 1024


def near(found: Any, expected: Any) -> bool:
    """Return whether two answers are equal, numbers within a tolerance."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(near, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[key], expected[key]) for key in found)
    if isinstance(found, float) and isinstance(expected, float | int):
        return math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(found == expected)
