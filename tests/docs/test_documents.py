"""The documents tell the truth: commands that exist, examples as they stand, errors as they are said."""

from __future__ import annotations

import importlib.util
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest

from honed.daemon.config import TABLES, settings
from honed.machine.families import MALI_MODELS
from honed.runtime import errors
from honed.tool import main as tool
from honed.tuner.graph import PASSES

from . import schemas
from .commands import all_commands
from .texts import ROOT, texts

GUIDES = [ROOT / "docs" / "guide.md", ROOT / "docs" / "apps.md"]
ERRORS = ROOT / "docs" / "errors.md"
LIBRARY = ROOT / "docs" / "c.md"
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
]
PAGES = sorted((ROOT / "packaging" / "man").glob("*.[158]"))
EXAMPLES = sorted((ROOT / "examples").glob("*.*"))


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", file.read_text(), re.M | re.S)


def commands(file: Path) -> list[str]:
    """The calls of hone that stand on lines of their own."""
    text = file.read_text()
    if file in PAGES:
        lines = re.findall(r"^(?:\.Dl )?(hone .*)", text, re.M)
    else:
        fenced = "\n".join([*blocks(file, "sh"), *re.findall(r"^\$ (.*)", text, re.M)])
        lines = re.findall(r"^\s*(hone .*)", fenced, re.M)
    return [re.split(r" #| > ", line)[0].strip() for line in lines]


@pytest.mark.parametrize("file", [*DOCUMENTS, *PAGES], ids=lambda file: file.name)
def test_every_command_shown_can_be_given(file: Path) -> None:
    for command in commands(file):
        tool.parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_every_command_spoken_of_exists_with_its_options(file: Path) -> None:
    """In running text commands are often named without all that they need."""
    of_all = {option for action in tool.parser()._actions for option in action.option_strings}
    for call in re.findall(r"`hone ([a-z-][^`]*)`", file.read_text()):
        call = re.sub(r"--socket \S+ ?", "", call)
        words = [word for word in call.split() if not word.startswith("-")]
        named = [name for name in all_commands() if name.split() == words[: len(name.split())]]
        named = named or [name for name in all_commands() if words[:1] == name.split()[:1]]
        assert named or not words, call
        actions = [action for name in named for action in all_commands()[name]._actions]
        known = {option for action in actions for option in action.option_strings}
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", call)) <= known | of_all, call


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_every_link_leads_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (file.parent / path) if path else file
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", linked.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_every_program_named_is_there(file: Path) -> None:
    named = set(re.findall(r"python3? -m ((?:benchmarks|tests|honed)\b[\w.]*)", file.read_text()))
    assert {name for name in named if importlib.util.find_spec(name) is None} == set()


@pytest.mark.parametrize(("file", "language"), [(GUIDES[1], "python"), (LIBRARY, "c"), (LIBRARY, "cpp")])
def test_the_examples_of_the_guide_are_those_that_are_run(file: Path, language: str) -> None:
    programs = sorted((ROOT / "tests" / "libhoned").glob("*.c*")) if file == LIBRARY else []
    written = "\n".join(textwrap.dedent(each.read_text()) for each in [*EXAMPLES, *programs])
    flat = re.sub(r"^\s+", "", written, flags=re.M)
    assert blocks(file, language)
    for block in blocks(file, language):
        if "honed.runtime.load(" not in block:  # test_examples.py runs that one itself
            assert re.sub(r"^\s+", "", block, flags=re.M) in flat, block


def test_every_setting_shown_exists() -> None:
    for file in GUIDES:
        for block in blocks(file, "toml"):
            plain = tomllib.loads(block)
            for table, keys in plain.items():
                assert {f"{table}.{key}" for key in keys} <= set(settings())
        keys = {name.split(".")[1] for name in settings()}
        for row in re.findall(r"`([^`]+)` in `\[(\w+)\]`", file.read_text()):
            assert row[1] in TABLES
            assert row[0].split(" = ")[0] in keys
            assert f"{row[1]}.{row[0].split(' = ')[0]}" in settings()


def errors_explained() -> list[tuple[str, str]]:
    return re.findall(r"^\| `([^`]+)` \| ([A-Z_]+) \|", ERRORS.read_text(), re.M)


def test_the_pages_hold_what_is_checked_here() -> None:
    assert len(errors_explained()) > 30
    assert len(commands(GUIDES[0])) > 10


@pytest.mark.parametrize(("sentence", "code"), errors_explained())
def test_every_error_explained_is_said_with_that_code(sentence: str, code: str) -> None:
    said = [text for text in texts() if text.says(sentence)]
    assert said, "no part of honed says this"
    assert code in {text.code for text in said if text.code} or not any(text.code for text in said)


def test_every_code_is_explained_to_app_developers() -> None:
    explained = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", ERRORS.read_text(), re.M))
    kinds = (each for each in vars(errors).values() if isinstance(each, type))
    codes = {kind.code for kind in kinds if issubclass(kind, errors.HonedError)}
    left_out = {"ALREADY_EXISTS", "FAILED_PRECONDITION", "UNIMPLEMENTED"}  # not answered to an inference
    assert set(explained) == codes - left_out
    for code, name in explained.items():
        assert getattr(errors, name).code == code


@pytest.mark.parametrize("file", schemas.WRITTEN, ids=lambda file: file.name)
def test_what_pages_repeat_is_as_in_the_code(file: Path) -> None:
    assert file.read_text() == schemas.WRITTEN[file](), "run 'python -m tests.docs.schemas'"


def test_lists_in_pages_are_complete() -> None:
    """What pages explain by hand, row by row."""
    folder = ROOT / "docs"
    graph = (folder / "dev" / "graph.md").read_text().partition("\n\nThese work on the operators")[0]
    assert re.findall(r"^\| (\w+) \| .* \| .* \|$", graph, re.M)[1:] == [each.name for each in PASSES]
    profiles = (folder / "dev" / "devices.md").read_text()
    assert [each.name for each in MALI_MODELS if each.name.removeprefix("Mali-") not in profiles] == []
    assert [each.code for each in MALI_MODELS if each.code not in profiles] == []
    packages = re.findall(r"^Package: (\S+)$", (ROOT / "debian" / "control").read_text(), re.M)
    rows = re.findall(r"^\| (`[a-z0-9-]+`(?:, `[a-z0-9-]+`)*) \|", (folder / "install.md").read_text(), re.M)
    assert [name for name in packages if not any(f"`{name}`" in row for row in rows)] == []
    types = schemas.PROTOCOL.read_text()
    headings = re.findall(r"^### (.*)$", (folder / "protocol.md").read_text(), re.M)
    methods = {name for heading in headings for name in heading.split(", ") if name[:1].isupper()}
    assert {name for name in methods if " " not in name} - {"Cancel"} <= set(
        re.findall(r"^(\w+) \(", types, re.M)
    )
