"""Web servers that mean harm: what they can do is to keep things back, for a while, which is told."""

from __future__ import annotations

import http.server
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from email.message import Message
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.hub import layout, remote, web
from honed.protocol.errors import HonedError, InvalidArgument, NotFound, Unavailable

from .hubserver import Handler, but, counting, dripping, serving, unending
from .test_hub_pull import ATTIC, OWNER, Machine, of

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def refused(url: str, most: int = 1000) -> HonedError:
    with pytest.raises(HonedError) as caught:
        web.get(f"{url}/x", most)
    return caught.value


@pytest.fixture
def stopped() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"", b"H"),
        (OK, b"X"),
        (OK, b"X: y\r\n "),
        (OK + b"\r\n", b"x"),
        (CHUNKED, b"0"),
        (CHUNKED, b"1\r\nx\r\n"),
        (CHUNKED + b"0\r\n", b"X: y\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_what_drips_is_left_when_its_time_is_up(
    start: bytes, more: bytes, stopped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "WHOLE_SECONDS", 0.2)
    with serving(dripping(start, more, stopped)) as url:
        error = refused(url, 1 << 30)
    assert isinstance(error, Unavailable)
    assert "took more than" in str(error)


@pytest.mark.parametrize(
    ("start", "more"),
    [(CHUNKED + b"0\r\n", b"X: y\r\n" * 999), (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 999)],
)
def test_what_floods_without_an_end_is_left_when_its_time_is_up(
    start: bytes, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "WHOLE_SECONDS", 0.2)
    with serving(unending(start, more)) as url:
        assert "took more than" in str(refused(url))


@pytest.mark.parametrize(
    ("start", "more", "why"),
    [
        (OK, b"X: y\r\n", "more than 100 headers"),
        (OK, b"x" * 999, "header line"),
        (b"", b"x" * 999, "status line"),
        (b"", b"\0\r\n", r"cannot be read"),
        (CHUNKED, b"9" * 999, "chunk size|cannot be read"),
        (CHUNKED, b"no number\r\n", "cannot be read"),
        (OK + b"Content-Length: 99999999999999999999\r\n\r\n", b"x" * 999, "larger than 1000"),
        (OK + b"Content-Length: -1\r\n\r\n", b"x" * 999, "larger than 1000"),
        (CHUNKED, b"3e7\r\n" + b"x" * 999 + b"\r\n", "larger than 1000"),
    ],
)
def test_floods_are_left_at_their_bounds(start: bytes, more: bytes, why: str) -> None:
    with serving(unending(start, more)) as url, pytest.raises(HonedError, match=why):
        web.get(f"{url}/x", 1000)


STARTS = st.sampled_from(
    [b"200 OK", b"200", b"206 x", b"304 x", b"302 x", b"100 Continue", b"999 x", b"2e2 x"]
)
HEADERS = st.lists(
    st.sampled_from(
        [
            *(b"Content-Length: " + each for each in (b"5", b"6", b"-1", b"x", b"5, 5", b"9" * 20)),
            *(b"Location: " + each for each in (b"/y", b"//", b"http://[", b"\xff", b"")),
            *(b"Transfer-Encoding: chunked", b"Content-Encoding: gzip", b"Connection: close", b"X", b": x"),
            *(b'ETag: "a"', b"ETag: \xff", b"Last-Modified: x", b"Content-Type: text/x; charset=nonsense"),
        ]
    )
    | st.binary(max_size=10),
    max_size=4,
)
BODIES = st.sampled_from([b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"-5\r\nhello", b"5;x\r\nhel"])


@given(STARTS | st.binary(max_size=10), HEADERS, BODIES | st.binary(max_size=20))
def test_whatever_a_server_answers_is_a_file_or_told(start: bytes, headers: list[bytes], body: bytes) -> None:
    def answer(handler: Handler) -> None:
        handler.wfile.write(b"\r\n".join([b"HTTP/1.1 " + start, *headers, b"", body]))

    with serving(answer) as url, suppress(HonedError):
        assert len(web.get(f"{url}/x", 1000, '"a"').data or b"") <= 1000


def test_tls_that_never_begins_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "WHOLE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = refused(f"https://127.0.0.1:{silent.getsockname()[1]}")
    assert "took more than 0 s" in str(error)


def test_a_server_that_is_no_tls_server_is_told() -> None:
    with serving(lambda handler: handler.whole(b"x")) as url:
        assert isinstance(refused(url.replace("http:", "https:")), Unavailable)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirections_lead_nowhere_else(tmp_path: Path, status: int) -> None:
    (tmp_path / "secret").write_text("secret")
    with counting(tmp_path) as (other, asked):
        for place in (
            f"file://{tmp_path}/secret",
            "ftp://127.0.0.1/x",
            "data:text/plain,x",
            f"{other}/secret",
            other.replace("127.0.0.1", "localhost") + "/secret",
            f"//{other.removeprefix('http://')}/secret",
            "http://169.254.169.254/latest/meta-data",
            "http://[::1/",
            "https://127.0.0.1/\x1b[31m",
        ):
            with serving(partial(_moved, place, status)) as url:
                error = refused(url)
            assert isinstance(error, InvalidArgument), place
            assert "leads to" in str(error)
            assert str(error).isprintable()
    assert asked == []


def _moved(place: str, status: int, handler: Handler) -> None:
    handler.whole(b"", status, Location=place)


