"""The types of the protocol's large results, as docs/protocol.md has them: `python -m tests.docs.schemas`.

They are written from the dataclasses that the service sends, so that the page cannot differ from them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
import types
import typing
from typing import Any, Final

from honed.protocol import methods

from .texts import ROOT

PAGE: Final = ROOT / "docs" / "protocol.md"
BEGIN, END = "```text types\n", "```\n"
METHODS: Final = (methods.MODEL_SHOW, methods.MODEL_HISTORY, methods.SERVER_STATUS, methods.METRICS)
_SCALARS: Final = {str: "str", int: "int", float: "float", bool: "bool", bytes: "bin", type(None): "nil"}


def schemas() -> str:
    """Return a line for each result and each type in it: its name, and its fields with their types."""
    waiting: list[Any] = [(method.name, method.result) for method in METHODS]
    done: dict[str, str] = {}
    while waiting:
        title, kind = waiting.pop(0)
        if title in done:
            continue
        done[title] = f"{title} = {_described(kind, waiting)}"
    lines = [
        textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in done.values()
    ]
    return "\n".join(lines) + "\n"


def _described(kind: Any, found: list[Any]) -> str:
    """Return the fields of a dataclass: neighbours share their type, and a base stands for its own fields."""
    hints = typing.get_type_hints(kind)
    bases = [base for base in kind.__bases__ if dataclasses.is_dataclass(base) and dataclasses.fields(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    shown = [
        (f'"{field.name}"', _shown(hints[field.name], found))
        for field in dataclasses.fields(kind)
        if field.name not in inherited
    ]
    groups = itertools.groupby(shown, key=lambda field: field[1])
    fields = [f"{', '.join(name for name, _ in group)}: {each}" for each, group in groups]
    return "".join(f"{_shown(base, found)} and " for base in bases) + f"{{{', '.join(fields)}}}"


def _shown(hint: Any, found: list[Any]) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return "any"
    if dataclasses.is_dataclass(hint):
        found.append((hint.__name__, hint))
        return hint.__name__
    if origin is typing.Literal:
        return " | ".join(f'"{each}"' for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_shown(each, found) for each in arguments)
    if origin is tuple and arguments[1:] == (...,):
        return f"[{_shown(arguments[0], found)}]"
    if origin is tuple:
        return f"[{', '.join(_shown(each, found) for each in arguments)}]"
    if origin is dict or (origin is not None and issubclass(origin, typing.Mapping)):
        return f"{{{_shown(arguments[0], found)}: {_shown(arguments[1], found)}}}"
    return _SCALARS[hint]


def written(page: str) -> str:
    """Return the page with its block of types as they are now."""
    pattern = re.escape(BEGIN) + r".*?" + re.escape(END)
    made, count = re.subn(pattern, lambda _: BEGIN + schemas() + END, page, flags=re.DOTALL)
    assert count == 1, "the page has one block of types"
    return made


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
