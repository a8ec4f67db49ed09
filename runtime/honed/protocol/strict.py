"""Dataclasses to plain maps and lists and back, refusing whatever the types do not allow.

Maps have exactly the fields of their dataclass; one that has a default may be missing, as it is from data
that is older than the field. A field whose type is a union of dataclasses is a map of one key, the
lower-cased class name. Paths and members of a StrEnum are text. Nothing is coerced, except an integer where a
float is expected.

What a type asks for is found out once: messages that come all the time are decoded by it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Final, Literal, TypeVar

T = TypeVar("T")
INTEGERS = range(-(2**63), 2**64)  # what msgpack can carry
Map = dict[str, Any]  # a dataclass as it travels
ABSENT: Final = {"absent": True}  # metadata of a field that is left out of the map where it is None
_Decoder = Callable[[Any], Any]


class Mismatch(ValueError):
    """Data that does not have the shape its type asks for; the message names the place."""


def to_plain(value: Any, *, omit_none: bool = False, omit_defaults: bool = False) -> Any:
    """Return maps, lists, strings, numbers, booleans and None for `value`, a dataclass or a part of one.

    With `omit_none`, fields that are None are left out, for formats that have no such value (TOML). With
    `omit_defaults`, fields that have their defaults are left out, for readers that are older than the field.
    """
    return _plain(value, omit_none, omit_defaults)


def _plain(value: Any, omit_none: bool, omit_defaults: bool) -> Any:
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is tuple:
        return [_plain(item, omit_none, omit_defaults) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, omit_none, omit_defaults) for key, item in value.items()}
    if not (layout := _LAYOUTS.get(kind)) and not (layout := _layout(kind)):
        return str(value) if isinstance(value, _TEXTS) else value
    plain = _given(value, layout, omit_none, omit_defaults)
    for name, flat, tagged in layout.parts:
        if (item := plain.get(name)) is None:
            continue
        if flat:
            plain[name] = list(item)
        elif tagged:
            items = _plain(item, omit_none, omit_defaults)
            plain[name] = [{type(of).__name__.lower(): each} for of, each in zip(item, items, strict=True)]
        else:
            plain[name] = _plain(item, omit_none, omit_defaults)
    return plain


def _given(value: Any, layout: _Layout, omit_none: bool, omit_defaults: bool) -> Map:
    """Return the fields that travel, by name, with their values unconverted."""
    items = layout.read(value)
    if not (omit_none or omit_defaults or layout.fields):
        return dict(zip(layout.names, items))  # noqa: B905 - both are of its fields
    if not (omit_none or layout.fields):
        each = zip(layout.names, layout.defaults, items)  # noqa: B905 - all are of its fields
        return {name: item for name, default, item in each if item is not default and item != default}
    plain: Map = dict(zip(layout.names, items))  # noqa: B905 - both are of its fields
    for field in layout.fields or fields_of(value.__class__):
        item = plain[field.name]
        if (item is None and (omit_none or field.absent)) or (omit_defaults and item == field.default):
            del plain[field.name]
    return plain


def from_plain(
    kind: type[T], plain: object, *, where: str, none_omitted: bool = False, unknown_ignored: bool = False
) -> T:
    """Return the `kind` (a dataclass) that `plain` describes; raise Mismatch. `where` names it in messages.

    With `none_omitted` fields that may be None may be missing; with `unknown_ignored` there may be others.
    """
    decode = _decoder(typing.cast(Any, kind), _Rules(none_omitted, unknown_ignored))
    try:
        return typing.cast(T, decode(plain))
    except _Wrong as wrong:
        raise Mismatch(f"{wrong.before}{where}{wrong.path}{wrong.what}") from None


def like(kind: type[T], source: object, /, **more: Any) -> T:
    """Return a `kind` (a dataclass) with the values that `source` has under its fields' names, and `more`."""
    fields = dataclasses.fields(typing.cast(Any, kind))
    shared = {f.name: getattr(source, f.name) for f in fields if hasattr(source, f.name)}
    return kind(**shared | more)


