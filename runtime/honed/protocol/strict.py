"""Converts dataclasses to plain maps and lists and back, and rejects whatever the types do not allow.

Maps have exactly the fields of their dataclass, each under its `wire` metadata or else its name. A field that
has a default may be missing, as in data older than the field. An item of a list of several dataclasses is a
map of one key, its class's tag in the field's `tags` metadata. Paths and members of a StrEnum are text.
Nothing is coerced, except an integer where a float is expected.

Encoders and decoders are generated once for each type, as source code of a function.
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
INTEGERS = range(-(2**63), 2**64)  # Range of msgpack's integers
Map = dict[str, Any]  # A dataclass in plain form
ABSENT: Final = {"absent": True}  # Metadata of a field that is left out of the map if it is None
_Decoder = Callable[[Any], Any]


class SchemaError(ValueError):
    """Raised when data does not have the shape of its type; the message names the place."""


def to_plain(value: Any, *, omit_none: bool = False, omit_defaults: bool = False) -> Any:
    """Return maps, lists, strings, numbers, booleans and None for `value`, a dataclass or a part of one.

    With `omit_none`, fields that are None are left out, for formats without such a value (TOML). With
    `omit_defaults`, fields that equal their defaults are left out, for readers older than the field.
    """
    return _encoders(omit_none, omit_defaults).plain(value)


class _Encoders:
    """The encoders of values, by class, generated on demand."""

    def __init__(self, omit_none: bool, omit_defaults: bool) -> None:
        self._omit_none = omit_none
        self._omit_defaults = omit_defaults
        plain = self.plain
        self._known: dict[type, Callable[[Any], Any]] = dict.fromkeys(SCALARS, lambda value: value)
        self._known[tuple] = lambda value: [plain(item) for item in value]

    def plain(self, value: Any) -> Any:
        """Return a value in plain form."""
        encode = self._known.get(type(value)) or self._encoder(type(value))
        return encode(value)

    def _encoder(self, kind: type) -> Callable[[Any], Any]:
        if dataclasses.is_dataclass(kind):
            encode = self._class_encoder(kind)
        elif issubclass(kind, dict):
            encode = lambda value: {key: self.plain(item) for key, item in value.items()}  # noqa: E731
        else:
            encode = str if issubclass(kind, _TEXTS) else self._known[str]
        self._known[kind] = encode
        return encode

    def _class_encoder(self, kind: type) -> Callable[[Any], Any]:
        names: dict[str, Any] = {"plain": self.plain}
        lines = ["made = {}"]
        for field in fields_of(kind):
            lines.append(f"item = value.{field.name}")
            names[f"tags_{field.name}"] = {kind: tag for tag, kind in field.tags.items()}
            conditions = ["item is not None"] if self._omit_none or field.absent else []
            if self._omit_defaults and field.default is not dataclasses.MISSING:
                names[f"default_{field.name}"] = field.default
                conditions.append(f"item is not default_{field.name}")
                if field.default is not None:
                    conditions.append(f"item != default_{field.name}")
            made = "item"
            if not field.scalar:
                tagged = f"[{{tags_{field.name}[type(each)]: plain(each)}} for each in item]"
                made = "list(item)" if field.flat else tagged if field.tags else "plain(item)"
                made = f"None if item is None else {made}"
            condition = f"if {' and '.join(conditions)}: " if conditions else ""
            lines.append(f"{condition}made[{field.wire!r}] = {made}")
        return _compile_function("value", [*lines, "return made"], names)


_encoders = functools.cache(_Encoders)


def _compile_function(parameter: str, lines: Iterable[str], names: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function of one parameter with these statements, which may use `names`.

    Written out for the fields of a class, it takes a fifth of the time of a loop over them.
    """
    exec("\n    ".join([f"def written({parameter}):", *lines]), names)
    written: Callable[[Any], Any] = names["written"]
    return written


