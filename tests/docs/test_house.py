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
    from .three import (
        Thing,
    )

TEXT = """
# no comment
import this
"""


class Twice:
    """Short."""

    def __init__(self, on_end: Any) -> None:
        self.on_end = on_end
'''
TWO = "from .three import Thing\n"
THREE = "class Thing:\n    def later(self):\n        with self:\n            from .one import Twice\n"
LINK = "from honed.process.children import ResourceLimits, start\n"
PAGE = """# The map

## The way of a request

1. `daemon/one.py` has it checked by `two.py` (`word`), then `daemon/`.
2. `daemon/two.py` tells `runtime/calling/link.py`.

## Processes

1. `daemon/three.py`
"""
SMALL = House(
    (
        Module("daemon/honed/daemon/one.py", ONE),
        Module("daemon/honed/daemon/two.py", TWO),
        Module("daemon/honed/daemon/three.py", THREE),
        Module("runtime/honed/runtime/calling/link.py", LINK),
    ),
    {house.PAGE: PAGE},
)


@pytest.fixture(scope="module")
def here() -> House:
    return house.from_checkout(ROOT)


def test_lines_are_code_imports_among_them_or_prose() -> None:
    lines = house.lines_of(SMALL.modules[0])
    assert (lines.prose, lines.imports) == (5, 5)
    assert lines.code == sum(bool(line.strip()) for line in ONE.splitlines()) - 3 - 1


def test_what_a_board_works_without_is_counted_apart_wherever_it_lay() -> None:
    here = ("extensions/honed/hub/main.py", "bridges/honed/hub/main.py", "tuner/honed/tuner/farm/board.py")
    assert {Module(path, "").part for path in here} == {"extensions"}
    small = House((*SMALL.modules, Module(here[2], TWO)), {})
    figures = dict(house.figures(small))
    assert figures["lines of code, extensions"] == "1"
    apart, together = (
        int(str(figures[f"lines of code, {which}"])) for which in ("without extensions", "together")
    )
    assert apart == together - 1


def test_protocols_with_children_are_the_means_for_all_and_whatever_has_its_own() -> None:
    names = {
        "runtime/honed/process/rpc.py": "from .children import start\n",
        "daemon/honed/a.py": "from honed.process import aio\naio.spawn((), stdout=True)\n",
        "daemon/honed/b.py": "def f():\n    from honed.process.children import ResourceLimits, spawn\n",
        "daemon/honed/c.py": "from honed.process.children import ResourceLimits\n",
        "daemon/honed/d.py": "from multiprocessing import get_context\n",
    }
    found = house.child_protocols(House(tuple(map(Module, names, names.values())), {}))
    assert found == ["runtime/honed/process/rpc.py", *(f"daemon/honed/{name}.py" for name in "abd")]


def test_features_are_found_wherever_they_are_and_imports_of_them_but_for_where_all_is_put_together() -> None:
    importing = "from honed.daemon.features import cache\n"
    names = {
        "daemon/honed/daemon/features/cache.py": "from honed.daemon.features import base\n",
        "daemon/honed/daemon/features/base.py": "",
        "daemon/honed/daemon/changes/again.py": "class Again(Feature):\n    pass\n",
        "daemon/honed/daemon/service.py": importing,
        "daemon/honed/daemon/serving/pool.py": importing + "from honed.daemon.changes import again\n",
    }
    small = House(tuple(map(Module, names, names.values())), {})
    pool = "honed.daemon.serving.pool imports honed.daemon"
    assert house.into_features(small) == [f"{pool}.changes.again", f"{pool}.features.cache"]
    assert house.misplaced_features(small) == ["honed.daemon.changes.again"]


def test_modules_that_a_string_names_are_found_in_other_parts() -> None:
    names = {
        "tuner/honed/tuner/a.py": 'import_module("honed.farm.board")\nNAME = "honed.tuner.b"\n',
        "tuner/honed/tuner/b.py": "",
        "extensions/honed/farm/board.py": "",
    }
    small = House(tuple(map(Module, names, names.values())), {})
    assert house.by_string(small) == ["honed.tuner.a names honed.farm.board"]


def test_imports_for_types_and_in_functions_make_cycles_of_their_own() -> None:
    assert house.cycles(SMALL) == []
    assert house.cycles(SMALL, deferred=True) == ["honed.daemon.one, honed.daemon.three, honed.daemon.two"]


def test_packages_that_import_each_other_are_found() -> None:
    def package(**texts: str) -> House:
        files = (f"tuner/honed/{name.replace('__', '/')}.py" for name in texts)
        return House(tuple(map(Module, files, texts.values())), {})

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


def test_a_way_has_each_file_once_and_folders_as_one() -> None:
    files = [f"daemon/honed/daemon/{name}" for name in ("one.py", "two.py", "")]
    assert house.way(SMALL, "The way of a request") == [*files, "runtime/honed/runtime/calling/link.py"]


def test_a_way_through_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"no daemon/honed/daemon/two\.py"):
        house.way(House(SMALL.modules[:1], SMALL.pages), "The way of a request")


def test_the_page_of_this_house_leads_through_files_that_exist(here: House) -> None:
    assert all(house.way(here, heading) for heading in house.WAYS)


def test_strokes_are_no_words() -> None:
    assert house.words("| a | b-c |\n|---|---|\n- d, e") == 4


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
    (tmp_path / "docs" / "dev").mkdir(parents=True)
    (tmp_path / house.PAGE).write_text(PAGE)
    (tmp_path / "runtime/honed/runtime/calling/link.py").unlink()
    house.main([str(tmp_path), "--against", "HEAD", "--names"])
    told = capsys.readouterr().out
    assert "| what | HEAD | now |" in told
    assert "| files | 4 | 3 |" in told
    assert f"| words of all pages | 0 | {house.words(PAGE)} |" in told
    assert "protocols with child processes | 1 | 0 |" in told
    with pytest.raises(SystemExit, match="git has no nowhere"):
        house.main([str(tmp_path), "--against", "nowhere"])