class _Wrong(Exception):
    """What is wrong at a place, whose path is put together on the way out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path, self.before = what, "", ""

    def inside(self, part: str) -> _Wrong:
        """Put `part` in front of the error's path, as seen from one level further out; return the error."""
        self.path = part + self.path
        return self


class _Rules(typing.NamedTuple):
    none_omitted: bool
    unknown_ignored: bool


class _Layout(typing.NamedTuple):
    """What is asked of a class each time that one is sent: what `read` gives is in the order of `names`."""

    fields: tuple[Field, ...]  # all, where one may be left out
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    read: Callable[[Any], Iterable[Any]]
    parts: tuple[tuple[str, bool, bool], ...]  # those that are no scalars


_LAYOUTS: Final[dict[type, _Layout]] = {}  # of classes that were sent


def _layout(kind: type) -> _Layout | None:
    """Return the layout of a dataclass; None for any other class."""
    if not dataclasses.is_dataclass(kind):
        return None
    fields = fields_of(kind)
    names = tuple(field.name for field in fields)
    several = len(names) > 1  # of one, `attrgetter` gives no tuple
    _LAYOUTS[kind] = layout = _Layout(
        fields=fields if any(f.absent for f in fields) else (),
        names=names,
        defaults=tuple(f.default for f in fields),
        read=operator.attrgetter(*names) if several else lambda value: [getattr(value, n) for n in names],
        parts=tuple((f.name, f.flat, f.tagged) for f in fields if not f.scalar),
    )
    return layout


@functools.cache
def _decoder(hint: Any, rules: _Rules) -> _Decoder:
    """Return the function that makes a value of type `hint` from plain data, and raises _Wrong."""
    if hint is Any:
        return lambda plain: plain
    members = members_of(hint)
    if len(members) > 1:
        return _union_decoder(hint, members, rules)
    if dataclasses.is_dataclass(hint):
        return _class_decoder(typing.cast(type, hint), rules)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _literal_decoder(args)
    if origin is tuple:
        return _sequence_decoder(args[0], rules) if args[1:] == (...,) else _tuple_decoder(args, rules)
    if origin is dict:
        return _map_decoder(args[0], args[1], rules)
    return _scalar_decoder(hint)


def _union_decoder(hint: Any, members: tuple[Any, ...], rules: _Rules) -> _Decoder:
    others = [m for m in members if m is not type(None)]
    classes = classes_in(hint)
    if len(others) == 1:
        decode = _decoder(others[0], rules)
    elif classes:
        decode = _tagged_decoder(classes, rules)
    else:
        decode = _exact_decoder(others, rules)
    if len(others) == len(members):
        return decode
    return lambda plain: None if plain is None else decode(plain)


def _tagged_decoder(classes: Mapping[str, type], rules: _Rules) -> _Decoder:
    def decode(plain: Any) -> Any:
        if not isinstance(plain, Mapping) or len(plain) != 1:
            raise _Wrong(f" is {shown(plain)} instead of a map of one of {', '.join(classes)}")
        tag, body = next(iter(plain.items()))
        if tag not in classes:
            raise _Wrong(f" is of kind {shown(tag)} instead of one of {', '.join(classes)}")
        return _decoder(classes[tag], rules)(body)

    return decode


def _exact_decoder(members: list[Any], rules: _Rules) -> _Decoder:
    kinds = {list if typing.get_origin(m) is tuple else m: _decoder(m, rules) for m in members}

    def decode(plain: Any) -> Any:
        chosen = kinds.get(type(plain))
        if chosen is None:
            raise _Wrong(f" is {shown(plain)}, a type that is not allowed there")
        return chosen(plain)

    return decode


class _Decoding(typing.NamedTuple):
    """How the fields of a class are decoded, and which may be missing."""

    fields: dict[str, tuple[frozenset[type], _Decoder]]  # with the types of values that need no decoding
    needed: frozenset[str]


