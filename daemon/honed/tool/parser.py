"""Provides what the commands' parsers share: global options, errors as exceptions, values of options."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from honed.protocol.errors import NotFound

from .output import Output, capital

Run = Callable[[argparse.Namespace, Output], int | None]  # Returns the exit status, None for 0


class UsageError(Exception):
    """Raised when the command line is wrong; one sentence that ends with where to read more."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError instead of printing its usage and exiting.

    `missing` names the package of a command that is not installed; parsing then raises NotFound with it.
    """

    missing = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; raise NotFound if the command is not installed."""
        if self.missing:
            raise NotFound(self.missing)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with `message` and where to read more."""
        raise UsageError(f"{message}; see '{self.prog} --help'")


def add_command(commands: Any, name: str, about: str) -> Parser:
    """Add a subcommand, which `define` completes."""
    parser: Parser = commands.add_parser(
        name,
        help=about,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def define(command: Parser, run: Run, *, details: str = "", examples: str) -> None:
    """Set the function that runs a command, and its help, which ends with `examples`."""
    about = f"{capital(command.description or '')}.{' ' if details else ''}{details}"
    command.description = textwrap.fill(about, 90)
    command.epilog = f"examples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}"
    command.set_defaults(run=run)
    add_global_options(command, nested=True)


def add_action(actions: Any, name: str, run: Run, *, about: str, details: str = "", examples: str) -> Parser:
    """Add an action of a command, which `run` carries out."""
    action = add_command(actions, name, about)
    define(action, run, details=details, examples=examples)
    return action


def add_actions(command: Parser) -> Any:
    """Return the object that a command's actions are added to; the command does nothing by itself."""
    command.description = None
    return command.add_subparsers(metavar="ACTION", required=True, parser_class=Parser, title="actions")


def add_global_options(parser: argparse.ArgumentParser, *, nested: bool = False) -> None:
    """Add --socket and --json, which are accepted before and after the command's name."""
    group = parser.add_argument_group("options of every command") if nested else parser
    unset: Any = argparse.SUPPRESS if nested else None
    group.add_argument(
        "--socket",
        metavar="PATH",
        default=unset,
        help="the service's socket (default: $HONED_SOCKET, else where honed listens)",
    )
    group.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS if nested else False,
        help="print one JSON document on standard output, also for errors",
    )


def add_compile_options(parser: argparse._ActionsContainer, *, several: bool = False) -> None:
    """Add --shape, --precision and --calibration, as `add`, `compile` and `tune` accept them.

    With `several`, the help says that sets of shapes may be given.
    """
    again = "; an input given again begins another set of shapes, and the model is compiled for each set"
    parser.add_argument(
        "--shape",
        action="append",
        type=shape,
        default=[],
        metavar="IN=1,3,224,224",
        help="the shape of an input whose sizes the model leaves open; may be given for each input"
        + (again if several else ""),
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "fp32", "fp16"),
        default="auto",
        help="type of the arithmetic (default auto: fp16 where the device computes it faster and errors stay "
        "small, else the model's own)",
    )
    parser.add_argument(
        "--calibration",
        metavar="DIR",
        type=Path,
        help="folder of .npz files, each with a value for every input, on which the compiled form is "
        "verified and auto measures the errors of fp16 (default: inputs are made up)",
    )


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse `IN=1,3,224,224` into a name and sizes; a name may contain an equals sign."""
    name, equals, sizes = text.rpartition("=")
    parts = sizes.split(",")
    if not name or not equals or not all(p.strip().isascii() and p.strip().isdigit() for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form IN=1,3,224,224")
    return name, tuple(int(p) for p in parts)


def parse_named_file(text: str) -> tuple[str, Path]:
    """Parse `NAME=FILE.npy` into a name and a path; a file may contain an equals sign."""
    name, equals, file = text.partition("=")
    if not name or not equals or not file:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=FILE.npy")
    return name, Path(file)


def unique(option: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values of a repeated `option` by name; raise UsageError if a name occurs twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UsageError(f"{option} is given twice for {name!r}; give it once")
        found[name] = value
    return found


def shape_sets(pairs: list[tuple[str, tuple[int, ...]]]) -> list[dict[str, tuple[int, ...]]]:
    """Return repeated --shape options as at least one set; an input that occurs again begins another."""
    sets: list[dict[str, tuple[int, ...]]] = [{}]
    for name, sizes in pairs:
        if name in sets[-1]:
            sets.append({})
        sets[-1][name] = sizes
    return sets


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    return _positive(text, 1e9, "seconds")


def minutes(text: str) -> float:
    """Parse a positive number of minutes."""
    return _positive(text, 1e9, "minutes")


def patience(text: str) -> float:
    """Parse the seconds to wait: a positive number, or infinity."""
    return _positive(text, math.inf, "seconds, nor inf")


def _positive(text: str, most: float, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value < most or value == most == math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of {unit}")
    return value
