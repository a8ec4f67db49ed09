"""How tests are run: the same examples every time, others by `make explore`, crashes in children."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import explore
from .conftest import SLOW
from .daemon.running import DEADLINE

ROOT = Path(__file__).parents[1]

RED = """
import os

import pytest
from hypothesis import example, given, settings, strategies as st

pytestmark = pytest.mark.filterwarnings("ignore")


@settings(max_examples=50)
@given(x=st.integers(0, 1000), y=st.just("a"))
@pytest.mark.parametrize("kind", [1])
def test_drawn(kind, x, y, tmp_path_factory):
    assert x < 300


@pytest.mark.parametrize("seed", [1, 2])
def test_seeded(seed):
    assert seed < 3


@given(st.booleans())
def test_crash(on):
    if on:
        os._exit(7)


def test_of_no_interest():
    assert False
"""

CRASH = """
import ctypes, os, signal, time

import pytest


@pytest.mark.child
def test_crash(tmp_path):
    ctypes.string_at(1)


@pytest.mark.child
@pytest.mark.timeout(1)
def test_hang():
    time.sleep(600)


@pytest.mark.child
@pytest.mark.parametrize("number", [1, 2])
def test_wrong(number):
    assert number == 2, "it is " + str(number)


@pytest.mark.child
def test_skipped():
    pytest.skip("not here")


def test_of_the_same_process():
    pass
"""


def drawn() -> list[float]:
    """What a test of Hypothesis is given."""
    given_: list[float] = []

    @settings(max_examples=200)
    @given(st.floats(0, 1e6))
    def test(x: float) -> None:
        given_.append(x)

    test()
    return given_


def test_examples_follow_from_the_test_alone(tmp_path: Path) -> None:
    """Neither from earlier draws nor from constants of modules that other tests have loaded."""
    before = drawn()
    path = tmp_path / "loaded.py"
    path.write_text("".join(f"X{n} = {n}.62501\n" for n in range(500)))
    spec = importlib.util.spec_from_file_location("loaded_by_another_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        assert drawn() == before


def test_what_fails_is_told_with_its_examples(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_red.py"
    path.write_text(RED)
    conftest = str(Path(__file__).with_name("conftest.py"))
    assert explore.main(["--minutes", "5", "--seed", "3", conftest, str(path)]) == 1
    told = capfd.readouterr().out
    assert '    @example(x=300, y="a")'.replace('"', "'") in told
    assert "the process ended with 7" in told
    assert told.count("FAILED ") == 2 * 3  # where it happens, and in the end; each once
    for name in ("test_drawn[1]", "test_seeded[1]", "test_crash"):
        assert f"::{name} (seed " in told
    (last, *_) = [line for line in told.splitlines() if line.startswith("seed 3: ")]
    assert last.endswith(", 3 failed")
    path.write_text("def test_of_no_interest(): ...\n")
    assert explore.main(["--minutes", "5", str(path)]) == 1  # nothing was run


def test_what_may_crash_or_hang_its_process_ends_no_other_test(tmp_path: Path) -> None:
    path = tmp_path / "test_crash.py"
    path.write_text(CRASH)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.conftest",
        "-ra",
        path,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert "3 failed, 2 passed, 1 skipped" in done.stdout, done.stdout
    for said in ("died of SIGSEGV", "Timeout", "it is 1", "not here"):
        assert said in done.stdout


def test_programs_that_tests_write_run_from_a_folder_of_any_name() -> None:
    """A `#!` line and an unquoted word of a shell end at a space, which a folder may have in its name."""
    wrong = re.compile(r"#!\{sys\.executable|f[\"'](sh )?\{sys\.executable\} |source \{[A-Z]")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert not [str(path) for path in files if wrong.search(path.read_text())]


def test_the_table_of_slow_tests_names_tests_and_files_that_there_are() -> None:
    for path in re.findall("`(tests/[^`]+)`", (ROOT / "tests" / "slow.txt").read_text()):
        assert (ROOT / path).exists(), path
    for name in SLOW:
        file, _, test = name.partition("::")
        wanted = "def test_" if test == "*" else f"def {test.partition('[')[0]}("
        assert wanted in (ROOT / file).read_text(), name
