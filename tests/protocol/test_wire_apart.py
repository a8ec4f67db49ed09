"""Data that is decoded apart from the rest, sent from where it is, and shown without being read whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.protocol import wire
from honed.protocol.decoder import FrameDecoder
from honed.protocol.errors import ResourceExhausted
from honed.protocol.strict import abbreviate

LARGE = 8  # bytes
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PARAMS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)


def plain(value: Any) -> Any:
    """With bytes in the place of memoryviews."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


@given(st.lists(PARAMS, min_size=1, max_size=4), st.lists(st.integers(0, 10_000), max_size=12))
def test_data_apart_makes_the_same_messages_however_they_are_cut(
    sent: list[dict[str, Any]], cuts: list[int]
) -> None:
    requests = [wire.Request(msgid=i, method="m", params=params) for i, params in enumerate(sent)]
    frames = [wire.encode(request) for request in requests]
    decoder, got, sizes, fed = FrameDecoder(large=LARGE), list[Any](), list[int](), 0
    for piece in pieces(b"".join(frames), cuts):
        decoder.feed(piece)
        fed += len(piece)
        while (message := decoder.next_message()) is not None:
            assert isinstance(message, wire.Request)
            got.append(plain(message.params))
            sizes.append(decoder.frame_bytes)
        assert decoder.buffered == fed - sum(sizes)
    assert got == sent
    assert sizes == [len(frame) for frame in frames]


@given(st.binary(max_size=64))
def test_any_bytes_are_a_fault_or_messages_also_apart(data: bytes) -> None:
    def outcome(large: int | None) -> list[Any]:
        decoder, found = FrameDecoder(large=large), list[Any]()
        decoder.feed(data)
        try:
            while (message := decoder.next_message()) is not None:
                found.append(plain(vars_of(message)))
        except wire.ProtocolError as fault:
            found.append((str(fault), fault.msgid))
        return found

    assert outcome(1) == outcome(None)


def vars_of(message: wire.Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__slots__}


@pytest.mark.parametrize("sizes", [[wire.LARGE], [3, wire.LARGE + 1, 5, wire.LARGE], [], [1, 2]])
@pytest.mark.parametrize("answer", [False, True])
def test_parts_are_the_frame(sizes: list[int], answer: bool) -> None:
    data = [memoryview(bytes([i + 1]) * size) for i, size in enumerate(sizes)]
    body = {"a": 1, "raw": data, "b": [b"\xc4\x10" * 9], "c": None}
    message: wire.Message = wire.Request(msgid=7, method="m", params=body)
    if answer:
        message = wire.Response(msgid=7, error=None, result=body)
    parts = wire.encode_parts(message, wire.FrameLimits(max_bytes=1 << 30))
    assert b"".join(parts) == wire.encode(message, wire.FrameLimits(max_bytes=1 << 30))
    for view in data:
        assert any(part is view for part in parts) == (len(view) >= wire.LARGE)


def test_parts_are_bounded_together() -> None:
    message = wire.Request(msgid=1, method="m", params={"raw": [memoryview(bytes(wire.LARGE))] * 3})
    with pytest.raises(ResourceExhausted):
        wire.encode_parts(message, wire.FrameLimits(max_bytes=3 * wire.LARGE))


def test_texts_are_bounded_all_together() -> None:
    limits = wire.FrameLimits(max_text=100)
    for params, fits in (({"a" * 99: 1}, True), ({"a" * 99: "b" * 40}, False), ({"a": "b" * 101}, False)):
        decoder = FrameDecoder(limits)
        decoder.feed(wire.encode(wire.Request(msgid=1, method="m", params=params)))
        if fits:
            assert decoder.next_message() is not None
        else:
            with pytest.raises(wire.ProtocolError, match="text"):
                decoder.next_message()


def test_a_text_is_refused_when_it_is_announced() -> None:
    decoder = FrameDecoder(wire.FrameLimits(max_text=100))
    decoder.feed(b"\x94\x00\x05\xa1m\x91\x81\xa1a\xdb\x00\xff\xff\xff")
    with pytest.raises(wire.ProtocolError, match="text"):
        decoder.next_message()


class Unreadable(str):
    """Shown only in part: making its whole text would be noticed."""

    def __repr__(self) -> str:
        raise AssertionError("the whole of it was shown")

    def __getitem__(self, key: Any) -> str:
        return str.__getitem__(self, key)


@pytest.mark.parametrize(
    "value",
    [
        b"\0" * 50_000_000,
        "a" * 50_000_000,
        {"a" * 1_000_000: "b" * 1_000_000},
        [["a" * 100_000] * 100] * 100,
        {str(i): i for i in range(100_000)},
        Unreadable("a" * 1000),
    ],
)
def test_what_is_shown_of_a_value_is_short(value: Any) -> None:
    assert len(abbreviate(value)) <= 63


@given(VALUES)
def test_small_values_are_shown_as_they_are(value: Any) -> None:
    text = repr(value)
    if len(text) <= 20 and "{" not in text and "[" not in text:
        assert abbreviate(value) == text