@functools.cache  # asked for late: the types of a class may lead back to it
def _decoding(kind: type, rules: _Rules) -> _Decoding:
    fields = fields_of(kind)
    may_be_missing = {f.name for f in fields if f.optional or (rules.none_omitted and _may_be_none(f))}
    return _Decoding(
        {f.name: (_as_is(f), _decoder(f.hint, rules)) for f in fields},
        frozenset(f.name for f in fields if f.name not in may_be_missing),
    )


def _class_decoder(kind: type, rules: _Rules) -> _Decoder:
    """Return the decoder of a dataclass, which begins with the map as it is: most values need no decoding.

    The cost of a decoding depends on what the map holds.
    """
    names = [field.name for field in fields_of(kind)]
    known = frozenset(names)
    nones = {f.name: None for f in fields_of(kind) if not f.optional and _may_be_none(f)}
    decoding: _Decoding | None = None

    def decode(plain: Any) -> Any:
        nonlocal decoding
        if type(plain) is not dict and not isinstance(plain, Mapping):
            raise _Wrong(f" is {shown(plain)} instead of a map")
        fields, needed = decoding = decoding or _decoding(kind, rules)
        values = dict(plain)
        if not known.issuperset(values):
            if not rules.unknown_ignored:
                raise _Wrong(f" has the unknown key {shown(next(key for key in plain if key not in known))}")
            values = {key: item for key, item in values.items() if key in known}
        if not needed.issubset(values):
            lacks = next(name for name in names if name in needed and name not in values)
            raise _Wrong(f" lacks the key {lacks!r}")
        name = ""
        try:
            for name, item in values.items():
                as_is, decode_item = fields[name]
                if type(item) not in as_is:
                    values[name] = decode_item(item)
        except _Wrong as wrong:
            raise wrong.inside(f".{name}") from None
        return kind(**{**nones, **values} if nones and rules.none_omitted else values)

    return decode


def _may_be_none(field: Field) -> bool:
    return type(None) in members_of(field.hint)


def _as_is(field: Field) -> frozenset[type]:
    """Return the types of values that need no decoding; integers do, as not all can travel."""
    return frozenset(members_of(field.hint)) - {int} if field.scalar else frozenset()


def _literal_decoder(allowed: tuple[Any, ...]) -> _Decoder:
    def decode(plain: Any) -> Any:
        if plain not in allowed or not isinstance(plain, str):
            raise _Wrong(f" is {shown(plain)} instead of one of {', '.join(map(str, allowed))}")
        return plain

    return decode


def _map_decoder(key_hint: Any, item_hint: Any, rules: _Rules) -> _Decoder:
    decode_key, decode_item = _decoder(key_hint, rules), _decoder(item_hint, rules)

    def decode(plain: Any) -> Any:
        if not isinstance(plain, Mapping):
            raise _Wrong(f" is {shown(plain)} instead of a map")
        found = {}
        for key, item in plain.items():
            try:
                known = decode_key(key)
            except _Wrong as wrong:
                wrong.before = "a key of "
                raise
            try:
                found[known] = decode_item(item)
            except _Wrong as wrong:
                raise wrong.inside(f"[{shown(key)}]") from None
        return found

    return decode