def from_plain(
    kind: type[T], plain: object, *, where: str, none_omitted: bool = False, unknown_ignored: bool = False
) -> T:
    """Return the `kind` (a dataclass) that `plain` describes; raise SchemaError, which calls it `where`.

    With `none_omitted`, fields that may be None may be missing; with `unknown_ignored`, unknown keys are
    ignored.
    """
    decode = _DECODERS.get((kind, none_omitted, unknown_ignored))
    if decode is None:
        decode = _decoder(typing.cast(Any, kind), _Rules(none_omitted, unknown_ignored))
    try:
        made: T = decode(plain)
    except _Wrong as wrong:
        raise SchemaError(f"{wrong.before}{where}{wrong.path}{wrong.what}") from None
    return made


def copy_fields(kind: type[T], source: object, /, *defaults: str, **more: Any) -> T:
    """Return a `kind` (a dataclass) with the values of `source` for fields of equal names, and `more`.

    Raises TypeError for a field without a value, even if it has a default: renaming one side cannot lose a
    field. `defaults` names the fields that use their defaults if they have no value.
    """
    names = {field.name for field in dataclasses.fields(typing.cast(Any, kind))}
    shared = {name: getattr(source, name) for name in names if hasattr(source, name)}
    if wrong := names - shared.keys() - more.keys() ^ set(defaults) - shared.keys() - more.keys():
        raise TypeError(f"{', '.join(sorted(wrong))}: neither of {type(source).__name__} nor given")
    return kind(**shared | more)


class _Wrong(Exception):
    """Raised when a value is wrong; its path is extended on the way out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path, self.before = what, "", ""

    def inside(self, part: str) -> _Wrong:
        """Prepend `part` to the error's path, at the next outer level; return the error."""
        self.path = part + self.path
        return self


class _Rules(typing.NamedTuple):
    none_omitted: bool
    unknown_ignored: bool


@functools.cache
def _decoder(hint: Any, rules: _Rules) -> _Decoder:
    """Return the function that converts plain data to a value of type `hint`, and raises _Wrong."""
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
    decode = _decoder(others[0], rules) if len(others) == 1 else _exact_decoder(others, rules)
    if len(others) == len(members):
        return decode
    return lambda plain: None if plain is None else decode(plain)


def _tagged_decoder(classes: Mapping[str, type], rules: _Rules) -> _Decoder:
    """Return the decoder of a list whose items name their class by a tag."""

    def item(plain: Any) -> Any:
        if not isinstance(plain, Mapping) or len(plain) != 1:
            raise _Wrong(f" is {abbreviate(plain)} instead of a map of one of {', '.join(classes)}")
        tag, body = next(iter(plain.items()))
        if tag not in classes:
            raise _Wrong(f" is of kind {abbreviate(tag)} instead of one of {', '.join(classes)}")
        return _decoder(classes[tag], rules)(body)

    return _items_decoder(functools.partial(map, item))


def _exact_decoder(members: list[Any], rules: _Rules) -> _Decoder:
    if any(map(dataclasses.is_dataclass, members)):
        raise TypeError(f"nothing tells the classes {members} apart; give their field tags")
    kinds = {list if typing.get_origin(m) is tuple else m: _decoder(m, rules) for m in members}

    def decode(plain: Any) -> Any:
        chosen = kinds.get(type(plain))
        if chosen is None:
            raise _Wrong(f" is {abbreviate(plain)}, a type that is not allowed there")
        return chosen(plain)

    return decode


_DECODERS: Final[dict[tuple[type, bool, bool], _Decoder]] = {}  # Decoders by dataclass and rules


