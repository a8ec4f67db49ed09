"""Dataclasses and what they are as they travel: there and back, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.protocol import strict
from honed.protocol.strict import ABSENT, SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """With a tuple of scalars, and one that may be missing."""

    numbers: tuple[int, ...]
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """With whatever a dataclass of the protocol may have."""

    inner: Inner
    several: tuple[Inner, ...]
    by_name: dict[str, tuple[float, ...]]
    pair: tuple[str, int] | None
    late: str | None = field(default=None, metadata=ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """With one field."""

    number: int


INNER = st.builds(
    Inner,
    numbers=st.lists(st.integers(-(2**63), 2**64 - 1)).map(tuple),
    name=st.none() | st.text(),
)
OUTER = st.builds(
    Outer,
    inner=INNER,
    several=st.lists(INNER, max_size=3).map(tuple),
    by_name=st.dictionaries(st.text(), st.lists(st.floats(allow_nan=False)).map(tuple), max_size=3),
    pair=st.none() | st.tuples(st.text(), st.integers(0, 9)),
    late=st.none() | st.text(),
)


@given(OUTER, st.booleans(), st.booleans())
def test_there_and_back(outer: Outer, omit_none: bool, omit_defaults: bool) -> None:
    plain = strict.to_plain(outer, omit_none=omit_none, omit_defaults=omit_defaults)
    assert strict.from_plain(Outer, plain, where="outer", none_omitted=omit_none) == outer
    assert ("late" in plain) == (outer.late is not None)
    assert ("pair" in plain) == (outer.pair is not None or not omit_none)
    name_left_out = outer.inner.name is None and (omit_none or omit_defaults)
    assert ("name" in plain["inner"]) == (not name_left_out)
    assert type(plain["inner"]["numbers"]) is list


@given(st.integers(-(2**70), 2**70))
def test_integers_that_cannot_travel_are_refused(number: int) -> None:
    plain = strict.to_plain(Alone(number=number))
    if number in strict.INTEGERS:
        assert strict.from_plain(Alone, plain, where="a") == Alone(number=number)
    else:
        with pytest.raises(SchemaError, match=r"a\.number is .*out of range"):
            strict.from_plain(Alone, plain, where="a")


@pytest.mark.parametrize("wrong", [1, True, b"x", 1.5, ["x"]])
def test_what_is_no_string_is_refused_where_one_or_none_is_asked_for(wrong: object) -> None:
    with pytest.raises(SchemaError, match=r"i\.name is "):
        strict.from_plain(Inner, {"numbers": [], "name": wrong}, where="i")


def test_a_dataclass_like_another_takes_what_has_the_same_name() -> None:
    outer = Outer(inner=Inner(numbers=(1,)), several=(), by_name={}, pair=None, late="x")
    assert strict.copy_fields(Inner, outer, "name", numbers=(2,)) == Inner(numbers=(2,))
    assert strict.copy_fields(Outer, outer, late=None).late is None
    with pytest.raises(TypeError, match="number"):
        strict.copy_fields(Alone, outer)
    for defaults in ((), ("name", "title")):
        with pytest.raises(TypeError, match=r"name|title"):
            strict.copy_fields(Inner, outer, *defaults, numbers=(2,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """With a field that is called otherwise where it travels, and a list of several classes."""

    count: int = field(default=0, metadata={"wire": "number"})
    items: tuple[Alone | Inner, ...] = field(default=(), metadata={"tags": {"one": Alone, "list": Inner}})


def test_names_that_travel_are_those_that_a_field_says() -> None:
    value = Renamed(count=3, items=(Alone(number=1), Inner(numbers=(2,))))
    plain = strict.to_plain(value)
    assert plain == {"number": 3, "items": [{"one": {"number": 1}}, {"list": {"numbers": [2], "name": None}}]}
    assert strict.from_plain(Renamed, plain, where="r") == value
    assert strict.from_plain(Renamed, {}, where="r") == Renamed()
    for wrong, text in (
        ({"count": 3}, "r has the unknown key 'count'"),
        ({"number": "3"}, "r.number is '3' instead of an integer"),
        ({"items": [{"alone": {}}]}, r"r.items\[0\] is of kind 'alone' instead of one of one, list"),
        ({"items": {}}, "r.items is {} instead of a list"),
    ):
        with pytest.raises(SchemaError, match=text):
            strict.from_plain(Renamed, wrong, where="r")


def test_a_list_of_several_classes_without_tags_is_refused() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Untagged:
        items: tuple[Alone | Inner, ...]

    Untagged.__annotations__["items"] = tuple[Alone | Inner, ...]
    with pytest.raises(TypeError, match="tags"):
        strict.from_plain(Untagged, {"items": []}, where="u")


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """With what is text in plain data."""

    place: Path
    colour: Colour
    others: tuple[Path | None, ...] = ()


def test_paths_and_names_of_an_enumeration_are_text() -> None:
    texts = Texts(place=Path("/there"), colour=Colour.RED, others=(None, Path("here")))
    plain = strict.to_plain(texts)
    assert plain == {"place": "/there", "colour": "red", "others": [None, "here"]}
    assert type(plain["colour"]) is str
    assert strict.from_plain(Texts, plain, where="texts") == texts
    for wrong in ({"colour": "blue"}, {"place": 3}):
        with pytest.raises(SchemaError, match=r"texts\.(colour is 'blue', which is no colour|place is 3)"):
            strict.from_plain(Texts, plain | wrong, where="texts")
