"""Property tests with fresh seeds, over and over: python -m tests.explore --minutes 5 --jobs 3 [--seed N].

`make test` draws the same examples every time; what else may be drawn is looked for here. Explored are all
tests of Hypothesis, and those with a parameter `seed`. Each process of pytest, with this file as its plug-in,
collects them once and runs them in rounds, each with a seed and in an order of its own. What fails is told
with its examples, to be kept in the test as `@example(...)`, and is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
_TASK: Final = "HONED_TEST_EXPLORE"  # of a process: {"seed", "minutes", "found", "known"}
_TOLD_EVERY: Final = 10.0  # seconds between lines of progress
_PATIENCE: Final = 600.0  # seconds that the tests under way have when the time is over
_NOTE: Final = re.compile(r"^Failing test case: \w+\(\n?(.*?)^\)$", re.MULTILINE | re.DOTALL)


# ---- In each process of pytest ----


@dataclass(eq=False)  # pytest hashes its plug-ins
class Explorer:
    """The rounds of a process. What happens is a line of JSON each, for the process that started it."""

    seed: int
    minutes: float
    told: Path
    failed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has nothing to draw, and other seeds of one test."""
        kept: dict[str, pytest.Item] = {}
        for item in items:
            if explored(item):
                kept.setdefault(item.nodeid if _drawn(item) else item.nodeid.partition("[")[0], item)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept.values())])
        items[:] = kept.values()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run them until the time is over, or nothing is left that has not failed."""
        if session.testsfailed:
            raise session.Interrupted("a file of tests cannot be read")
        from hypothesis import core

        end = time.monotonic() + 60 * self.minutes
        tests = self._rounds(session.items)
        item = next(tests, None)
        while item is not None and time.monotonic() < end:
            following = next(tests, None)
            core.global_force_seed = self.seed
            _with_seed(item, self.seed)
            self._say(test=item.nodeid, seed=self.seed)
            # A test that follows itself would be taken for set up, without its parameters.
            nextitem = None if following is item else following
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            item = following
        return True

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Keep the examples that Hypothesis tells beside what was raised."""
        if call.excinfo is not None and isinstance(node, pytest.Item):
            given = {*getattr(node, "fixturenames", ()), "self"}
            self.notes = [example(note, given) for note in _notes(call.excinfo.value)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell what failed, once."""
        if report.failed and report.nodeid not in self.failed:
            self.failed.add(report.nodeid)
            text = report.longreprtext
            self._say(failed=report.nodeid, seed=self.seed, examples=self.notes, text=text)
            self.notes = []

    def _rounds(self, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
        """Files in another order each time: tests of one stay together, as they share services."""
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        pick = random.Random(self.seed)
        while any(item.nodeid not in self.failed for item in items):
            for path in pick.sample(sorted(files), len(files)):
                yield from (item for item in files[path] if item.nodeid not in self.failed)
            self.seed = pick.getrandbits(32)

    def _say(self, **what: object) -> None:
        with self.told.open("a") as stream:
            print(json.dumps(what), file=stream)


def explored(item: pytest.Item) -> bool:
    """Whether there is anything to draw: by Hypothesis, or from a seed."""
    return _drawn(item) or isinstance(_parameters(item).get("seed"), int)


def example(note: str, given: set[str]) -> str:
    """What Hypothesis says of an example as a decorator, without the arguments that pytest gave."""
    found = _NOTE.search(note)
    if found is None:
        return note
    arguments = re.split(r"^    (?=\w+=)", found[1], flags=re.MULTILINE)
    kept = [
        text.strip().removesuffix(",") for text in arguments if text.partition("=")[0].strip() not in given
    ]
    return f"@example({', '.join(text for text in kept if text)})" + note[found.end() :]


def _drawn(item: pytest.Item) -> bool:
    from hypothesis import is_hypothesis_test

    return is_hypothesis_test(getattr(item, "obj", None))


def _parameters(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _with_seed(item: pytest.Item, seed: int) -> None:
    if not _drawn(item):
        _parameters(item)["seed"] = seed


def _notes(error: BaseException) -> Iterator[str]:
    """Of it and of those in it, where several different ones were found."""
    for each in getattr(error, "exceptions", ()):
        yield from _notes(each)
    yield from (note for note in getattr(error, "__notes__", ()) if _NOTE.search(note))


def pytest_configure(config: pytest.Config) -> None:
    """Explore where a process was started to."""
    if task := os.environ.pop(_TASK, ""):
        told = json.loads(task)
        explorer = Explorer(told["seed"], told["minutes"], Path(told["found"]), set(told["known"]))
        config.pluginmanager.register(explorer)


# ---- The process that starts them ----


@dataclass
class Found:
    """What all processes told so far."""

    tests: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seeds: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, line: str) -> None:
        """A line of a process."""
        told = json.loads(line)
        with self.lock:
            self.seeds.add(told["seed"])
            if "failed" not in told:
                self.tests += 1
            elif told["failed"] not in self.failed:
                self.tell(told["failed"], told["seed"], told["examples"], told["text"])

    def tell(self, test: str, seed: int, examples: Sequence[str], text: str) -> None:
        """A test that failed, once, with how to keep it and how to see it again."""
        again = f"python -m pytest '{test}' --hypothesis-profile=explore --hypothesis-seed={seed}"
        lines = [f"FAILED {test} (seed {seed})", *examples, "", text, "", f"again: {again}"]
        self.failed[test] = "\n".join(
            [lines[0], *(f"    {line}" for part in lines[1:] for line in part.splitlines())]
        )
        print(self.failed[test], flush=True)


def run(seed: int, minutes: float, folder: Path, found: Found, tests: Sequence[str]) -> None:
    """A process, and another one where it crashes, until the time is over."""
    end, pick = time.monotonic() + 60 * minutes, random.Random(seed)
    while (left := end - time.monotonic()) > 0:
        seed = pick.getrandbits(32)
        place = folder / f"{seed}"
        place.mkdir()
        told = place / "told"
        task = {"seed": seed, "minutes": left / 60, "found": str(told), "known": sorted(found.failed)}
        environment = {**os.environ, _TASK: json.dumps(task), "PYTHONHASHSEED": str(seed % (1 << 32))}
        command = [sys.executable, "-m", "pytest", "-p", "tests.explore", "-m", "not slow", "-q"]
        command += [
            "--hypothesis-profile=explore",
            "-p",
            "no:cacheprovider",
            f"--basetemp={place / 't'}",
            *tests,
        ]
        told.touch()
        with (place / "log").open("wb") as log, told.open() as lines:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            try:
                last = _followed(process, lines, found, left + _PATIENCE)
            finally:
                process.kill()
                process.wait()
        if process.returncode not in (0, 1):  # pytest's own: all passed, or some failed
            text = (place / "log").read_text(errors="replace")[-4000:]
            test, seed = last.get("test", "the start of pytest"), last.get("seed", seed)
            with found.lock:
                found.tell(test, seed, [], f"the process ended with {process.returncode}:\n{text}")
        shutil.rmtree(place, ignore_errors=True)
        if not last:
            return  # nothing is left to run, or nothing can be


def _followed(process: subprocess.Popen[bytes], lines: IO[str], found: Found, limit: float) -> dict[str, Any]:
    """Take what it tells until it has ended; gives the last test that it began."""
    last: dict[str, Any] = {}
    end, part = time.monotonic() + limit, ""
    while True:
        ended = process.poll() is not None or time.monotonic() > end
        while line := lines.readline():
            part += line
            if part.endswith("\n"):
                found.take(part)
                last = told if "test" in (told := json.loads(part)) else last
                part = ""
        if ended:
            return last
        time.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore, and give the exit status: 1 where anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders; all")
    asked = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if asked.seed is None else asked.seed
    print(f"seed {seed}, {asked.jobs} processes, {asked.minutes:g} minutes", flush=True)
    found, begin = Found(), time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="explore-", ignore_cleanup_errors=True))
        )
        threads = [
            threading.Thread(
                target=run, args=(seed + number, asked.minutes, folder, found, asked.tests), daemon=True
            )
            for number in range(asked.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_TOLD_EVERY)
                spent = time.monotonic() - begin
                print(
                    f"{spent / 60:.1f} min: {found.tests} tests run, {len(found.failed)} failed", flush=True
                )
    print(f"seed {seed}: {found.tests} tests run with {len(found.seeds)} seeds, {len(found.failed)} failed")
    for test in sorted(found.failed):
        print(f"FAILED {test}")
    return 1 if found.failed or not found.tests else 0


if __name__ == "__main__":
    sys.exit(main())
