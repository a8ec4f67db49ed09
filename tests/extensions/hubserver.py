"""Web servers for hubs: one that is honest and counts, and ones whose answers a test writes byte by byte."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

Asked = list[tuple[str, int]]  # paths below the hub, and how each was answered
Answer = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """One request; what it is answered is the test's."""

    def answer(self) -> None:
        """What `serving` was given."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer it."""
        try:
            self.answer()
        except OSError:
            return  # whoever asked has had enough

    def whole(self, data: bytes, status: int = 200, **headers: str) -> None:
        """Answer as an honest server does."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The URL of a server that answers so, each request on a thread of its own."""
    kind = type("_Handler", (Handler,), {"answer": lambda handler: answer(handler)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.005))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def counting(folder: Path) -> Iterator[tuple[str, Asked]]:
    """A folder with ETags, as nginx serves it; and what was asked for."""
    asked: Asked = []

    def answer(handler: Handler) -> None:
        path = folder / handler.path.lstrip("/")
        data = path.read_bytes() if path.is_file() else None
        tag = f'"{hashlib.sha256(data or b"").hexdigest()[:16]}"'
        same = data is not None and handler.headers.get("If-None-Match") == tag
        status = 404 if data is None else 304 if same else 200
        asked.append((handler.path.lstrip("/"), status))
        handler.whole(b"" if status != 200 else data or b"", status, ETag=tag)

    with serving(answer) as url:
        yield url, asked


def but(endless: str, folder: Path) -> Answer:
    """Answers with a folder's files, but for those whose names end so: they never do."""

    def answer(handler: Handler) -> None:
        name = handler.path.lstrip("/")
        if name.endswith(endless):
            unending(b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 16))(handler)
        file = folder / name
        handler.whole(file.read_bytes() if file.is_file() else b"", 200 if file.is_file() else 404)

    return answer


def unending(start: bytes, more: bytes) -> Answer:
    """Answers with the one, and with the other for ever."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(start)
        while True:
            handler.wfile.write(more)

    return answer


def dripping(start: bytes, more: bytes, stopped: threading.Event) -> Answer:
    """The same, so slowly that no wait for the next byte is long, until stopped."""

    def answer(handler: Handler) -> None:
        handler.wfile.write(start)
        while not stopped.wait(0.05):
            handler.wfile.write(more)

    return answer
