"""The decorator of honed's dataclasses makes what the standard one makes, but for frozen attributes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    note: str = dataclasses.field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Point):
    name: str


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


@dataclass(slots=True)
class Changing:
    items: list[int] = dataclasses.field(default_factory=list)


@dataclass(slots=True, eq=False)
class Itself:
    x: int


@dataclass(frozen=True, slots=True)
class Own:
    x: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "own"


def test_equality_and_hash_are_those_of_the_compared_fields() -> None:
    assert Point(1) == Point(1, 2, note="other") != Point(2)
    assert hash(Point(1)) == hash(Point(1, note="other"))
    assert {Point(1): "a"}[Point(1)] == "a"
    assert Point(1) != (1, 2)
    assert Nothing() == Nothing()
    assert hash(Nothing()) == hash(Nothing())
    assert Nothing() != Point(1)
    assert Named(x=1, name="a") != Named(x=1, name="b")
    assert Named(x=1, name="a") != Point(1)  # the class counts, as in the standard library
    assert Changing([1]) == Changing([1]) != Changing([])
    with pytest.raises(TypeError, match="unhashable"):
        hash(Changing())
    assert Itself(1) != Itself(1)
    assert len({Itself(1), Itself(1)}) == 2


def test_what_a_class_defines_itself_stays() -> None:
    assert (Own(1) == Own(2), hash(Own(1)), repr(Own(1))) == (True, 7, "own")


def test_text_is_that_of_the_standard_library() -> None:
    assert repr(Named(x=1, name="a")) == "Named(x=1, y=2, name='a')"
    assert repr(Nothing()) == "Nothing()"
    assert repr(Changing([1])) == "Changing(items=[1])"


@pytest.mark.parametrize("value", [Point(1, note="n"), Named(x=1, name="a"), Nothing(), Changing([1])])
def test_the_standard_library_s_functions_take_them(value: Any) -> None:
    assert dataclasses.is_dataclass(value)
    assert dataclasses.replace(value) == value
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value
    assert type(value)(**dataclasses.asdict(value)) == value
    assert not hasattr(value, "__dict__")


def test_wrong_arguments_are_refused() -> None:
    make: Any = Named
    with pytest.raises(TypeError, match="name"):
        make(1)
    with pytest.raises(TypeError, match="other"):
        make(x=1, name="a", other=1)
