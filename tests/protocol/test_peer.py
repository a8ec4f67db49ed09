"""One end of a connection: what one says the other hears, however it is cut; and no peer can hurt it."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.protocol.errors import InvalidArgument, NotFound, ResourceExhausted
from honed.protocol.peer import (
    MAX_PENDING_DESCRIPTORS,
    Event,
    NotificationReceived,
    Peer,
    RequestReceived,
    ResponseReceived,
    read_socket,
    write_socket,
)
from honed.protocol.wire import FrameLimits, InvalidMessage, ProtocolError, close_all

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=9)
    | st.binary(max_size=40)
)
PARAMS = st.dictionaries(st.text(max_size=5), PLAIN | st.lists(PLAIN, max_size=4), max_size=4)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)
WORDS = st.text(max_size=8)


def server(receiving: int = 1 << 20, sending: int = 1 << 20) -> Peer:
    limits = FrameLimits(max_bytes=receiving), FrameLimits(max_bytes=sending)
    return Peer(serves=True, receiving=limits[0], sending=limits[1], large=8)


def client() -> Peer:
    return Peer(serves=False, receiving=FrameLimits(), sending=FrameLimits())


def said(peer: Peer, most: int = 1 << 20) -> bytes:
    """What a peer has to send, which then counts as sent, `most` bytes at a time."""
    data = b""
    while (piece := peer.to_send()) is not None:
        part = bytes(piece[0][:most])
        peer.record_sent(len(part))
        data += part
    assert not peer.unsent_bytes
    return data


def heard(peer: Peer, data: bytes, cuts: list[int] | None = None) -> Iterator[Event]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts or [])})
    for start, end in itertools.pairwise(bounds):
        peer.receive(data[start:end], [])
        while (event := peer.next_event()) is not None:
            yield event


def plain(event: Event) -> Any:
    """Comparable, with bytes in the place of memoryviews."""

    def value(item: Any) -> Any:
        match item:
            case memoryview():
                return bytes(item)
            case list():
                return [value(each) for each in item]
            case dict():
                return {key: value(each) for key, each in item.items()}
            case Exception():
                return type(item), str(item)
        return item

    return type(event), *(value(getattr(event, name)) for name in event.__slots__)


@given(calls=st.lists(st.tuples(WORDS, PARAMS), max_size=5), cuts=CUTS, most=st.integers(1, 50))
def test_calls_notifications_and_answers_arrive_however_the_stream_is_cut(
    calls: list[tuple[str, dict[str, Any]]], cuts: list[int], most: int
) -> None:
    here, there = client(), server()
    numbers = [here.call(method, params) for method, params in calls]
    here.notify("news", {"a": 1})
    data = said(here, most)
    asked = list(heard(there, data, cuts))
    assert list(map(plain, asked)) == list(map(plain, heard(server(), data)))
    assert list(map(plain, asked)) == [
        *(plain(RequestReceived(n, *call, [])) for n, call in zip(numbers, calls, strict=True)),
        plain(NotificationReceived("news", {"a": 1})),
    ]
    assert there.unanswered == len(calls)
    for number, (method, params) in reversed(list(zip(numbers, calls, strict=True))):
        if number % 3:
            there.answer(number, params)
        else:
            there.refuse(number, NotFound(method))
    answers = list(heard(here, said(there, most), cuts))
    assert list(map(plain, answers)) == [
        plain(
            ResponseReceived(n, None, params, [])
            if n % 3
            else ResponseReceived(n, NotFound(method), None, [])
        )
        for n, (method, params) in reversed(list(zip(numbers, calls, strict=True)))
    ]
    assert (there.unanswered, there.held, here.held) == (0, 0, 0)


def events_and_fault(peer: Peer, data: bytes, cuts: list[int]) -> tuple[list[Any], ProtocolError | None]:
    found: list[Any] = []
    try:
        for event in heard(peer, data, cuts):
            found.append(plain(event))  # noqa: PERF401 - those before a fault count
    except ProtocolError as fault:
        return found, fault
    return found, None


@given(data=st.binary(max_size=80) | st.builds(msgpack.packb, st.lists(PLAIN, max_size=5)), cuts=CUTS)
def test_hostile_bytes_end_in_one_fault_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    for make in (lambda: server(receiving=60), client):
        peer = make()
        found, fault = events_and_fault(peer, data, cuts)
        whole, same = events_and_fault(make(), data, [])
        assert found == whole
        assert (fault is None) == (same is None)
        if fault is None or same is None:
            continue
        assert (fault.msgid, fault.error.code) == (same.msgid, same.error.code)
        assert ";" in str(fault)  # it says what to do
        peer.last_words(fault.error, fault.msgid)
        message = msgpack.unpackb(said(peer))
        told = message[2][0] if message[0] == 2 else message[2]
        assert message in ([2, "Error", [told]], [1, fault.msgid, told, None])
        assert (told["code"], told["message"]) == (fault.error.code, str(fault))


def test_what_one_end_may_not_say() -> None:
    asking = client()
    asking.call("m", {})
    with pytest.raises(ProtocolError, match="came to a client"):
        list(heard(client(), said(asking)))
    answer = msgpack.packb([1, 7, None, {}])
    for peer in (client(), server()):
        with pytest.raises(ProtocolError, match="answer 7 is to no request"):
            list(heard(peer, answer))
    twice = msgpack.packb([0, 3, "m", [{}]]) * 2
    peer = server()
    with pytest.raises(ProtocolError, match="message number 3 is used") as raised:
        list(heard(peer, twice))
    peer.last_words(raised.value.error, 3)
    assert msgpack.unpackb(said(peer))[:2] == [2, "Error"]  # 3 is the request taken in, which is not at fault


def test_a_call_given_up_is_not_sent_or_cancelled() -> None:
    here, there = client(), server()
    here.cancel(here.call("unsent", {}))
    assert here.to_send() is None
    begun, late = here.call("begun", {"a": b"1234"}), here.call("late", {})
    piece = here.to_send()
    assert piece is not None
    first = bytes(piece[0][:3])
    here.record_sent(3)
    here.cancel(begun)
    here.cancel(late)
    asked, cancelled = heard(there, first + said(here))
    assert isinstance(asked, RequestReceived)
    assert cancelled == NotificationReceived("Cancel", {"msgid": begun})
    there.answer(begun, {"too": "late"})
    assert list(heard(here, said(there))) == []
    here.cancel(begun)
    assert here.to_send() is None


def test_an_answer_that_cannot_be_sent_is_an_error() -> None:
    here, there = client(), server(sending=100)
    numbers = [here.call("m", {}) for _ in range(2)]
    list(heard(there, said(here)))
    there.answer(numbers[0], {"a": b"x" * 200})
    there.answer(numbers[1], {"a": object()})
    first, second = heard(here, said(there))
    assert isinstance(first, ResponseReceived)
    assert isinstance(first.error, ResourceExhausted)
    assert isinstance(second, ResponseReceived)
    assert "cannot be sent" in str(second.error)
    with pytest.raises(InvalidMessage):
        here.call("m", {"a": object()})


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_descriptors_go_with_the_first_byte_and_come_with_their_message(pipe: tuple[int, int]) -> None:
    here, there = client(), server()
    here.call("plain", {})
    before = said(here)
    number = here.call("with", {"a": b"x" * 50}, pipe)
    piece = here.to_send()
    assert piece is not None
    assert piece[1] == pipe
    here.record_sent(1)
    rest = here.to_send()
    assert rest is not None
    assert rest[1] == ()
    assert is_open(pipe[0])  # they are the caller's
    data = bytes(piece[0][:1]) + said(here)
    there.receive(before + data[:4], list(pipe))  # one read gives no byte behind those of the sending
    there.receive(data[4:], [])
    first, second = there.next_event(), there.next_event()
    assert first == RequestReceived(number - 1, "plain", {}, [])
    assert isinstance(second, RequestReceived)
    assert second.descriptors == list(pipe)
    there.answer(number, {}, pipe)
    assert is_open(pipe[0])
    said(there)
    assert not is_open(pipe[0])  # the sender's, and sent


def test_descriptors_that_nobody_takes_are_closed(pipe: tuple[int, int]) -> None:
    there = server()
    there.receive(msgpack.packb([2, "news", [{}]]), [pipe[0]])
    assert there.next_event() == NotificationReceived("news", {})
    assert not is_open(pipe[0])
    there.receive(b"\x94", [pipe[1]])
    there.close()
    assert not is_open(pipe[1])


@pytest.mark.parametrize("truncated", [False, True])
def test_too_many_descriptors_are_the_peers_fault(truncated: bool) -> None:
    peer = server()
    came = [os.open("/dev/null", os.O_RDONLY) for _ in range(1 if truncated else MAX_PENDING_DESCRIPTORS + 1)]
    with pytest.raises(ProtocolError, match="too many descriptors"):
        peer.receive(b"\x94", came, truncated=truncated)
    peer.close()
    assert not any(map(is_open, came))


def test_an_unanswered_request_counts_until_it_is_answered() -> None:
    here, there = client(), server()
    number = here.call("m", {"a": b"x" * 100})
    data = said(here)
    [asked] = heard(there, data)
    assert isinstance(asked, RequestReceived)
    close_all(asked.descriptors)
    assert there.held == len(data)
    there.refuse(number, InvalidArgument("no; do"))
    assert there.held == there.unsent_bytes
    said(there)
    assert there.held == 0


def test_descriptors_that_are_read_are_kept_from_programs_that_are_started() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Peer(serves=False, receiving=FrameLimits(), sending=FrameLimits()), server()
    with ours, theirs, open(os.devnull, "rb") as file:
        sender.call("m", {}, [file.fileno()])
        write_socket(ours, sender)
        assert read_socket(theirs, receiver)
        event = receiver.next_event()
        assert isinstance(event, RequestReceived)
        [descriptor] = event.descriptors
        try:
            assert not os.get_inheritable(descriptor)
        finally:
            os.close(descriptor)
