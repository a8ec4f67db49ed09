"""The tuner's side where messages cross: a service that says exactly what a real one may say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack

from honed.runtime.calling.leaseclient import LeaseHolder
from tests.daemon.running import DEADLINE

Script = Callable[[socket.socket, Callable[[], list[Any]]], None]


@contextmanager
def saying(folder: Path, script: Script) -> Iterator[LeaseHolder]:
    """A client of a service that follows a script."""
    path = folder / "s"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(1)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            with listening, listening.accept()[0] as connected:
                unpacker = msgpack.Unpacker(raw=False)

                def request() -> list[Any]:
                    while True:
                        for message in unpacker:
                            return list(message)
                        data = connected.recv(4096)
                        assert data, "the client ended the connection too early"
                        unpacker.feed(data)

                script(connected, request)
                while connected.recv(4096):
                    pass  # until the client ends the connection
        except BaseException as error:  # noqa: BLE001 - shown by the test that waits for this thread
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with LeaseHolder(1.0, socket=path, timeout=DEADLINE) as holder:
            yield holder
    finally:
        thread.join(DEADLINE)
        assert not failures, failures


def packed(*messages: list[Any]) -> bytes:
    return b"".join(msgpack.packb(message) for message in messages)


def test_a_revocation_that_overtakes_the_answer_counts(tmp_path: Path) -> None:
    def script(connected: socket.socket, request: Callable[[], list[Any]]) -> None:
        asked = request()
        assert asked[2:] == ["LeaseAsk", [{"candidate_seconds": 1.0}]]
        granted = [1, asked[1], None, {"granted": True, "lease": 5, "why": ""}]
        connected.sendall(packed([2, "LeaseRevoked", [{"lease": 5, "why": "a request"}]], granted))
        released = request()
        assert released[2:] == ["LeaseRelease", [{"lease": 5}]]
        connected.sendall(packed([1, released[1], None, {}]))
        again = request()
        assert again[2] == "LeaseAsk"
        granted = [1, again[1], None, {"granted": True, "lease": 6, "why": ""}]
        connected.sendall(packed(granted))

    with saying(tmp_path, script) as holder:
        assert holder.wait_until_granted(DEADLINE)
        assert holder.may_run()


def test_a_grant_that_crosses_giving_up_is_given_back(tmp_path: Path) -> None:
    def script(connected: socket.socket, request: Callable[[], list[Any]]) -> None:
        asked = request()
        connected.sendall(packed([1, asked[1], None, {"granted": False, "lease": 0, "why": "hot"}]))
        given_up = request()
        assert given_up[3] == [{"lease": None}]
        answer = [1, given_up[1], None, {}]
        connected.sendall(packed([2, "LeaseGranted", [{"lease": 3}]], answer))
        released = request()
        assert released[2:] == ["LeaseRelease", [{"lease": 3}]]
        connected.sendall(packed([1, released[1], None, {}]))

    with saying(tmp_path, script) as holder:
        assert not holder.wait_until_granted(0.0)
        assert holder.why == "hot"
        holder.release()
        assert not holder.may_run()


def test_nonsense_and_other_news(tmp_path: Path) -> None:
    def script(connected: socket.socket, request: Callable[[], list[Any]]) -> None:
        asked = request()
        other = [2, "Progress", [{"msgid": 1}]]
        connected.sendall(packed(other, [1, asked[1], None, {"granted": True, "lease": 1, "why": ""}]))
        request()
        connected.sendall(packed([2, "LeaseRevoked", [{"number": 1}]]))

    with saying(tmp_path, script) as holder:
        assert holder.wait_until_granted(DEADLINE)
        holder.release()
        assert not holder.may_run()
        assert "makes no sense" in holder.why or "closed" in holder.why