def _class_decoder(kind: type, rules: _Rules) -> _Decoder:
    """Return the decoder of a dataclass, generated from the types of its fields."""
    if (kind, *rules) in _DECODERS:
        return _DECODERS[kind, *rules]
    fields = fields_of(kind)
    known = frozenset(f.wire for f in fields)
    needed = [f.wire for f in fields if not f.optional and not (rules.none_omitted and f.may_be_none)]

    def check_keys(plain: Any) -> Mapping[Any, Any]:
        """Return the map without unknown keys; raise _Wrong for unknown or missing keys, and for no map."""
        if not isinstance(plain, Mapping):
            raise _Wrong(f" is {abbreviate(plain)} instead of a map")
        if not rules.unknown_ignored and not known.issuperset(plain):
            raise _Wrong(f" has the unknown key {abbreviate(next(key for key in plain if key not in known))}")
        for name in needed:
            if name not in plain:
                raise _Wrong(f" lacks the key {name!r}")
        return {key: item for key, item in plain.items() if key in known}

    names = {
        "known": known,
        "needed": frozenset(needed),
        "checked": check_keys,
        "kind": kind,
        "Wrong": _Wrong,
    }
    usual = "type(plain) is dict and known.issuperset(plain) and needed.issubset(plain)"
    lines = [f"if not ({usual}): plain = checked(plain)", "try:", "    at, get = '', plain.get"]
    for number, field in enumerate(fields):
        of_one = _field_decoder(f"v{number}", field, field.wire in needed, names)
        lines += [f"    {line}" for line in of_one]
    lines += ["except Wrong as wrong:", "    raise wrong.inside('.' + at) from None"]
    given = (f"{field.name}=v{number}" for number, field in enumerate(fields))
    decode = _compile_function("plain", [*lines, f"return kind({', '.join(given)})"], names)
    _DECODERS[kind, *rules] = decode  # Stored first, as the types of its fields may refer to it
    for number, field in enumerate(fields):
        some = tuple(member for member in members_of(field.hint) if member is not type(None))
        tagged = _tagged_decoder(field.tags, rules) if field.tags else None
        names[f"decode_v{number}"] = tagged or _decoder(typing.Union[some], rules)  # noqa: UP007 - a tuple
    return decode


def _field_decoder(value: str, field: Field, needed: bool, names: dict[str, Any]) -> list[str]:
    """Return the statements that decode a field to the variable `value`; add the names that they use."""
    decode = f"at = {field.wire!r}; {value} = decode_{value}({value})"
    if field.factory is not None:
        names[f"make_{value}"] = field.factory
        found = f"{value} = get({field.wire!r}, known)"
        return [found, f"if {value} is known: {value} = make_{value}()", f"else: {decode}"]
    names[f"default_{value}"] = None if field.default is dataclasses.MISSING else field.default
    found = f"plain[{field.wire!r}]" if needed else f"get({field.wire!r}, default_{value})"
    unlike = "" if needed else f"{value} is not default_{value}"
    if field.may_be_none:
        unlike = f"{value} is not None"
    if field.scalar:
        names[f"as_is_{value}"] = frozenset(members_of(field.hint)) - {int}
        unlike = f"type({value}) not in as_is_{value}"
        if int in members_of(field.hint):
            unlike += f" and not (type({value}) is int and {INTEGERS[0]} <= {value} <= {INTEGERS[-1]})"
    return [f"{value} = {found}", f"if {unlike}: {decode}" if unlike else decode]


def _literal_decoder(allowed: tuple[Any, ...]) -> _Decoder:
    def decode(plain: Any) -> Any:
        if plain not in allowed or not isinstance(plain, str):
            raise _Wrong(f" is {abbreviate(plain)} instead of one of {', '.join(map(str, allowed))}")
        return plain

    return decode


def _map_decoder(key_hint: Any, item_hint: Any, rules: _Rules) -> _Decoder:
    decode_key, decode_item = _decoder(key_hint, rules), _decoder(item_hint, rules)

    def decode(plain: Any) -> Any:
        if not isinstance(plain, Mapping):
            raise _Wrong(f" is {abbreviate(plain)} instead of a map")
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
                raise wrong.inside(f"[{abbreviate(key)}]") from None
        return found

    return decode