def _sequence_decoder(hint: Any, rules: _Rules) -> _Decoder:
    decode_item, kinds = _decoder(hint, rules), frozenset(members_of(hint))
    at_once = kinds in _AT_ONCE

    def decode(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise _Wrong(f" is {shown(plain)} instead of a list")
        if at_once and kinds.issuperset(map(type, plain)) and _in_range(plain):
            return tuple(plain)
        found: list[Any] = []
        try:
            found.extend(map(decode_item, plain))
        except _Wrong as wrong:
            raise wrong.inside(f"[{len(found)}]") from None
        return tuple(found)

    return decode


# Long lists of numbers and data are common, and need no decoding one by one.
_AT_ONCE: frozenset[frozenset[type]] = frozenset(
    {frozenset({int}), frozenset({str}), frozenset({bytes}), frozenset({bytes, memoryview})}
)


def _in_range(items: list[Any]) -> bool:
    return not items or type(items[0]) is not int or (min(items) in INTEGERS and max(items) in INTEGERS)


def _tuple_decoder(hints: tuple[Any, ...], rules: _Rules) -> _Decoder:
    decoders = tuple(_decoder(hint, rules) for hint in hints)

    def decode(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise _Wrong(f" is {shown(plain)} instead of a list")
        if len(plain) != len(decoders):
            raise _Wrong(f" has {len(plain)} items instead of {len(decoders)}")
        found: list[Any] = []
        try:
            for decode_item, item in zip(decoders, plain, strict=True):
                found.append(decode_item(item))
        except _Wrong as wrong:
            raise wrong.inside(f"[{len(found)}]") from None
        return tuple(found)

    return decode


def _scalar_decoder(kind: Any) -> _Decoder:
    if isinstance(kind, type) and issubclass(kind, _TEXTS):
        return _text_decoder(kind)

    def decode(plain: Any) -> Any:
        if type(plain) is not kind:
            if kind is float and type(plain) is int and plain in INTEGERS:
                return float(plain)
            raise _Wrong(f" is {shown(plain)} instead of {_NAMES.get(kind, str(kind))}")
        if kind is int and plain not in INTEGERS:
            raise _Wrong(f" is {shown(plain)}, which is out of range")
        return plain

    return decode


def _text_decoder(kind: type[PurePath | StrEnum]) -> _Decoder:
    def decode(plain: Any) -> Any:
        if type(plain) is not str:
            raise _Wrong(f" is {shown(plain)} instead of a string")
        try:
            return kind(plain)
        except ValueError:
            raise _Wrong(f" is {shown(plain)}, which is no {kind.__name__.lower()}") from None

    return decode


_TEXTS: Final = (PurePath, StrEnum)  # what is text in plain data
_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes, memoryview})


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a dataclass; `default` is MISSING where it has none."""

    name: str
    hint: Any
    default: Any
    optional: bool  # it has a default
    scalar: bool
    flat: bool  # a tuple of scalars
    tagged: bool  # a tuple whose items are of several dataclasses
    absent: bool  # rather than None


@functools.cache
def fields_of(kind: type) -> tuple[Field, ...]:
    """Return the fields of a dataclass, in order."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return tuple(
        Field(
            name=field.name,
            hint=hints[field.name],
            default=field.default,
            optional=field.default is not missing or field.default_factory is not missing,
            scalar=SCALARS.issuperset(members_of(hints[field.name])),
            flat=_flat(hints[field.name]),
            tagged=_tagged(hints[field.name]),
            absent="absent" in field.metadata,
        )
        for field in dataclasses.fields(kind)
    )


def _flat(hint: Any) -> bool:
    items = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return all(item is Ellipsis or SCALARS.issuperset(members_of(item)) for item in items) and bool(items)


def _tagged(hint: Any) -> bool:
    items = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return len(items) == 2 and items[1] is Ellipsis and len(classes_in(items[0])) > 1


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; `hint` alone where it is no union."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def classes_in(hint: Any) -> dict[str, type]:
    """Return the dataclasses among the members of `hint`, by lower-cased name."""
    return {
        m.__name__.lower(): m for m in members_of(hint) if dataclasses.is_dataclass(m) and isinstance(m, type)
    }


class _Short(reprlib.Repr):
    """Looks at the first part of a value only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 2 * _SHOWN, 2 * _SHOWN
        self.maxlist = self.maxtuple = self.maxdict = 20

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Return the text of the first bytes.

        `reprlib` knows bytes only as any other object, whose whole text it makes first.
        """
        return repr(value[: 2 * _SHOWN])

    def repr_dict(self, value: dict[object, object], level: int) -> str:
        """Return the text of the first items, without the sorting of `reprlib`, which looks at every key."""
        first = list(itertools.islice(value.items(), self.maxdict))
        text = ", ".join(
            f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in first
        )
        return f"{{{text}{', ...' if len(value) > len(first) else ''}}}" if level > 0 else "{...}"


_SHOWN = 60  # letters of a value in a message
_short = _Short()


def shown(value: object) -> str:
    """Return `value` for a message: its first letters, found in a time that does not depend on its size."""
    text = _short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
