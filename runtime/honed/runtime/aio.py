"""The client for asyncio programs: `Client` with `await`; see `honed.runtime.client`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as sockets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from honed.protocol.aiolink import AsyncLink
from honed.protocol.errors import Unavailable

from .calling import rpc
from .calling.calls import register, unregister
from .calling.operations import Operations, SequenceBase
from .calling.rpc import Reply, RpcRequest, RpcSteps, T
from .calling.shared_memory import Region

_RETRY_SECONDS = 0.01  # Seconds between attempts to connect while too many others wait for that


def _performing(steps: Callable[..., RpcSteps[T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return a method that performs an operation's steps and awaits the answers on the way."""

    async def method(self: AsyncClient, *args: Any, **kwargs: Any) -> T:
        taken = steps(self, *args, **kwargs)
        try:
            ask = next(taken)
            while True:
                try:
                    answer = await self._exchange(ask)
                except BaseException as error:  # noqa: BLE001 - the operation has things to close
                    ask = taken.throw(error)
                else:
                    ask = taken.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    return method


class AsyncClient(Operations, performing=_performing):
    """A `Client` for one event loop, whose methods are awaited; concurrent tasks may share it."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout: float | None = 60.0) -> None:
        super().__init__(socket, timeout=timeout)
        self._link: AsyncLink | None = None
        self._connecting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def region(self, nbytes: int) -> AsyncIterator[Region]:
        """Yield shared memory of `nbytes` bytes for the arrays of `infer`; see `Region.array`."""
        region = self._new_region(nbytes)
        try:
            await _perform(await self._ensure_link(), register(region))
            self._regions[region.name] = region
            try:
                yield region
            finally:
                del self._regions[region.name]
                if self._link is not None and self._link.broken is None:
                    await self._exchange(unregister(region))
        finally:
            region.close()

    def sequence(self, model: str) -> AsyncRequestSequence:
        """Return a sequence of requests to `model`, whose state the service keeps between them."""
        return AsyncRequestSequence(self, model)

    async def close(self) -> None:
        """End the connection; a later call opens a new one."""
        self._forget_scratch()
        if self._link is not None:
            self._link.fail(rpc.connection_lost())
            self._link = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _exchange(self, ask: RpcRequest) -> Reply:
        """Make a call and wait for its answer, on the present connection or a new one."""
        try:
            async with asyncio.timeout(ask.limit(self.timeout)):
                return await _perform(await self._ensure_link(), ask)
        except TimeoutError as error:
            raise rpc.no_answer() from error

    async def _ensure_link(self) -> AsyncLink:
        """Return a usable connection that knows this client's regions; connect again if need be."""
        async with self._connecting:
            if self._link is not None and self._link.usable():
                return self._link
            self._link = None
            link = await _connect(self.socket)
            try:
                for region in list(self._regions.values()):
                    await _perform(link, register(region))
            except BaseException:
                link.fail(Unavailable("the connection was given up while it was set up; call again"))
                raise
            self._link = link
            return link


class AsyncRequestSequence(SequenceBase, performing=_performing):
    """A sequence of an `AsyncClient`, whose methods are awaited."""

    async def __aenter__(self) -> AsyncRequestSequence:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _perform(link: AsyncLink, ask: RpcRequest) -> Reply:
    return ask.reply_of(await link.exchange(ask.method.name, ask.plain(), ask.descriptors, ask.progress))


async def _connect(path: str) -> AsyncLink:
    """Return a connection to the service; raise Unavailable or PermissionDenied if the socket refuses it."""
    connecting = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC)
    connecting.setblocking(False)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):  # As many wait to be accepted as may wait
                connecting.connect(path)
                break
            await asyncio.sleep(_RETRY_SECONDS)
    except OSError as error:
        connecting.close()
        raise rpc.cannot_connect(path, error) from error
    except BaseException:
        connecting.close()
        raise
    return AsyncLink(connecting, rpc.client_peer(), rpc.connection_lost)
