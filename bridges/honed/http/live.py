"""The page of `hone report`, live: for people, who ask for it with a browser."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from honed.runtime import Client
from honed.tool.report.contents import gather
from honed.tool.report.page import page

_KEPT: Final = 2.0  # seconds that a page is shown to all who ask, so that many cost no more than one
_REFRESH: Final = "15"  # seconds after which a browser asks again


class LivePage:
    """Draws the page of the service at `socket`, one at a time."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._drawing = asyncio.Lock()
        self._drawn = -_KEPT  # when, by time.monotonic
        self._html = ""

    async def answer(self, request: Request) -> Response:
        """The page; raises a HonedError where the service does not answer."""
        async with self._drawing:
            if time.monotonic() - self._drawn >= _KEPT:
                self._html = await asyncio.to_thread(self._draw)
                self._drawn = time.monotonic()
        return HTMLResponse(self._html, headers={"Refresh": _REFRESH, "X-Content-Type-Options": "nosniff"})

    def _draw(self) -> str:
        with Client(self._socket) as client:
            return page(gather(client, records=False))
