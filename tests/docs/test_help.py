"""--help and --version of the programs: examples that are right, and the same as in the manual pages."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from honed.daemon import service
from honed.tool import main as tool

from .commands import all_commands

MAN = Path(__file__).parents[2] / "packaging" / "man"
PROGRAMS = {
    "hone": ("honed.tool.main", "hone.1"),
    "honed": ("honed.daemon.service", "honed.8"),
    "honed-tuner": ("honed.tuner.service", "honed-tuner.8"),
}


def asked(program: str, option: str) -> str:
    """What a program prints."""
    module, _ = PROGRAMS[program]
    if program == "honed-tuner":
        pytest.importorskip("honed.tuner")
    return subprocess.run(
        [sys.executable, "-m", module, option], capture_output=True, text=True, check=True
    ).stdout


def examples(text: str, program: str) -> list[str]:
    """The command lines below "examples:", without what is said of them."""
    lines = text.partition("examples:\n")[2].split("\n\n")[0].splitlines()
    commands = [re.split(r"\s{2,}", line.strip())[0] for line in lines]
    return [command for command in commands if command.split()[0] == program]


def parses(parser: argparse.ArgumentParser, command: str) -> None:
    parser.parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_tells_its_version(program: str) -> None:
    assert asked(program, "--version") == f"{program} {version('honed')}\n"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_examples_of_a_program_are_in_its_manual_page(program: str) -> None:
    page = (MAN / PROGRAMS[program][1]).read_text().partition(".Sh EXAMPLES")[2]
    found = examples(asked(program, "--help"), program)
    assert found
    for command in found:
        if command != program:  # that needs no example in a page
            assert re.search(rf"^(\.Dl )?{re.escape(command)}$", page, re.M), command


def test_the_examples_of_the_programs_can_be_typed() -> None:
    for command in examples(tool.parser().format_help(), "hone"):
        parses(tool.parser(), command)
    for command in examples(service._parser().format_help(), "honed"):
        parses(service._parser(), command)


@pytest.mark.parametrize("name", all_commands())
def test_each_command_has_examples_that_can_be_typed(name: str) -> None:
    found = examples(all_commands()[name].format_help(), "hone")
    assert any(command.startswith(f"hone {name}") for command in found)
    for command in found:
        parses(tool.parser(), command)


@pytest.mark.parametrize("page", ["hone.1", "honed.8"])
def test_the_examples_of_a_page_can_be_typed(page: str) -> None:
    program = page.partition(".")[0]
    text = (MAN / page).read_text().partition(".Sh EXAMPLES")[2].partition(".Sh ")[0]
    found = re.findall(rf"^(?:\.Dl )?({program} .*)$", text, re.M)
    assert found
    for command in found:
        parses(tool.parser() if program == "hone" else service._parser(), command)
