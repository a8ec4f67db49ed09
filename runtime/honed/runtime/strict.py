"""Dataclasses to plain maps and lists and back, refusing whatever the types do not allow.

Maps have exactly the fields of their dataclass; one that has a default may be missing, as it is from data
that is older than the field. A field whose type is a union of dataclasses is a map of one key, the
lower-cased class name. Nothing is coerced, except an integer where a float is expected.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")
INTEGERS = range(-(2**63), 2**64)  # what msgpack can carry


class Mismatch(ValueError):
    """Data that does not have the shape its type asks for; the message names the place."""


def to_plain(value: Any, *, omit_none: bool = False) -> Any:
    """Maps, lists, strings, numbers, booleans and None for `value`, a dataclass or a part of one.

    With `omit_none`, fields that are None are left out, for formats that have no such value (TOML).
    """
    if dataclasses.is_dataclass(value):
        hints = _hints(value.__class__)
        plain: dict[str, Any] = {}
        for name, hint in hints.items():
            field = getattr(value, name)
            if field is None and omit_none:
                continue
            plain[name] = _field_to_plain(hint, field, omit_none)
        return plain
    if isinstance(value, dict):
        return {key: to_plain(item, omit_none=omit_none) for key, item in value.items()}
    if isinstance(value, tuple):
        return [to_plain(item, omit_none=omit_none) for item in value]
    return value


def from_plain(kind: type[T], plain: object, *, where: str, none_omitted: bool = False) -> T:
    """The `kind` (a dataclass) that `plain` describes; raises Mismatch. `where` names it in messages."""
    return typing.cast(T, _decode(kind, plain, where, none_omitted))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def _defaulted(kind: type) -> frozenset[str]:
    """The fields of a dataclass that have a default."""
    fields = dataclasses.fields(kind)
    missing = dataclasses.MISSING
    return frozenset(f.name for f in fields if f.default is not missing or f.default_factory is not missing)


def _field_to_plain(hint: Any, value: Any, omit_none: bool) -> Any:
    if isinstance(value, tuple) and typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if len(items) == 2 and items[1] is Ellipsis and len(_classes(items[0])) > 1:
            return [{type(item).__name__.lower(): to_plain(item, omit_none=omit_none)} for item in value]
    return to_plain(value, omit_none=omit_none)


@functools.cache
def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union; `hint` alone where it is none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


@functools.cache
def _classes(hint: Any) -> dict[str, type]:
    """The dataclasses among the members of `hint`, by lower-cased name."""
    return {
        m.__name__.lower(): m for m in _members(hint) if dataclasses.is_dataclass(m) and isinstance(m, type)
    }


def _decode(hint: Any, plain: object, where: str, none_omitted: bool) -> object:
    members = _members(hint)
    if len(members) > 1:
        return _decode_union(hint, members, plain, where, none_omitted)
    if dataclasses.is_dataclass(hint):
        return _decode_class(typing.cast(type, hint), plain, where, none_omitted)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if plain not in args or not isinstance(plain, str):
            raise Mismatch(f"{where} is {shown(plain)} instead of one of {', '.join(map(str, args))}")
        return plain
    if origin is tuple:
        return _decode_tuple(args, plain, where, none_omitted)
    if origin is dict:
        if not isinstance(plain, Mapping):
            raise Mismatch(f"{where} is {shown(plain)} instead of a map")
        return {
            _decode(args[0], key, f"a key of {where}", none_omitted): _decode(
                args[1], item, f"{where}[{shown(key)}]", none_omitted
            )
            for key, item in plain.items()
        }
    return _decode_scalar(hint, plain, where)


def _decode_union(
    hint: Any, members: tuple[Any, ...], plain: object, where: str, none_omitted: bool
) -> object:
    if plain is None and type(None) in members:
        return None
    others = [m for m in members if m is not type(None)]
    if len(others) == 1:
        return _decode(others[0], plain, where, none_omitted)
    classes = _classes(hint)
    if classes:
        if not isinstance(plain, Mapping) or len(plain) != 1:
            raise Mismatch(f"{where} is {shown(plain)} instead of a map of one of {', '.join(classes)}")
        tag, body = next(iter(plain.items()))
        if tag not in classes:
            raise Mismatch(f"{where} is of kind {shown(tag)} instead of one of {', '.join(classes)}")
        return _decode_class(classes[tag], body, where, none_omitted)
    for member in others:
        if _is_exactly(member, plain):
            return _decode(member, plain, where, none_omitted)
    raise Mismatch(f"{where} is {shown(plain)}, a type that is not allowed there")


def _is_exactly(member: Any, plain: object) -> bool:
    if typing.get_origin(member) is tuple:
        return isinstance(plain, list)
    return type(plain) is member


def _decode_class(kind: type, plain: object, where: str, none_omitted: bool) -> object:
    if not isinstance(plain, Mapping):
        raise Mismatch(f"{where} is {shown(plain)} instead of a map")
    hints = _hints(kind)
    unknown = [key for key in plain if key not in hints]
    if unknown:
        raise Mismatch(f"{where} has the unknown key {shown(unknown[0])}")
    values: dict[str, object] = {}
    for name, hint in hints.items():
        if name in plain:
            values[name] = _decode(hint, plain[name], f"{where}.{name}", none_omitted)
        elif name not in _defaulted(kind):
            if not (none_omitted and type(None) in _members(hint)):
                raise Mismatch(f"{where} lacks the key {name!r}")
            values[name] = None
    return kind(**values)


def _decode_tuple(args: tuple[Any, ...], plain: object, where: str, none_omitted: bool) -> tuple[object, ...]:
    if not isinstance(plain, list):
        raise Mismatch(f"{where} is {shown(plain)} instead of a list")
    if len(args) == 2 and args[1] is Ellipsis:
        if _all_plain(args[0], plain):
            return tuple(plain)
        kinds: tuple[Any, ...] = (args[0],) * len(plain)
    else:
        kinds = args
        if len(plain) != len(kinds):
            raise Mismatch(f"{where} has {len(plain)} items instead of {len(kinds)}")
    return tuple(
        _decode(kind, item, f"{where}[{i}]", none_omitted)
        for i, (kind, item) in enumerate(zip(kinds, plain, strict=True))
    )


_PLAIN = frozenset({int, str, bytes, memoryview})


def _all_plain(kind: Any, items: list[Any]) -> bool:
    """Whether these need no decoding one by one: long lists of numbers and data are common."""
    kinds = _members(kind)
    if not _PLAIN.issuperset(kinds) or not all(type(item) in kinds for item in items):
        return False
    return kind is not int or not items or (min(items) in INTEGERS and max(items) in INTEGERS)


def _decode_scalar(hint: Any, plain: object, where: str) -> object:
    if hint is float and type(plain) is int:
        return float(plain)
    if type(plain) is not hint:
        raise Mismatch(f"{where} is {shown(plain)} instead of {_NAMES.get(hint, str(hint))}")
    if hint is int and plain not in INTEGERS:
        raise Mismatch(f"{where} is {shown(plain)}, which is out of range")
    return plain


_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


class _Short(reprlib.Repr):
    """Looks at the first part of a value only: what is shown may be a peer's, and of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 2 * _SHOWN, 2 * _SHOWN
        self.maxlist = self.maxtuple = self.maxdict = 20

    def repr_bytes(self, value: bytes, level: int) -> str:
        """`reprlib` knows bytes only as any other object, whose whole text it makes first."""
        return repr(value[: 2 * _SHOWN])

    def repr_dict(self, value: dict[object, object], level: int) -> str:
        """Without the sorting of `reprlib`, which looks at every key."""
        first = list(itertools.islice(value.items(), self.maxdict))
        text = ", ".join(
            f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in first
        )
        return f"{{{text}{', ...' if len(value) > len(first) else ''}}}" if level > 0 else "{...}"


_SHOWN = 60  # letters of a value in a message
_short = _Short()


def shown(value: object) -> str:
    """`value` for a message: its first letters, found in a time that does not depend on its size."""
    text = _short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
