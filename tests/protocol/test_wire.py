"""The codec: what is sent is what is received, and no peer can hurt it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.protocol.decoder import FrameDecoder
from honed.protocol.errors import ResourceExhausted
from honed.protocol.wire import (
    FrameLimits,
    InvalidMessage,
    Message,
    Notification,
    ProtocolError,
    Request,
    Response,
    encode,
)

EXAMPLES: list[tuple[Message, bytes]] = [
    (Request(msgid=1, method="ServerLive", params={}), b"\x94\x00\x01\xaaServerLive\x91\x80"),
    (Request(msgid=300, method="m", params={"a": 1}), b"\x94\x00\xcd\x01\x2c\xa1m\x91\x81\xa1a\x01"),
    (Response(msgid=1, error=None, result={"live": True}), b"\x94\x01\x01\xc0\x81\xa4live\xc3"),
    (Response(msgid=2, error={"code": "X"}, result=None), b"\x94\x01\x02\x81\xa4code\xa1X\xc0"),
    (Notification(method="Cancel", params={"msgid": 7}), b"\x93\x02\xa6Cancel\x91\x81\xa5msgid\x07"),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v, max_size=20) | st.dictionaries(st.text(max_size=5), v, max_size=20),
    max_leaves=40,
)
PARAMS = st.dictionaries(st.text(max_size=10), VALUES, max_size=6)
MSGIDS = st.integers(0, 2**32 - 1)
MESSAGES = (
    st.builds(Request, msgid=MSGIDS, method=st.text(max_size=20), params=PARAMS)
    | st.builds(Response, msgid=MSGIDS, error=st.none(), result=VALUES)
    | st.builds(Response, msgid=MSGIDS, error=PARAMS, result=st.none())
    | st.builds(Notification, method=st.text(max_size=20), params=PARAMS)
)


def decode(data: bytes, limits: FrameLimits | None = None) -> list[Message]:
    decoder = FrameDecoder(limits)
    decoder.feed(data)
    messages = []
    while (message := decoder.next_message()) is not None:
        messages.append(message)
    return messages


def fault(data: bytes, limits: FrameLimits | None = None) -> ProtocolError:
    with pytest.raises(ProtocolError) as raised:
        decode(data, limits)
    return raised.value


@pytest.mark.parametrize(("message", "data"), EXAMPLES)
def test_examples_both_ways(message: Message, data: bytes) -> None:
    assert encode(message) == data
    assert decode(data) == [message]


@given(messages=st.lists(MESSAGES, max_size=4), pieces=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_any_messages_in_any_pieces(messages: list[Message], pieces: list[int]) -> None:
    data = b"".join(map(encode, messages))
    decoder, received, at, turn = FrameDecoder(), [], 0, 0
    while at < len(data):
        step = pieces[turn % len(pieces)]
        decoder.feed(data[at : at + step])
        at, turn = at + step, turn + 1
        while (message := decoder.next_message()) is not None:
            received.append(message)
    assert received == messages
    assert decoder.buffered == 0


@given(value=VALUES)
def test_finds_the_end_that_msgpack_finds(value: Any) -> None:
    data = msgpack.packb([1, 0, None, value])
    decoder = FrameDecoder()
    for i in range(len(data)):
        assert decoder.next_message() is None
        decoder.feed(data[i : i + 1])
    assert decoder.next_message() == Response(msgid=0, error=None, result=value)


TIMES = st.builds(msgpack.Timestamp, st.integers(0, 2**40), st.integers(0, 999_999_999))  # an extension
ANYTHING = st.recursive(
    SCALARS | TIMES | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9)),
    lambda v: (
        st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2) | st.integers(0, 9), v, max_size=3)
    ),
    max_leaves=8,
)


def outcome(pieces: Iterable[bytes]) -> tuple[Message | None, int, str]:
    decoder, message = FrameDecoder(FrameLimits(max_depth=6)), None
    try:
        for piece in pieces:
            decoder.feed(piece)
            message = decoder.next_message() or message
    except ProtocolError as fault:
        return None, 0, f"{fault.msgid} {fault}"
    return message, decoder.frame_bytes, ""


@given(value=ANYTHING, wrapped=st.integers(0, 5))
def test_a_message_that_comes_at_once_is_what_it_is_in_pieces(value: Any, wrapped: int) -> None:
    for _ in range(wrapped):
        value = [value]
    data = msgpack.packb([1, 7, None, value])
    assert outcome([data]) == outcome(bytes([byte]) for byte in data)


@given(data=st.binary(max_size=200))
def test_random_bytes_are_the_peers_fault_or_nothing(data: bytes) -> None:
    for prefix in (b"", b"\x94\x00\x01\xa1m", b"\x94\x00", b"\x93\x02\xa1m\x91"):
        with suppress(ProtocolError):
            decode(prefix + data)


@given(message=MESSAGES, at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_is_the_peers_fault_or_another_message(message: Message, at: int, byte: int) -> None:
    data = bytearray(encode(message))
    data[at % len(data)] = byte
    with suppress(ProtocolError):
        decode(bytes(data))


HEAD = b"\x94\x00\x07\xa1m"  # [0, 7, "m", ...


@pytest.mark.parametrize(
    ("announced", "what"),
    [
        (b"\x91\x81\xa1a\xc6\x10\x00\x00\x00", "bytes"),  # bin of 256 MiB
        (b"\x91\x81\xa1a\xdb\xff\xff\xff\xff", "bytes"),  # str of 4 GiB
        (b"\x91\x81\xa1a\xdd\x00\x10\x00\x00", "values"),  # array of a million
        (b"\x91\x81\xa1a\xdf\x00\x01\x00\x00", "values"),  # map of 65,536
        (b"\xdd\xff\xff\xff\xff", "bytes"),
        (b"\xdf\xff\xff\xff\xff", "bytes"),
    ],
)
@pytest.mark.child  # in which no thread of another test allocates
def test_refuses_what_is_announced_too_large_at_once(announced: bytes, what: str) -> None:
    tracemalloc.start()
    try:
        error = fault(HEAD + announced)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert error.msgid == 7
    assert isinstance(error.error, ResourceExhausted)
    assert what in str(error)


def test_many_small_containers_are_refused_before_they_are_built() -> None:
    nested = b"\x91\x81\xa1a" + b"\xdc\xff\x00" + b"\xdc\xff\x00"
    assert isinstance(fault(HEAD + nested).error, ResourceExhausted)


def test_nesting_is_bounded() -> None:
    def deep(depth: int) -> bytes:
        return HEAD + b"\x91\x81\xa1a" + b"\x91" * (depth - 3) + b"\xc0"

    assert len(decode(deep(16))) == 1
    assert "nested" in str(fault(deep(17)))
    assert "nested" in str(fault(HEAD + b"\x91" * 100_000))


def test_size_is_bounded_to_the_byte() -> None:
    message = Request(msgid=1, method="m", params={"a": b"x" * 1000})
    size = len(encode(message))
    assert decode(encode(message), FrameLimits(max_bytes=size)) == [message]
    assert "bytes" in str(fault(encode(message), FrameLimits(max_bytes=size - 1)))
    with pytest.raises(ResourceExhausted):
        encode(message, FrameLimits(max_bytes=size - 1))
    many = Request(msgid=1, method="m", params={"a": [1.5] * 100})
    assert "bytes" in str(fault(encode(many), FrameLimits(max_bytes=len(encode(many)) - 1)))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xc1",
        b"\x00",
        HEAD + b"\x91\xc1",
        HEAD + b"\x91\xd4\x00\x00",  # an extension type
        HEAD + b"\x91\xc7\x01\x00\x00",
        HEAD + b"\x91\x81\xa1\xff\x00",  # not UTF-8
        HEAD + b"\x91\x81\x01\x00",  # a key that is no string
        HEAD + b"\x91\x81\xc4\x01a\x00",  # a key that is bin
        HEAD + b"\x90",
        HEAD + b"\x92\x80\x80",
        HEAD + b"\x91\xc0",
        HEAD + b"\x80",
        b"\x94\x00\xff\xa1m\x91\x80",  # a negative msgid
        b"\x94\x00\xcf\x00\x00\x00\x01\x00\x00\x00\x00\xa1m\x91\x80",  # one of 33 bits
        b"\x94\xc2\x01\xa1m\x91\x80",  # false is not 0
        b"\x94\x00\xc2\xa1m\x91\x80",
        b"\x94\x00\x01\xc4\x01m\x91\x80",  # the method as bin
        b"\x94\x01\x01\x80\x80",  # both an error and a result
        b"\x94\x03\x01\xa1m\x91\x80",
        b"\x93\x00\x01\xa1m",
        b"\x94\x02\xa1m\x91\x80\xc0",
    ],
)
def test_refuses_what_is_no_message(data: bytes) -> None:
    assert str(fault(data)).count(";") >= 1  # says what to do


def test_knows_which_request_was_at_fault() -> None:
    assert fault(HEAD + b"\x91\xc1").msgid == 7
    assert fault(b"\x94\x00\xce\xff\xff\xff\xff\xa1m\x91\xc1").msgid == 2**32 - 1
    assert fault(b"\x94\x01\x07\xc0\xc1").msgid is None
    assert fault(b"\x93\x02\xa1m\xc1").msgid is None
    assert fault(b"nonsense").msgid is None


@pytest.mark.parametrize(
    "message",
    [
        Request(msgid=-1, method="m", params={}),
        Request(msgid=2**32, method="m", params={}),
        Request(msgid=1, method="m", params={"a": object()}),
        Request(msgid=1, method="m", params={"a": 2**64}),
        Request(msgid=1, method="m", params={"a": "\ud800"}),
    ],
)
def test_what_cannot_be_sent_is_our_own_fault(message: Message) -> None:
    with pytest.raises(InvalidMessage):
        encode(message)


@pytest.mark.child
def test_buffers_no_more_than_was_sent() -> None:
    decoder = FrameDecoder()
    decoder.feed(HEAD + b"\x91\x81\xa1a\xc6\x02\x00\x00\x00")  # announces 32 MiB
    tracemalloc.start()
    try:
        for _ in range(100):
            decoder.feed(b"x")
            assert decoder.next_message() is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert decoder.buffered == len(HEAD) + 9 + 100
