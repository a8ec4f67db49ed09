"""The commands of hone as its parser has them."""

from __future__ import annotations

import argparse
from functools import cache

from honed.tool.main import parser


@cache
def all_commands() -> dict[str, argparse.ArgumentParser]:
    """Each command that does something by its name, as "add" and "records export", in the order of --help."""
    return dict(_below(parser(), ""))


def _below(above: argparse.ArgumentParser, prefix: str) -> list[tuple[str, argparse.ArgumentParser]]:
    found: list[tuple[str, argparse.ArgumentParser]] = []
    for action in above._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                found += _below(each, f"{prefix}{name} ") or [(f"{prefix}{name}", each)]
    return found
