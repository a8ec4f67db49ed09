"""The manual pages: right for man, and of one mind with the command lines and settings they describe."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from honed.daemon import service
from honed.daemon.config import settings
from honed.frigate import main as frigate
from honed.http import main as http
from honed.tool import main as tool

from .commands import all_commands

ROOT = Path(__file__).parents[2]
MAN = ROOT / "packaging" / "man"
PAGES = sorted(MAN.glob("*.[158]"))
HELP = {"-h", "--help"}


@pytest.mark.skipif(shutil.which("man") is None, reason="there is no man")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_man_shows_it_without_warnings(page: Path) -> None:
    """As lintian runs it."""
    environment = os.environ | {"LC_ALL": "C.UTF-8", "MANROFFSEQ": "", "MANWIDTH": "80"}
    command = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(page)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="there is no mandoc")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mandoc_finds_nothing_wrong(page: Path) -> None:
    done = subprocess.run(["mandoc", "-Tlint", "-Wwarning", str(page)], stdout=subprocess.PIPE, text=True)
    assert done.stdout == ""


def test_there_is_a_page_for_each_program_and_the_settings() -> None:
    assert [page.name for page in PAGES] == [
        "hone.1",
        "honed-frigate.8",
        "honed-http.8",
        "honed-hub.8",
        "honed-run.1",
        "honed-tuner.8",
        "honed.8",
        "honed.toml.5",
    ]


def sections(page: Path, macro: str) -> dict[str, str]:
    """The parts of a page by their headings, of .Sh or .Ss."""
    parts = re.split(rf"^\.{macro} (.*)\n", page.read_text(), flags=re.M)
    texts = (re.split(r"^\.Sh ", text, flags=re.M)[0] for text in parts[2::2])
    return dict(zip(parts[1::2], texts, strict=True))


def listed(text: str) -> dict[str, str]:
    """The options that a part of a page lists, as they are typed, with the name of their value or ""."""
    found = {}
    for item in re.findall(r"^\.It (Fl .*)", text, re.M):
        for each in item.split(" , "):
            option, _, value = each.removeprefix("Fl ").partition(" Ar ")
            found[f"-{option}"] = value
    return found


def taken(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The options that a parser takes."""
    found = {}
    for action in parser._actions:
        value = " | ".join(action.choices) if action.choices else action.metavar or action.dest.upper()
        for option in action.option_strings:
            found[option] = str(value) if action.nargs is None else ""
    return found


EVERYWHERE = taken(tool.parser())


def test_the_page_of_hone_has_every_command_and_no_other() -> None:
    described = sections(MAN / "hone.1", "Ss")
    assert set(described) == set(all_commands())
    assert listed(sections(MAN / "hone.1", "Sh")["OPTIONS"]) == EVERYWHERE


@pytest.mark.parametrize("name", all_commands())
def test_a_command_is_described_with_all_it_takes(name: str) -> None:
    text = sections(MAN / "hone.1", "Ss")[name]
    own = {option: value for option, value in taken(all_commands()[name]).items() if option not in EVERYWHERE}
    assert listed(text) == own
    synopsis = text.split(".Pp")[0]
    for action in all_commands()[name]._actions:
        if action.option_strings:
            assert any(f"Fl {option[1:]}" in synopsis for option in action.option_strings) or (
                set(action.option_strings) & set(EVERYWHERE)
            ), action.option_strings
        elif action.choices:
            assert all(choice in synopsis for choice in action.choices)
        else:
            assert re.search(rf"Ar {action.metavar}\b", synopsis), action.metavar


def test_the_page_of_honed_has_every_option() -> None:
    assert listed((MAN / "honed.8").read_text()) == taken(service._parser())


@pytest.mark.parametrize("bridge", [frigate, http])
def test_the_pages_of_the_bridges_have_every_option(bridge: ModuleType) -> None:
    parser = bridge.parser()
    assert listed((MAN / f"{parser.prog}.8").read_text()) == taken(parser)


def test_the_page_of_honed_tuner_has_every_option() -> None:
    pytest.importorskip("honed.tuner")
    command = [sys.executable, "-m", "honed.tuner.service", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", told.split("options:")[1].split("examples:")[0]))
    assert set(listed((MAN / "honed-tuner.8").read_text())) == found


def test_the_page_of_the_settings_is_made_from_their_document() -> None:
    command = [sys.executable, str(MAN / "settings.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    hint = "run 'python3 packaging/man/settings.py > packaging/man/honed.toml.5'"
    assert made == (MAN / "honed.toml.5").read_text(), hint


def test_the_page_of_the_settings_has_every_setting() -> None:
    found = re.findall(r"^\.It Cm (\S+)", (MAN / "honed.toml.5").read_text(), re.M)
    assert set(found) == set(settings())
