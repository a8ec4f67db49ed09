"""Provides the HTTP application: its settings, a route for each request, access, and the live page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from honed.bridge import check_numbers, ip_address
from honed.protocol import errors, methods
from honed.protocol.errors import HonedError, InvalidArgument, NotFound, PermissionDenied, ResourceExhausted
from honed.protocol.params import ModelParams
from honed.protocol.results import ModelMetadata
from honed.protocol.strict import to_plain
from honed.report.command import page
from honed.report.contents import gather
from honed.runtime import AsyncClient, Client

from . import inference

_KEPT: Final = 2.0  # Seconds that a drawn page is cached, so that many readers cost no more than one
_REFRESH: Final = "15"  # Seconds until a browser refreshes the page
_EXTENSIONS: Final = ("binary_tensor_data", "sequence")
_OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_STATUSES: Final[Mapping[str, int]] = {
    errors.InvalidArgument.code: 400,
    errors.PermissionDenied.code: 403,
    errors.NotFound.code: 404,
    errors.AlreadyExists.code: 409,
    errors.ModelRefused.code: 409,
    errors.ResourceExhausted.code: 429,
    errors.Internal.code: 500,
    errors.Unimplemented.code: 501,
    errors.Unavailable.code: 503,
    errors.Cancelled.code: 503,
    errors.DeadlineExceeded.code: 504,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The settings and their defaults; values that are not allowed raise InvalidArgument.

    address, port: where it listens. Other machines reach it unless the address is this machine's alone.
    hosts: names that requests may be addressed to, beside localhost and the address, no port; "*": any.
    page: whether the page of `hone report` is at /.
    max_connections: open at a time; more are answered 503 and closed.
    max_body_mib: of one request, and max_json_mib of the JSON in it.
    max_bodies_mib: of all requests that are not answered yet.
    arrival_seconds: from the first byte of a request, or the connection's start, to its last byte.
    write_seconds: how long a client may leave its answer unread.
    idle_seconds: how long a connection stays open without a request.
    infer_seconds: the longest an inference may wait and run; a request may ask for less.
    """

    address: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()
    page: bool = True
    max_connections: int = 64
    max_body_mib: int = 64
    max_json_mib: int = 8
    max_bodies_mib: int = 256
    arrival_seconds: float = 30.0
    write_seconds: float = 30.0
    idle_seconds: float = 60.0
    infer_seconds: float = 60.0

    def __post_init__(self) -> None:
        ip_address(self.address)
        check_numbers(
            self,
            port=0,
            max_connections=1,
            max_body_mib=1,
            max_json_mib=1,
            max_bodies_mib=1,
            arrival_seconds=0.1,
            write_seconds=0.1,
            idle_seconds=0.1,
            infer_seconds=0.1,
        )
        if self.port > 65535:
            raise InvalidArgument(f"port is {self.port}; give one from 0, any that is free, to 65535")


