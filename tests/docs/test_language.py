"""What a script can see of how pages are written: their lines, words that nobody else uses, and paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .texts import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LONGEST = 120  # characters of a line that is no row of a table and holds no link
# Words of honed's own for what the field has words for, and half sentences without an actor.
PRIVATE = (
    "for want of",
    "hangs on",
    "likewise",
    "nobody's to trust",
    "proven right",
    "what came of",
    "what comes of",
    "what is made of",
    "whoever",
    "is told what",
    "one that is so",
    "hurried",
    "spoilt",
)
# Names of values that say how something came to be known, and not what it is.
NAMES = re.compile(r"^[^#\"\n]*\b_?(told|kin|brought|met)\b(?: = |: [a-zA-Z]+\[|\()", re.MULTILINE)
STORED = {"brought", "met"}  # fields of manifests, of the protocol and of the ledger
# Of those who change the code. All others say what the program does, and name no file of it.
FOR_DEVELOPERS = ROOT / "docs" / "dev"


def prose(page: Path) -> list[str]:
    """The lines outside of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE).splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page: Path) -> None:
    lines = [line for line in prose(page) if not line.startswith("|") and "](" not in line]
    assert [line for line in lines if len(line) > LONGEST] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", " ".join(prose(page))).lower()  # what programs say is theirs
    assert [term for term in PRIVATE if re.search(rf"\b{re.escape(term)}\b", text)] == []


@pytest.mark.parametrize("root", ["daemon", "runtime", "tuner", "extensions", "libhoned", "benchmarks"])
def test_programs_use_the_words_of_the_field(root: str) -> None:
    terms = re.compile(rf"\b({'|'.join(map(re.escape, PRIVATE))})\b", re.IGNORECASE)
    programs = (path for path in (ROOT / root).rglob("*.*") if path.suffix in {".py", ".c", ".h", ".hpp"})
    files = sorted(programs)
    assert files
    assert [(str(file), found) for file in files for found in terms.findall(file.read_text())] == []
    named = {(file.name, found) for file in files for found in NAMES.findall(file.read_text())}
    assert {one for one in named if one[1] not in STORED} == set()
    assert {file for file, _ in named} <= {"usage.py", "store.py", "results.py"}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if FOR_DEVELOPERS not in page.parents], ids=lambda page: page.name
)
def test_user_pages_name_no_files_of_the_program(page: Path) -> None:
    text = "\n".join(prose(page))
    assert re.findall(r"`(?:daemon|runtime|tuner|extensions|tests)/[\w/]+\.py`", text) == []
