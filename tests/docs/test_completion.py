"""The bash completion of hone, in a real bash: it offers what hone takes, and the models there are."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from honed.tool.main import parser
from tests.daemon.conftest import service, small_model
from tests.daemon.running import DEADLINE, Service

from .commands import all_commands

__all__ = ["service", "small_model"]  # fixtures

COMPLETION = Path(__file__).parents[2] / "packaging" / "completion" / "hone"
TOOLS = str(Path(sys.executable).parent)
# Each line of stdin is a command line, whose words end with the unit separator; bash is started once for all.
CALL = r"""source "$1"; while IFS=$'\x1f' read -r -a COMP_WORDS; do
unset "COMP_WORDS[-1]"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); _hone </dev/null
printf "%s\n" "${COMPREPLY[@]}"; printf "\0"; done"""
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def all_offered(lines: Sequence[Sequence[str]], folder: Path | None = None) -> list[list[str]]:
    """What bash offers for the last word of each line, which it has split at "="."""
    command = ["bash", "-c", CALL, "bash", str(COMPLETION)]
    environment = os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}", "HONED_SOCKET": "/nonexistent"}
    given = "".join("\x1f".join(["hone", *words, "end"]) + "\n" for words in lines)
    done = subprocess.run(
        command, cwd=folder, env=environment, input=given, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    answers = [answer.split() for answer in done.stdout.split("\0")[:-1]]
    assert len(answers) == len(lines)
    return answers


def offered(*words: str, folder: Path | None = None) -> list[str]:
    """What bash offers for the last of the words."""
    return all_offered([words], folder)[0]


def options(command: argparse.ArgumentParser) -> set[str]:
    return {option for action in command._actions for option in action.option_strings}


def test_it_offers_every_command() -> None:
    assert offered("") == list(dict.fromkeys(name.split()[0] for name in all_commands()))
    assert offered("records", "") == ["export", "import"]
    assert offered("farm", "") == ["worker", "scheduler", "certificates"]


@cache
def offered_of_commands() -> dict[str, list[str]]:
    """What bash offers for "-" after each command."""
    names = list(all_commands())
    return dict(zip(names, all_offered([(*name.split(), "-") for name in names]), strict=True))


@pytest.mark.parametrize("name", all_commands())
def test_it_offers_every_option_of(name: str) -> None:
    assert set(offered_of_commands()[name]) == options(all_commands()[name])


def test_it_offers_the_options_that_stand_before_a_command() -> None:
    assert set(offered("-")) == options(parser())


def takes_a_value(command: argparse.ArgumentParser) -> dict[str, bool]:
    """Whether each option does."""
    return {option: action.nargs != 0 for action in command._actions for option in action.option_strings}


@cache
def offered_after_options() -> dict[tuple[str, str], list[str]]:
    """What bash offers for "-" after each option of each command."""
    places = [(name, option) for name, command in all_commands().items() for option in takes_a_value(command)]
    answers = all_offered([(*name.split(), option, "-") for name, option in places])
    return dict(zip(places, answers, strict=True))


@pytest.mark.parametrize("name", all_commands())
def test_it_knows_which_options_take_a_value(name: str) -> None:
    """After such an option no other is offered; after a flag they are."""
    for option, value in takes_a_value(all_commands()[name]).items():
        words = offered_after_options()[name, option]
        assert any(word.startswith("-") for word in words) != value, option


def test_it_offers_files_that_fit(tmp_path: Path) -> None:
    for file in ("a.onnx", "b.honed", "c.npy", "d.toml", "e.txt"):
        (tmp_path / file).touch()
    (tmp_path / "folder").mkdir()

    def files(*words: str) -> set[str]:
        return set(offered(*words, folder=tmp_path))

    assert files("add", "") == {"a.onnx", "b.honed", "folder"}
    assert files("compile", "") == {"a.onnx", "folder"}
    assert files("infer", "m", "--input", "x", "=", "") == {"c.npy", "folder"}
    assert files("infer", "m", "--input", "x", "=") == {"c.npy", "folder"}
    assert files("infer", "m", "--input", "") == set()
    assert files("config", "--check", "=", "") == {"d.toml", "folder"}
    assert files("infer", "m", "--output-dir", "") == {"folder"}
    assert files("records", "import", "e") == {"e.txt"}
    assert files("add", "--precision", "fp") == {"fp32", "fp16"}
    assert files("add", "--precision", "=", "a") == {"auto"}


def test_without_a_service_it_offers_no_model_and_says_nothing() -> None:
    assert offered("show", "") == []


class Shell:
    """An interactive bash with the completion, at a terminal."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._main, terminal = pty.openpty()
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-i"],
            env={**os.environ, "TERM": "dumb", "PS1": "", "COMPLETION": str(COMPLETION), **environment},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._seen = ""
        self._type("bind 'set enable-bracketed-paste off'; source \"$COMPLETION\"\n")

    def completed(self, line: str) -> str:
        """The line as it stands after Tab is pressed."""
        self._seen = ""
        self._type(f"{line}\t\x01echo '<''<' \x05 '>''>'\n")  # to the line's begin and end: Ctrl-A, Ctrl-E
        end = time.monotonic() + DEADLINE
        while not (found := re.search(r"<< (.*?) *>>", self._seen)):
            ready, _, _ = select.select([self._main], [], [], max(0.0, end - time.monotonic()))
            assert ready, self._seen
            self._seen += os.read(self._main, 4096).decode(errors="replace")
        return found[1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    def _type(self, text: str) -> None:
        os.write(self._main, text.encode())


@pytest.fixture
def shell(service: Service) -> Iterator[Shell]:
    started = Shell({"PATH": f"{TOOLS}:{os.environ['PATH']}", "HONED_SOCKET": str(service.socket)})
    yield started
    started.close()


@pytest.mark.service
@pytest.mark.opencl
def test_tab_completes_commands_options_and_the_models_of_the_service(shell: Shell, service: Service) -> None:
    assert shell.completed("hone prof") == "hone profile"
    assert shell.completed("hone infer sm") == "hone infer small"
    assert shell.completed("hone --json infer --random sm") == "hone --json infer --random small"
    assert shell.completed(f"HONED_SOCKET=/none hone --socket={service.socket} show s").endswith("show small")
    assert shell.completed("hone infer small --outp") == "hone infer small --output-dir"
    assert shell.completed("hone add m.onnx --precision=fp3") == "hone add m.onnx --precision=fp32"
