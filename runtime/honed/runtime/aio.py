"""The client for asyncio programs: `Client` with `await`; see `honed.runtime.client`."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike, NDArray

from . import calls, wire
from .calls import Outputs, Progress
from .errors import DeadlineExceeded, HonedError, Unavailable
from .protocol import MissingFiles, error_from_map
from .regions import Region

_CHUNK = 256 << 10  # bytes read at once
_GRACE = 5.0  # seconds the service's own DEADLINE_EXCEEDED may take to arrive


class _AsyncLink:
    """One connection within one event loop."""

    def __init__(self, connected: sockets.socket) -> None:
        self._socket = connected
        self._decoder = wire.Decoder(wire.FrameLimits(max_bytes=1 << 30))
        self._sending = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._progress: dict[int, Progress] = {}
        self._next_msgid = 0
        self.broken: HonedError | None = None
        asyncio.get_running_loop().add_reader(connected, self._readable)

    @classmethod
    async def open(cls, path: str) -> _AsyncLink:
        """Connect; raises Unavailable where no service answers."""
        connecting = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC)
        connecting.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connecting, path)
        except OSError as error:
            connecting.close()
            raise calls.cannot_connect(path, error) from error
        except BaseException:
            connecting.close()
            raise
        return cls(connecting)

    async def call(
        self, method: str, params: dict[str, Any], descriptors: Sequence[int], progress: Progress | None
    ) -> Any:
        """The result of a call; raises its error. Cancelling the awaiting task cancels the request."""
        self._next_msgid = msgid = (self._next_msgid + 1) & wire.MAX_MSGID
        frame = wire.encode(wire.Request(msgid=msgid, method=method, params=params))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[msgid] = answer
        if progress is not None:
            self._progress[msgid] = progress
        try:
            await self._send(frame, descriptors)
            return await answer
        except asyncio.CancelledError:
            self._cancel(msgid)
            raise
        finally:
            self._waiting.pop(msgid, None)
            self._progress.pop(msgid, None)

    def usable(self) -> bool:
        """Whether the connection is up; looks for an end that the loop has not seen yet."""
        if self.broken is None:
            try:
                if not self._socket.recv(1, sockets.MSG_PEEK | sockets.MSG_DONTWAIT):
                    self.fail(calls.connection_lost())
            except BlockingIOError:
                pass  # nothing to read: up
            except OSError:
                self.fail(calls.connection_lost())
        return self.broken is None

    def fail(self, error: HonedError) -> None:
        """End the connection; everyone waiting gets `error`."""
        if self.broken is not None:
            return
        self.broken = error
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    async def _send(self, frame: bytes, descriptors: Sequence[int]) -> None:
        async with self._sending:
            if self.broken is not None:
                raise self.broken
            try:
                sent = await self._send_with(descriptors, frame) if descriptors else 0
                await asyncio.get_running_loop().sock_sendall(self._socket, memoryview(frame)[sent:])
            except OSError as error:
                self.fail(calls.connection_lost())
                raise calls.connection_lost() from error
            except asyncio.CancelledError:
                self.fail(calls.connection_lost())  # part of the frame may be out
                raise

    async def _send_with(self, descriptors: Sequence[int], frame: bytes) -> int:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return sockets.send_fds(self._socket, [frame], descriptors)
            except BlockingIOError:
                writable = loop.create_future()
                loop.add_writer(self._socket, writable.set_result, None)
                try:
                    await writable
                finally:
                    loop.remove_writer(self._socket)

    def _cancel(self, msgid: int) -> None:
        if self.broken is None:
            frame = wire.encode(wire.Notification(method="Cancel", params={"msgid": msgid}))
            # A full socket: the service then learns it from nobody, and the late answer is dropped.
            with suppress(OSError):
                if self._socket.send(frame) != len(frame):
                    self.fail(calls.connection_lost())

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise ConnectionResetError
            self._decoder.feed(data)
            while self.broken is None and (message := self._decoder.next_message()) is not None:
                self._deliver(message)
        except BlockingIOError:
            return
        except OSError:
            self.fail(calls.connection_lost())
        except wire.PeerFault as fault:
            self.fail(fault.error)

    def _deliver(self, message: wire.Message) -> None:
        match message:
            case wire.Response(msgid=msgid, error=error, result=result):
                answer = self._waiting.get(msgid)
                if answer is None or answer.done():
                    return
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error_from_map(error))
            case wire.Notification(method="Progress", params=params):
                progress = self._progress.get(params.get("msgid", -1))
                if progress is not None:
                    progress(params)
            case wire.Notification(method="Error", params=params):
                self.fail(error_from_map(params))


class AsyncClient:
    """As `Client`, for one event loop; concurrent tasks may share it."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout: float = 60.0) -> None:
        """`socket`: its path; None looks where honed listens. `timeout`: seconds a call may take."""
        self.socket = str(socket) if socket is not None else calls.default_socket(os.environ)
        self.timeout = timeout
        self._link: _AsyncLink | None = None
        self._connecting = asyncio.Lock()
        self._regions: dict[str, Region] = {}
        self._made = 0  # regions so far

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Outputs | None = None,
        timeout: float | None = None,
        priority: int = 2,
        finite: bool = False,
    ) -> dict[str, NDArray[Any]]:
        """Run `model` on `inputs`; arguments and errors as `Client.infer`."""
        seconds = self.timeout if timeout is None else timeout
        call = calls.infer_call(
            model, inputs, outputs, self._regions.values(), timeout=seconds, priority=priority, finite=finite
        )
        return calls.infer_result(call, await self._call("ModelInfer", call.params, timeout=seconds + _GRACE))

    async def models(self) -> list[dict[str, Any]]:
        """All models: name, version, state and reason."""
        models: list[dict[str, Any]] = (await self._call("RepositoryIndex", {}))["models"]
        return models

    async def metadata(self, model: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of `model`; without one, the service's name, version and limits."""
        if model is None:
            return await self._call("ServerMetadata", {})
        return await self._call("ModelMetadata", {"name": model})

    async def live(self) -> bool:
        """Whether the service answers at all; raises Unavailable where not."""
        return bool((await self._call("ServerLive", {}))["live"])

    async def ready(self, model: str | None = None) -> bool:
        """Whether `model` can be run; without one, whether the service and all its models can."""
        if model is None:
            return bool((await self._call("ServerReady", {}))["ready"])
        return bool((await self._call("ModelReady", {"name": model}))["ready"])

    async def status(self) -> dict[str, Any]:
        """What the service is doing, on which device."""
        return await self._call("ServerStatus", {})

    async def statistics(self, model: str | None = None) -> list[dict[str, Any]]:
        """Counts and times of served requests, of `model` or of all."""
        stats: list[dict[str, Any]] = (await self._call("ModelStatistics", {"name": model or ""}))[
            "model_stats"
        ]
        return stats

    async def show(self, model: str) -> dict[str, Any]:
        """Where `model` comes from, how it was proven right, and its kernels."""
        return await self._call("ModelShow", {"name": model})

    async def profile(self, model: str, runs: int = 5) -> dict[str, Any]:
        """Time per kernel of `model`, mean of `runs` inferences."""
        return await self._call("ModelProfile", {"name": model, "parameters": {"runs": runs}}, timeout=None)

    async def add(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        precision: str = "auto",
        replace: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Add an ONNX or `.honed` file; arguments and errors as `Client.add`."""
        file = Path(path)
        model = name if name is not None else calls.model_name_for(file)
        opened = {file.name: calls.open_model(file)}

        async def load() -> dict[str, Any]:
            params = calls.load_params(model, list(opened), shapes, precision, replace)
            sent = list(opened.values())
            return await self._call(
                "RepositoryModelLoad", params, timeout=None, descriptors=sent, progress=progress
            )

        try:
            try:
                return await load()
            except MissingFiles as missing:
                opened |= calls.open_beside(file, missing)
                return await load()
        finally:
            for descriptor in opened.values():
                os.close(descriptor)

    async def remove(self, model: str) -> None:
        """Remove `model` and its files for good."""
        await self._call("RepositoryModelUnload", {"model_name": model})

    @asynccontextmanager
    async def region(self, nbytes: int) -> AsyncIterator[Region]:
        """Shared memory of `nbytes` bytes for the arrays of `infer`; see `Region.array`."""
        self._made += 1
        region = Region(f"r{self._made}", nbytes)
        try:
            await _register(await self._connected(), region)
            self._regions[region.name] = region
            try:
                yield region
            finally:
                del self._regions[region.name]
                if self._link is not None and self._link.broken is None:
                    await self._call("SystemSharedMemoryUnregister", {"name": region.name})
        finally:
            region.close()

    async def close(self) -> None:
        """End the connection; a later call opens a new one."""
        if self._link is not None:
            self._link.fail(calls.connection_lost())
            self._link = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(
        self,
        method: str,
        params: dict[str, Any],
        *,
        timeout: float | None = -1.0,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        limit = self.timeout if timeout == -1.0 else timeout
        link = await self._connected()
        try:
            async with asyncio.timeout(limit):
                result: dict[str, Any] = await link.call(method, params, descriptors, progress)
                return result
        except TimeoutError as error:
            raise DeadlineExceeded("the service did not answer in time; give a longer timeout") from error

    async def _connected(self) -> _AsyncLink:
        """A usable connection that knows this client's regions."""
        async with self._connecting:
            if self._link is not None and self._link.usable():
                return self._link
            self._link = None
            link = await _AsyncLink.open(self.socket)
            try:
                for region in self._regions.values():
                    await _register(link, region)
            except BaseException:
                link.fail(Unavailable("the connection was given up while it was set up; call again"))
                raise
            self._link = link
            return link


async def _register(link: _AsyncLink, region: Region) -> None:
    params = {"name": region.name, "byte_size": region.nbytes}
    await link.call("SystemSharedMemoryRegister", params, [region.descriptor], None)