def test_a_redirection_on_the_same_server_is_followed_and_not_for_ever() -> None:
    def answer(handler: Handler) -> None:
        if handler.path == "/x":
            handler.whole(b"", 302, Location="/folder/y")
        elif handler.path == "/folder/y":
            handler.whole(b"found")
        else:
            handler.whole(b"", 302, Location=handler.path + "a")

    with serving(answer) as url:
        assert web.get(f"{url}/x", 1000).data == b"found"
        with pytest.raises(InvalidArgument, match="on and on"):
            web.get(f"{url}/a", 1000)


def test_tls_may_be_led_to_and_not_away_from() -> None:
    assert web._follow_redirect("http://hub/a", "https://hub/a") == "https://hub/a"
    assert web._follow_redirect("http://hub:80/a", "https://hub:443/a") == "https://hub:443/a"
    for before, after in (
        ("https://hub/a", "http://hub/a"),
        ("http://hub:8080/a", "https://hub/a"),
        ("http://hub/a", "https://hub:22/a"),
        ("http://hub/a", "https://hub@other/a"),
    ):
        with pytest.raises(InvalidArgument, match="another server"):
            web._follow_redirect(before, after)


def test_the_body_of_a_redirection_or_an_error_is_not_read() -> None:
    """urllib reads all of the first."""
    for status in (b"302 Found\r\nLocation: /y", b"404 Not Found", b"500 No", b"304 As before"):
        answer = unending(b"HTTP/1.1 " + status + b"\r\n\r\n", bytes(1 << 16))
        with serving(answer) as url:
            refused(url)


def test_what_a_server_says_is_printable_and_short() -> None:
    with serving(unending(b"HTTP/1.1 500 \x1b[2J\x07" + b"x" * 9999 + b"\r\n\r\n", b"x")) as url:
        error = str(refused(url))
    assert error.isprintable()
    assert len(error) < 300


def test_a_server_that_hides_what_is_not_there_is_believed() -> None:
    """S3 answers 403 where there is nothing, to who may not list."""
    for status in (403, 404, 410):
        with serving(partial(_status, status)) as url:
            assert isinstance(refused(url), NotFound)
            with pytest.raises(NotFound, match=r"has no boards/x"):
                remote.store(url).read("boards/x", 100)
    with serving(partial(_status, 503)) as url:
        assert "answers 503" in str(refused(url))


def _status(status: int, handler: Handler) -> None:
    handler.whole(b"", status)


@pytest.mark.parametrize(
    ("headers", "tag"),
    [
        ({"ETag": '"a"'}, '"a"'),
        ({"ETag": 'W/"a"'}, 'W/"a"'),
        ({"ETag": "a"}, ""),
        ({"ETag": '"a\x01"'}, ""),
        ({"ETag": f'"{"a" * 300}"'}, ""),
        ({}, ""),
        ({"Last-Modified": "Sun, 22 Nov 2026 10:00:00 GMT"}, ""),
        (
            {"Last-Modified": "Sun, 22 Nov 2026 10:00:00 GMT", "Date": "Sun, 22 Nov 2026 10:01:00 GMT"},
            "Sun, 22 Nov 2026 10:00:00 GMT",
        ),
        (
            {"Last-Modified": "Sun, 22 Nov 2026 10:00:00 GMT", "Date": "Sun, 22 Nov 2026 10:00:59 GMT"}
            | {"ETag": '"nginx: of time and size"'.replace(" ", "-")},
            "",
        ),
        ({"Last-Modified": "x", "Date": "y", "ETag": '"a"'}, ""),
    ],
)
def test_what_may_hide_a_change_is_not_asked_by(headers: dict[str, str], tag: str) -> None:
    """A file that changes twice in a second may have one time, and one ETag of nginx's."""
    message = Message()
    for name, value in headers.items():
        message[name] = value
    assert web._tag(message) == tag


def test_servers_without_etags_are_asked_by_the_time_of_the_change(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"one")
    os.utime(file, (1e9, 1e9))
    with serving_plainly(tmp_path) as url:
        looked = web.get(f"{url}/x", 100)
        assert looked.data == b"one"
        assert web.get(f"{url}/x", 100, looked.tag).data is None
        file.write_bytes(b"two")
        assert web.get(f"{url}/x", 100, looked.tag).data == b"two"


class serving_plainly:  # noqa: N801 - a context manager
    """Python's own server, which knows of no ETags."""

    def __init__(self, folder: Path) -> None:
        handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=partial(self._server.serve_forever, poll_interval=0.005))

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_pull_as_a_whole_does_not_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that gives each file just before its time is up."""
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", -1.0)
    with serving(lambda handler: handler.whole(b"{}")) as url, pytest.raises(Unavailable, match="took more"):
        Machine(url, owner=OWNER).pull()


def test_a_server_that_says_that_nothing_changed_when_it_was_not_asked_is_told() -> None:
    with serving(partial(_status, 304)) as url, pytest.raises(Unavailable, match="answers 304"):
        Machine(url, owner=OWNER).pull()


@pytest.mark.parametrize("endless", ["index.json", "index.json.minisig", "boards.json", "hub.json", ".gz"])
def test_a_file_that_never_ends_is_left_at_its_real_bound(tmp_path: Path, endless: str) -> None:
    Machine(tmp_path).push(ATTIC, of(workload="a"))
    with serving(but(endless, tmp_path)) as url:
        pulled = Machine(url, owner=OWNER, attic=ATTIC).pull()
    assert pulled.added == (1 if endless in ("boards.json", "hub.json") else 0)
    problems = {source.name: source.problem for source in pulled.sources}
    if endless != "boards.json":  # of no use then, and done without
        assert "larger than" in problems[layout.HUB if endless == "hub.json" else "attic"]
