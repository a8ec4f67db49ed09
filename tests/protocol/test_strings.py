"""Tensors of strings as they travel."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.protocol.errors import InvalidArgument
from honed.runtime.dtypes import decode_text, encode_text

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(TEXT, max_size=8))
def test_text_comes_back(texts: list[str]) -> None:
    array = np.array(texts, object).reshape(1, -1)
    data = encode_text(array)
    found = decode_text(data, array.shape)
    assert found.tolist() == array.tolist()
    # NumPy's own text arrays end elements at the last character that is no zero.
    if texts and all(text == text.rstrip("\0") for text in texts):
        assert decode_text(encode_text(np.array(texts)), (len(texts),)).tolist() == texts


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_bytes_that_are_no_text_come_back(elements: list[bytes]) -> None:
    data = encode_text(np.array([*elements, "end"], object))
    assert encode_text(decode_text(data, (len(elements) + 1,))) == data


@given(st.binary(max_size=40), st.integers(0, 4))
def test_any_bytes_are_read_or_refused(data: bytes, count: int) -> None:
    with contextlib.suppress(InvalidArgument):
        assert encode_text(decode_text(data, (count,))) == data


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (b"\1\0\0\0a", 2, "end within element 1"),
        (b"\2\0\0\0a", 1, "end within element 0"),
        (b"\1\0\0\0ab", 1, "go on"),
        (b"\0\0", 1, "end within"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, count: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode_text(data, (count,))
    with pytest.raises(InvalidArgument, match="float"):
        encode_text(np.array([1.5], object))
