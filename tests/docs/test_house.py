"""The figures of the code are counted right, and the ways of the page lead through files that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from benchmarks import house
from benchmarks.house import House, Module

ROOT = Path(__file__).parents[2]
ONE = '''"""About it.

In three lines."""

from typing import TYPE_CHECKING, Any

from . import two  # said beside code
# said alone
if TYPE_CHECKING:
    from .three import Thing

TEXT = """
# no comment
"""


class Twice:
    """Short."""

    def __init__(self, on_end: Any) -> None:
        self.on_end = on_end


def takes(given: dict[str, Any], nested: list[dict[str, Any]]) -> None: ...
'''
TWO = "from .three import Thing, Told\n\n\nclass Twice:\n    told: Told\n"
THREE = "Told = dict[str, Any]\n\n\nclass Thing:\n    def later(self):\n        from .one import Twice\n"
PAGE = """# The map

## The way of a request

1. `daemon/one.py` has it checked by `two.py` (`word`), then `daemon/`.
2. `daemon/two.py` tells `runtime/calling/link.py`.

## Processes

1. `daemon/three.py`
"""
ON_END = f"daemon/honed/daemon/one.py:{ONE[: ONE.index('self.on_end')].count(chr(10)) + 1} on_end"
SMALL = House(
    (
        Module("daemon/honed/daemon/one.py", ONE),
        Module("daemon/honed/daemon/two.py", TWO),
        Module("daemon/honed/daemon/three.py", THREE),
        Module("runtime/honed/runtime/calling/link.py", "x = 1\n"),
    ),
    PAGE,
)


@pytest.fixture(scope="module")
def here() -> House:
    return house.from_checkout(ROOT)


def test_lines_are_code_docstrings_or_comments() -> None:
    lines = house.lines_of(SMALL.modules[0])
    assert (lines.docstrings, lines.comments) == (4, 1)
    assert lines.code == sum(bool(line.strip()) for line in ONE.splitlines()) - 3 - 1


def test_what_is_counted_is_found_and_named() -> None:
    assert house.maps(SMALL) == [
        f"daemon/honed/daemon/one.py:{len(ONE.splitlines())}",
        "daemon/honed/daemon/three.py:1",
    ]
    assert house.aliased_maps(SMALL) == ["daemon/honed/daemon/two.py:5 Told"]
    assert house.callbacks(SMALL) == [ON_END]


def test_imports_for_types_and_in_functions_make_cycles_of_their_own() -> None:
    assert house.cycles(SMALL) == []
    assert house.cycles(SMALL, deferred=True) == ["honed.daemon.one, honed.daemon.three, honed.daemon.two"]


def test_packages_that_import_each_other_are_found() -> None:
    def package(**texts: str) -> House:
        files = (f"tuner/honed/{name.replace('__', '/')}.py" for name in texts)
        return House(tuple(map(Module, files, texts.values())), "")

    apart = {"a__one": "from honed.b.two import x\n", "b__two": "", "b__three": "from honed.b import two\n"}
    assert house.package_cycles(package(**apart)) == []
    back = {**apart, "b__three": "def f():\n    from honed.a import four\n", "a__four": ""}
    assert house.package_cycles(package(**back)) == ["honed.a, honed.b"]


def test_no_packages_of_this_house_import_each_other(here: House) -> None:
    assert house.package_cycles(here) == []


def test_packages_of_the_service_import_of_those_above_them_on_the_page(here: House) -> None:
    section = here.page.partition("Inside the daemon, in layers")[2].partition("Inside the tuner")[0]
    rows = re.findall(r"^\| (`[a-z`, ]+`) \|", section, re.MULTILINE)
    rank = {name: n for n, row in enumerate(rows) for name in re.findall(r"\w+", row)}
    folders = {p.name for p in (ROOT / "daemon/honed/daemon").iterdir() if (p / "__init__.py").exists()}
    assert rank.keys() == folders
    below = [
        f"{module} imports {found}"
        for module, found in house.links(here, deferred=True)
        if (own := _layer(module)) in rank
        and (other := _layer(found)) in rank
        and (own != other and rank[own] <= rank[other])
    ]
    assert not below


def _layer(module: str) -> str:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["honed", "daemon"] and len(parts) > 2 else ""


def test_a_function_is_long_from_41_lines_on() -> None:
    def function(lines: int) -> House:
        return House((Module("tuner/honed/f.py", "def f():\n" + "    1\n" * (lines - 1)),), "")

    assert house.long_functions(function(40)) == []
    assert house.long_functions(function(41)) == ["tuner/honed/f.py:1 f"]


def test_a_way_has_each_file_once_and_folders_as_one() -> None:
    files = [f"daemon/honed/daemon/{name}" for name in ("one.py", "two.py", "")]
    assert house.way(SMALL, "The way of a request") == [*files, "runtime/honed/runtime/calling/link.py"]


def test_a_way_through_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"no daemon/honed/daemon/two\.py"):
        house.way(House(SMALL.modules[:1], PAGE), "The way of a request")


def test_the_page_of_this_house_leads_through_files_that_exist(here: House) -> None:
    assert all(house.way(here, heading) for heading in house.WAYS)


def test_a_commit_stands_beside_the_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    for module in SMALL.modules:
        path = tmp_path / module.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module.text)
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    (tmp_path / "docs").mkdir()
    (tmp_path / house.PAGE).write_text(PAGE)
    (tmp_path / "daemon/honed/daemon/three.py").write_text("class Thing: ...\n")
    house.main([str(tmp_path), "--against", "HEAD", "--names"])
    told = capsys.readouterr().out
    assert "| what | HEAD | now |" in told
    assert "| import cycles, with imports in functions and for types | 1 | 0 |" in told
    assert "| files that the page names on the way of a request | - | 4 |" in told
    assert f"\n  {ON_END}\n" in told
    with pytest.raises(SystemExit, match="git has no nowhere"):
        house.main([str(tmp_path), "--against", "nowhere"])
