"""What the fields of dataclasses ask for, found out once for each class."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any, Final

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
    """Those of a dataclass, in order."""
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
    """The members of a union; `hint` alone where it is none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def classes_in(hint: Any) -> dict[str, type]:
    """The dataclasses among the members of `hint`, by lower-cased name."""
    return {
        m.__name__.lower(): m for m in members_of(hint) if dataclasses.is_dataclass(m) and isinstance(m, type)
    }
