"""Vectors of equal elements are shortened; nothing else is touched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from honed.tuner.lower.broadcasts import shorten_broadcasts

names = st.text("abcxyz_", min_size=1, max_size=6)


@given(names, st.sampled_from([2, 4, 8, 16]))
def test_equal_elements_become_one(name: str, lanes: int) -> None:
    element = f"p[({name} + 3)]"
    source = f"x = ((float{lanes})({', '.join([element] * lanes)})) * y;"
    assert shorten_broadcasts(source) == f"x = ((float{lanes})({element})) * y;"


def test_unequal_elements_stay() -> None:
    source = "((float4)(a, a, a, b))"
    assert shorten_broadcasts(source) == source


def test_a_shorter_list_is_no_vector() -> None:
    source = "((float4)(a, a))"
    assert shorten_broadcasts(source) == source


def test_a_broadcast_within_a_broadcast() -> None:
    inner = "((int2)(i, i)).s0"
    assert shorten_broadcasts(f"((float2)({inner}, {inner}))") == "((float2)(((int2)(i)).s0))"


def test_commas_within_calls_do_not_separate() -> None:
    assert shorten_broadcasts("((half2)(max(a, b), max(a, b)))") == "((half2)(max(a, b)))"


@given(st.text("(float4)uint2a,; ", max_size=80))
def test_no_text_breaks_it(text: str) -> None:
    shorten_broadcasts(text)
