"""How the program of a bridge starts: its options, its log, its exit status."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from honed.protocol.errors import HonedError
from honed.runtime.version import HONED_VERSION

from .settings import load

T = TypeVar("T")


def parser(program: str, description: str, config: Path) -> argparse.ArgumentParser:
    """The options that every bridge has; `config` is the file read where none is given."""
    made = argparse.ArgumentParser(prog=program, description=description)
    made.add_argument("--config", type=Path, metavar="FILE", help=f"settings, in TOML (default {config})")
    made.add_argument("--socket", metavar="PATH", help="the service's socket (or HONED_SOCKET)")
    made.add_argument("--verbose", action="store_true", help="log more")
    made.add_argument("--version", action="version", version=f"{program} {HONED_VERSION}")
    return made


def launch(
    options_of: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    kind: type[T],
    config: Path,
    serve: Callable[[T, str | None], Any],
) -> int:
    """Read the settings and serve; gives the exit status: 0 stopped when told to, 1 failed, 2 misused."""
    options = options_of.parse_args(arguments)
    os.umask(0o077)  # what a bridge makes is nobody else's until it says so
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format=f"{options_of.prog}: %(message)s")
    try:
        settings = load(kind, options.config or config, required=options.config is not None)
        serve(settings, options.socket)
    except HonedError as error:
        print(f"{options_of.prog}: {error}", file=sys.stderr)
        return 1
    return 0
