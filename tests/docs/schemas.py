"""The types of the protocol's messages, as docs/protocol-types.txt has them: `python -m tests.docs.schemas`.

They are written from the dataclasses that clients and the service send, so the file cannot differ from them.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
import types
import typing
from typing import Any, Final

from honed.protocol.methods import METHODS, Right

from .texts import ROOT

FILE: Final = ROOT / "docs" / "protocol-types.txt"
_HEAD: Final = """\
The messages of honed's socket. Written by `python -m tests.docs.schemas`; protocol.md says what they mean.

A method: who may call it; its parameters -> its result. A type stands after the last of the neighbouring
fields that have it; "field"? may be left out, or be nil. [X] is an array of any length, {str: X} a map, and
`any` depends on the context. `T and {...}` has the fields of both.

"""
_CALLERS: Final = {
    Right.ANYONE: "everybody",
    Right.INFER: "group honed",
    Right.OWN: "whoever brought the model; administrators",
    Right.HINTS: "group honed-hints; administrators",
    Right.CHANGE: "administrators",
}
_SCALARS: Final = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    bytes: "bin",
    memoryview: "bin",
    type(None): "nil",
}


def written() -> str:
    """Return the file: an entry for each method, then one for each type in them."""
    waiting: list[Any] = []
    done: dict[str, str] = {}
    for method in METHODS.values():
        sent, answered = (_described(kind, waiting) for kind in (method.params, method.result))
        files = ", and descriptors" if method.gives else ""
        done[method.name] = f"{method.name} ({_CALLERS[method.right]}): {sent} -> {answered}{files}"
    while waiting:
        title, kind = waiting.pop(0)
        if title not in done:
            done[title] = f"{title} = {_described(kind, waiting)}"
    lines = [
        textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in done.values()
    ]
    return _HEAD + "\n".join(lines) + "\n"


def _described(kind: Any, found: list[Any]) -> str:
    """Return the fields of a dataclass: neighbours share their type, and a base stands for its own fields."""
    hints = typing.get_type_hints(kind)
    bases = [base for base in kind.__bases__ if dataclasses.is_dataclass(base) and dataclasses.fields(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    shown = [
        _field(field, _shown(hints[field.name], found))
        for field in dataclasses.fields(kind)
        if field.name not in inherited
    ]
    groups = itertools.groupby(shown, key=lambda field: field[1])
    fields = [f"{', '.join(name for name, _ in group)}: {each}" for each, group in groups]
    return "".join(f"{_shown(base, found)} and " for base in bases) + f"{{{', '.join(fields)}}}"


def _field(field: dataclasses.Field[Any], shown: str) -> tuple[str, str]:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return f'"{field.name}"', shown
    return f'"{field.name}"?', shown.removesuffix(" or nil")


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
        return " or ".join(dict.fromkeys(_shown(each, found) for each in arguments))
    if origin is tuple and arguments[1:] == (...,):
        return f"[{_shown(arguments[0], found)}]"
    if origin is tuple:
        return f"[{', '.join(_shown(each, found) for each in arguments)}]"
    if origin is dict or (origin is not None and issubclass(origin, typing.Mapping)):
        return f"{{{_shown(arguments[0], found)}: {_shown(arguments[1], found)}}}"
    return _SCALARS[hint]


if __name__ == "__main__":
    FILE.write_text(written())
