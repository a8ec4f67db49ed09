"""What a script can see of how pages are written: their lines, words that nobody else uses, and paths."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
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
# Docstrings that begin so are half a sentence: who does what is left to the reader. A class is a noun phrase
# with its kind, a function an imperative, a boolean "Whether ..." with subject and verb.
ELLIPTIC = re.compile(r"(What|How|One|Of|Where|Which|Who|Those|So|Why|That)\b")
# Comments begin with a capital, but for what is written so everywhere: programs, drivers, types, functions.
LOWER = (
    {"b", "exp", "false", "inf", "int", "nil", "ns", "true", "type"}
    | {"dlopen", "gid", "inode", "malloc", "pid", "uid", "gzip", "journald", "fmt", "noqa", "rfactor"}
    | {"kbase", "kbase's", "lima", "msm", "panfrost", "llvmpipe", "libclc", "msgpack's", "onnx", "pyopencl"}
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


def product() -> Iterator[Path]:
    for root in ("daemon", "runtime", "tuner", "extensions"):
        yield from sorted((ROOT / root).rglob("*.py"))


def test_docstrings_begin_with_a_noun_phrase_or_a_verb() -> None:
    found = []
    for path in product():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if ELLIPTIC.match(text) or 0 < len(text.split()) < 4:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text[:80]}")
    assert found == []


def test_comments_begin_with_a_capital() -> None:
    found = []
    for path in product():
        last = -1  # Line of the comment before, which the next one may continue
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type != tokenize.COMMENT:
                continue
            line, column = token.start
            own = not token.line[:column].strip()
            text = token.string.lstrip("# ")
            word = re.match(r"[a-z]+('s)?(?=[ ,.;:]|$)", text)
            if not (own and last == line - 1) and word is not None and word[0] not in LOWER:
                found.append(f"{path.relative_to(ROOT)}:{line}: {text[:80]}")
            last = line
    assert found == []
