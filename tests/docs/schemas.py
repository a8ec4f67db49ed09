"""Writes what pages repeat from the code: `python -m tests.docs.schemas`.

The types of messages and of compiled files are those of the dataclasses that are sent and stored. The module
`tables` has what stands within pages.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import textwrap
import types
import typing
from typing import Any, Final

from honed.protocol.methods import METHODS, Permission
from honed.runtime.compiled.model import CompiledModel

from . import tables
from .texts import ROOT

PROTOCOL: Final = ROOT / "docs" / "protocol-types.txt"
FORMAT: Final = ROOT / "docs" / "dev" / "format-types.txt"
_NOTATION: Final = """\
A type stands after the last of the neighbouring fields that have it; "field"? may be left out, or be nil.
[X] is an array of any length, [X, X] one of two, {str: X} a map, and `any` depends on the context.
`T and {...}` has the fields of both.

"""
_METHODS: Final = f"""\
The messages of honed's socket. Written by `python -m tests.docs.schemas`; protocol.md says what they mean.

A method: who may call it; its parameters -> its result.
{_NOTATION}"""
_HEADER: Final = f"""\
The header of a .honed file. Written by `python -m tests.docs.schemas`; format.md says what it means.

{_NOTATION}"""
_CALLERS: Final = {
    Permission.ANYONE: "everybody",
    Permission.INFER: "group honed",
    Permission.OWN: "whoever brought the model; administrators",
    Permission.HINTS: "group honed-hints; administrators",
    Permission.CHANGE: "administrators",
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


def protocol() -> str:
    """Return an entry for each method of the socket, then one for each type in them."""
    waiting: list[Any] = []
    methods = []
    for method in METHODS.values():
        sent, answered = (_described(kind, waiting) for kind in (method.params, method.result))
        files = ", and descriptors" if method.returns_descriptors else ""
        methods.append(f"{method.name} ({_CALLERS[method.right]}): {sent} -> {answered}{files}")
    return _METHODS + _text([*methods, *_entries(waiting)])


def header() -> str:
    """Return an entry for each type in a compiled file's header."""
    return _HEADER + _text(_entries([(CompiledModel.__name__, CompiledModel)]))


WRITTEN: Final = {PROTOCOL: protocol, FORMAT: header, **tables.WRITTEN}


def _entries(waiting: list[Any]) -> list[str]:
    """Return an entry for each type by its name, and for those in it."""
    done: dict[str, str] = {}
    while waiting:
        title, kind = waiting.pop(0)
        if title not in done:
            done[title] = f"{title} = {_described(kind, waiting)}"
    return list(done.values())


def _text(entries: list[str]) -> str:
    lines = (
        textwrap.fill(entry, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for entry in entries
    )
    return "\n".join(lines) + "\n"


def _described(kind: Any, found: list[Any]) -> str:
    """Return the fields of a dataclass: neighbours share their type, and a base stands for its own fields."""
    hints = typing.get_type_hints(kind)
    bases = [base for base in kind.__bases__ if dataclasses.is_dataclass(base) and dataclasses.fields(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    shown = [
        _field(field, _of_field(field, hints[field.name], found))
        for field in dataclasses.fields(kind)
        if field.name not in inherited
    ]
    groups = itertools.groupby(shown, key=lambda field: field[1])
    fields = [f"{', '.join(name for name, _ in group)}: {each}" for each, group in groups]
    return "".join(f"{_shown(base, found)} and " for base in bases) + f"{{{', '.join(fields)}}}"


def _field(field: dataclasses.Field[Any], shown: str) -> tuple[str, str]:
    name = field.metadata.get("wire", field.name)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return f'"{name}"', shown
    return f'"{name}"?', shown.removesuffix(" or nil")


def _of_field(field: dataclasses.Field[Any], hint: Any, found: list[Any]) -> str:
    """Return the type; an item of a list of several dataclasses is a map of one key, its tag."""
    if "tags" not in field.metadata:
        return _shown(hint, found)
    kinds = ((tag, _shown(kind, found)) for tag, kind in field.metadata["tags"].items())
    return "[" + " or ".join(f'{{"{tag}": {kind}}}' for tag, kind in kinds) + "]"


def _shown(hint: Any, found: list[Any]) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return "any"
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return " | ".join(f'"{each}"' for each in hint)
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
    for file, text in WRITTEN.items():
        file.write_text(text())