def _sequence_decoder(hint: Any, rules: _Rules) -> _Decoder:
    decode_items = _items_decoder(functools.partial(map, _decoder(hint, rules)))
    kinds = frozenset(members_of(hint))
    at_once, integers = kinds in _AT_ONCE, int in kinds

    def decode(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise _Wrong(f" is {abbreviate(plain)} instead of a list")
        if not plain:
            return ()
        known = at_once and kinds.issuperset(map(type, plain))
        if known and (not integers or (min(plain) in INTEGERS and max(plain) in INTEGERS)):
            return tuple(plain)
        return decode_items(plain)

    return decode


def _items_decoder(decode_items: Callable[[list[Any]], Iterable[Any]]) -> _Decoder:
    def decode(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise _Wrong(f" is {abbreviate(plain)} instead of a list")
        found, items = list[Any](), decode_items(plain)
        try:
            found.extend(items)
        except _Wrong as wrong:
            raise wrong.inside(f"[{len(found)}]") from None
        return tuple(found)

    return decode


# Long lists of numbers and data are common, and their items need no decoding.
_AT_ONCE: frozenset[frozenset[type]] = frozenset(
    {frozenset({int}), frozenset({str}), frozenset({bytes}), frozenset({bytes, memoryview})}
)


def _tuple_decoder(hints: tuple[Any, ...], rules: _Rules) -> _Decoder:
    decoders = tuple(_decoder(hint, rules) for hint in hints)

    def decode_items(plain: list[Any]) -> Iterable[Any]:
        if len(plain) != len(decoders):
            raise _Wrong(f" has {len(plain)} items instead of {len(decoders)}")
        return map(operator.call, decoders, plain)

    return _items_decoder(decode_items)


def _scalar_decoder(kind: Any) -> _Decoder:
    if isinstance(kind, type) and issubclass(kind, _TEXTS):
        return _text_decoder(kind)

    def decode(plain: Any) -> Any:
        if type(plain) is not kind:
            if kind is float and type(plain) is int and plain in INTEGERS:
                return float(plain)
            raise _Wrong(f" is {abbreviate(plain)} instead of {_NAMES.get(kind, str(kind))}")
        if kind is int and plain not in INTEGERS:
            raise _Wrong(f" is {abbreviate(plain)}, which is out of range")
        return plain

    return decode


def _text_decoder(kind: type[PurePath | StrEnum]) -> _Decoder:
    def decode(plain: Any) -> Any:
        if type(plain) is not str:
            raise _Wrong(f" is {abbreviate(plain)} instead of a string")
        try:
            return kind(plain)
        except ValueError:
            raise _Wrong(f" is {abbreviate(plain)}, which is no {kind.__name__.lower()}") from None

    return decode


_TEXTS: Final = (PurePath, StrEnum)  # Types that are text in plain form
_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes, memoryview})


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a dataclass; `default` is MISSING if it has none."""

    name: str
    wire: str  # Key in maps
    hint: Any
    default: Any
    factory: Callable[[], Any] | None  # Makes the default, if any
    optional: bool  # Has a default
    may_be_none: bool
    scalar: bool
    flat: bool  # A tuple of scalars
    tags: Mapping[str, type]  # Classes of a tuple's items by tag, if there are several, else empty
    absent: bool  # Left out of maps if None


@functools.cache
def fields_of(kind: type) -> tuple[Field, ...]:
    """Return the fields of a dataclass, in order."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return tuple(
        Field(
            name=field.name,
            wire=field.metadata.get("wire", field.name),
            hint=hints[field.name],
            default=field.default,
            factory=field.default_factory if field.default_factory is not missing else None,
            optional=field.default is not missing or field.default_factory is not missing,
            may_be_none=type(None) in members_of(hints[field.name]),
            scalar=SCALARS.issuperset(members_of(hints[field.name])),
            flat=_flat(hints[field.name]),
            tags=field.metadata.get("tags", {}),
            absent="absent" in field.metadata,
        )
        for field in dataclasses.fields(kind)
    )


def _flat(hint: Any) -> bool:
    items = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return all(item is Ellipsis or SCALARS.issuperset(members_of(item)) for item in items) and bool(items)


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or `hint` alone if it is none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


class _Short(reprlib.Repr):
    """A repr that reads only the beginning of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 2 * _SHOWN, 2 * _SHOWN
        self.maxlist = self.maxtuple = self.maxdict = 20

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Return the text of the first bytes; `reprlib` would first make the text of all."""
        return repr(value[: 2 * _SHOWN])

    def repr_dict(self, value: dict[object, object], level: int) -> str:
        """Return the text of the first items, without sorting, for which `reprlib` reads every key."""
        first = list(itertools.islice(value.items(), self.maxdict))
        text = ", ".join(
            f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in first
        )
        return f"{{{text}{', ...' if len(value) > len(first) else ''}}}" if level > 0 else "{...}"


_SHOWN = 60  # Characters of a value in a message
_short = _Short()


def abbreviate(value: object) -> str:
    """Return the first characters of `value` for a message, in time independent of its size."""
    text = _short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