class Guard:
    """A guard that refuses requests which a web page had a browser make; it knows this server's names.

    A page from elsewhere can make a browser on this machine send requests here. The browser then names the
    page in Origin; or the page has its own name resolve to this address, and that name is in Host.
    """

    def __init__(self, address: str, hosts: Iterable[str]) -> None:
        self._hosts = {"localhost", "127.0.0.1", "::1", address, *hosts}

    def check(self, request: Request) -> None:
        """Raise PermissionDenied for a request that is not addressed to this server, or comes from a page."""
        host = request.headers.get("host", "")
        if not self._own(f"//{host}"):
            raise PermissionDenied(
                f"this server is not called {host[:200]!r}; ask for localhost, or add the name to hosts"
            )
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise PermissionDenied(f"pages of {origin[:200]!r} may not ask this server")

    def _own(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname
        except ValueError:
            return False
        return "*" in self._hosts or name in self._hosts


class LivePage:
    """The page of `hone report` for the service at `socket`, cached for two seconds."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._drawing = asyncio.Lock()
        self._drawn = -_KEPT  # Time of drawing, by time.monotonic
        self._html = ""

    async def answer(self, request: Request) -> Response:
        """Return the page; raise a HonedError if the service does not answer."""
        async with self._drawing:
            if time.monotonic() - self._drawn >= _KEPT:
                self._html = await asyncio.to_thread(self._draw)
                self._drawn = time.monotonic()
        return HTMLResponse(self._html, headers={"Refresh": _REFRESH, "X-Content-Type-Options": "nosniff"})

    def _draw(self) -> str:
        with Client(self._socket) as client:
            return page(gather(client, records=False))


class TooLarge(ResourceExhausted):
    """Raised when a body is larger than allowed."""


class WrongEncoding(InvalidArgument):
    """Raised when a body has an encoding that is not understood."""


Endpoint = Callable[[Request], Awaitable[Response]]


def application(settings: HttpSettings, client: AsyncClient) -> Starlette:
    """Return the application that uvicorn runs; it closes the client at the end."""
    bridge = _Bridge(settings, client)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await client.close()

    app = Starlette(routes=bridge.routes(), exception_handlers={HTTPException: _not_found}, lifespan=lifespan)
    app.router.redirect_slashes = False  # Slashes are not redirected: a path exists, or it does not
    return app


class _Bridge:
    def __init__(self, settings: HttpSettings, client: AsyncClient) -> None:
        self._settings = settings
        self._client = client
        self._guard = Guard(settings.address, settings.hosts)
        self._page = LivePage(client.socket)
        self._bodies = 0  # Bytes of requests that are not answered yet

    def routes(self) -> list[Route]:
        model = "/v2/models/{model}"
        rows: list[tuple[str, str, Endpoint]] = [
            ("/v2", "GET", self._server),
            ("/v2/health/live", "GET", self._live),
            ("/v2/health/ready", "GET", self._ready),
            ("/metrics", "GET", self._metrics),
        ]
        if self._settings.page:
            rows.append(("/", "GET", self._page.answer))
        for path in (model, f"{model}/versions/{{version}}"):
            rows += [
                (path, "GET", self._model),
                (f"{path}/ready", "GET", self._model_ready),
                (f"{path}/infer", "POST", self._infer),
            ]
        return [Route(path, self._answering(ask), methods=[method]) for path, method, ask in rows]

    def _answering(self, ask: Endpoint) -> Endpoint:
        """Return the endpoint with its failures turned into answers."""

        async def respond(request: Request) -> Response:
            try:
                self._guard.check(request)
                return await ask(request)
            except HonedError as error:
                return _error_response(error)
            except ClientDisconnect:
                return Response(status_code=400)  # The client has gone

        return respond

    async def _server(self, request: Request) -> Response:
        answer = await self._client.ask(methods.SERVER_METADATA)
        return JSONResponse({"name": answer.name, "version": answer.version, "extensions": _EXTENSIONS})

    async def _live(self, request: Request) -> Response:
        return _yes_or_no("live", await self._client.live())

    async def _ready(self, request: Request) -> Response:
        return _yes_or_no("ready", await self._client.ready())

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._client.openmetrics(), media_type=_OPENMETRICS)

    async def _model(self, request: Request) -> Response:
        return JSONResponse(to_plain(await self._metadata(request)))

    async def _model_ready(self, request: Request) -> Response:
        model = (await self._metadata(request)).name
        answer = await self._client.ask(methods.MODEL_READY, ModelParams(name=model))
        return _yes_or_no("ready", answer.ready, name=model)

    async def _metadata(self, request: Request) -> ModelMetadata:
        """Return the metadata of the path's model; raise NotFound if it lacks the path's version."""
        name, version = request.path_params["model"], request.path_params.get("version")
        answer: ModelMetadata = await self._client.ask(methods.MODEL_METADATA, ModelParams(name=name))
        if version is not None and version not in answer.versions:
            known = ", ".join(answer.versions)
            raise NotFound(f"{name} has no version {version[:100]!r}; there is {known}")
        return answer

    async def _infer(self, request: Request) -> Response:
        if "version" in request.path_params:
            await self._metadata(request)
        with self._room() as room:
            body = memoryview(await self._body(request, room))
            text, binary = inference.json_part(
                body, request.headers.get(inference.HEADER_LENGTH), self._settings.max_json_mib << 20
            )
            asked = await asyncio.to_thread(
                inference.parse,
                request.path_params["model"],
                request.path_params.get("version", ""),
                text,
                binary,
                self._settings.infer_seconds,
            )
            inferred = await self._client.request(asked.params, timeout=asked.seconds)
            answer = await asyncio.to_thread(inference.answer, asked, inferred)
        if answer.json_length is None:
            return Response(answer.body, media_type="application/json")
        length = {inference.HEADER_LENGTH: str(answer.json_length)}
        return Response(answer.body, media_type="application/octet-stream", headers=length)

    async def _body(self, request: Request, take: Callable[[int], None]) -> bytes:
        """Return the whole body; call `take`, which may raise, with the length of each chunk."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise WrongEncoding(f"the body is encoded as {encoding[:100]!r}; send it as it is")
        most = self._settings.max_body_mib << 20
        parts: list[bytes] = []
        length = 0
        async for part in request.stream():
            length += len(part)
            if length > most:
                raise TooLarge(f"the body has more than {self._settings.max_body_mib} MiB, which are allowed")
            take(len(part))
            parts.append(part)
        return b"".join(parts)

    @contextmanager
    def _room(self) -> Any:
        """Yield a function that reserves bytes of memory for a request; they are freed at the end.

        The function raises Unavailable if other requests have the memory.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self._bodies + count > self._settings.max_bodies_mib << 20:
                raise errors.Unavailable("other requests have the memory there is for them; try again")
            self._bodies += count
            taken += count

        try:
            yield take
        finally:
            self._bodies -= taken


def _yes_or_no(what: str, holds: bool, **more: str) -> Response:
    return JSONResponse({**more, what: holds}, status_code=200 if holds else 400)


def _error_response(error: HonedError) -> Response:
    status = _STATUSES.get(error.code, 500)
    if isinstance(error, TooLarge):
        status = 413
    elif isinstance(error, WrongEncoding):
        status = 415
    if status == 500:
        _log.error("%s", error)
    return JSONResponse({"error": str(error)}, status_code=status)


async def _not_found(request: Request, error: Exception) -> Response:
    """Answer paths and methods that do not exist."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "there is nothing at this path", 405: "this path is asked otherwise"}.get(status, str(error))
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(
        {"error": f"{what}; docs/http.md has what can be asked"}, status_code=status, headers=headers
    )
