"""Dataclasses and what they are as they travel: there and back, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.protocol import strict
from honed.protocol.strict import ABSENT, Mismatch


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
        with pytest.raises(Mismatch, match=r"a\.number is .*out of range"):
            strict.from_plain(Alone, plain, where="a")


@pytest.mark.parametrize("wrong", [1, True, b"x", 1.5, ["x"]])
def test_what_is_no_string_is_refused_where_one_or_none_is_asked_for(wrong: object) -> None:
    with pytest.raises(Mismatch, match=r"i\.name is "):
        strict.from_plain(Inner, {"numbers": [], "name": wrong}, where="i")


def test_a_dataclass_like_another_takes_what_has_the_same_name() -> None:
    outer = Outer(inner=Inner(numbers=(1,)), several=(), by_name={}, pair=None, late="x")
    assert strict.like(Inner, outer, numbers=(2,)) == Inner(numbers=(2,))
    assert strict.like(Outer, outer, late=None).late is None
    with pytest.raises(TypeError, match="number"):
        strict.like(Alone, outer)


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
        with pytest.raises(Mismatch, match=r"texts\.(colour is 'blue', which is no colour|place is 3)"):
            strict.from_plain(Texts, plain | wrong, where="texts")
