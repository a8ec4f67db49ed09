"""The client for asyncio programs: `Client` with `await`; see `honed.runtime.client`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike, NDArray

from . import calls, endpoint
from .aiolink import AsyncLink
from .arrivals import close_all
from .calls import Outputs
from .endpoint import Progress
from .errors import DeadlineExceeded, Unavailable
from .exported import Exported, exported
from .protocol import MissingFiles
from .regions import Region

_GRACE = 5.0  # seconds the service's own DEADLINE_EXCEEDED may take to arrive


class AsyncClient:
    """As `Client`, for one event loop; concurrent tasks may share it."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout: float = 60.0) -> None:
        """`socket`: its path; None looks where honed listens. `timeout`: seconds a call may take."""
        self.socket = str(socket) if socket is not None else endpoint.default_socket(os.environ)
        self.timeout = timeout
        self._link: AsyncLink | None = None
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

    async def metrics(self) -> dict[str, Any]:
        """Every figure the service has of itself and its models (docs/metrics.md)."""
        return await self._call("Metrics", {})

    async def openmetrics(self) -> str:
        """The same as OpenMetrics text."""
        return str((await self._call("Metrics", {"format": "openmetrics"}))["text"])

    async def config(self) -> dict[str, Any]:
        """The settings in force, and what the service's files say instead."""
        return await self._call("ConfigShow", {})

    async def reload_config(self) -> dict[str, Any]:
        """Have the service read its files again; raises InvalidArgument where one is wrong."""
        return await self._call("ConfigReload", {})

    async def show(self, model: str) -> dict[str, Any]:
        """Where `model` comes from, how it was proven right, and its kernels."""
        return await self._call("ModelShow", {"name": model})

    async def export(self, model: str) -> Exported:
        """The files of `model`; as `Client.export`."""
        return exported(*await self._exchange("ModelExport", {"name": model}))

    async def profile(self, model: str, runs: int = 5, *, timeline: bool = False) -> dict[str, Any]:
        """Time per kernel of `model`, mean of `runs` inferences; as `Client.profile`."""
        params = calls.profile_call(model, runs, timeline=timeline)
        return await self._call("ModelProfile", params, timeout=None)

    async def add(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        precision: str = "auto",
        replace: bool = False,
        device: str | None = None,
        calibration: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Add an ONNX or `.honed` file; arguments and errors as `Client.add`."""
        file = Path(path)
        model = name if name is not None else calls.model_name_for(file)
        opened: dict[str, int] = {}
        sets: dict[str, int] = {}

        async def load() -> dict[str, Any]:
            params = calls.load_params(model, list(opened), shapes, precision, replace, device, list(sets))
            sent = [*opened.values(), *sets.values()]
            return await self._call(
                "RepositoryModelLoad", params, timeout=None, descriptors=sent, progress=progress
            )

        try:
            opened[file.name] = calls.open_model(file)
            sets |= calls.open_calibration(calibration)
            try:
                return await load()
            except MissingFiles as missing:
                opened |= calls.open_beside(file, missing)
                return await load()
        finally:
            for descriptor in (*opened.values(), *sets.values()):
                os.close(descriptor)

    async def publish(
        self, model: str, path: str | os.PathLike[str], *, expected: str, why: str
    ) -> dict[str, Any]:
        """Serve a faster form of `model`; as `Client.publish`."""
        descriptor = calls.open_model(Path(path))
        try:
            params = {"name": model, "expected": expected, "why": why}
            return await self._call("ModelPublish", params, descriptors=[descriptor], timeout=None)
        finally:
            os.close(descriptor)

    async def history(self, model: str) -> dict[str, Any]:
        """Versions of `model`; as `Client.history`."""
        return await self._call("ModelHistory", {"name": model})

    async def rollback(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Serve an earlier version of `model` again; as `Client.rollback`."""
        return await self._call("ModelRollback", {"name": model, "version": version}, timeout=None)

    async def pin(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Pin a version of `model`; as `Client.pin`."""
        return await self._call("ModelPin", {"name": model, "version": version}, timeout=None)

    async def report(self, text: str) -> None:
        """What a tuner does; as `Client.report`."""
        await self._call("TunerReport", {"text": text})

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
            self._link.fail(endpoint.connection_lost())
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
        result, unwanted = await self._exchange(
            method, params, timeout=timeout, descriptors=descriptors, progress=progress
        )
        close_all(unwanted)
        return result

    async def _exchange(
        self,
        method: str,
        params: dict[str, Any],
        *,
        timeout: float | None = -1.0,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> tuple[dict[str, Any], list[int]]:
        """As `_call`, with the descriptors that came along, which are the caller's."""
        limit = self.timeout if timeout == -1.0 else timeout
        link = await self._connected()
        try:
            async with asyncio.timeout(limit):
                return await link.exchange(method, params, descriptors, progress)
        except TimeoutError as error:
            raise DeadlineExceeded("the service did not answer in time; give a longer timeout") from error

    async def _connected(self) -> AsyncLink:
        """A usable connection that knows this client's regions."""
        async with self._connecting:
            if self._link is not None and self._link.usable():
                return self._link
            self._link = None
            link = await AsyncLink.open(self.socket)
            try:
                for region in self._regions.values():
                    await _register(link, region)
            except BaseException:
                link.fail(Unavailable("the connection was given up while it was set up; call again"))
                raise
            self._link = link
            return link


async def _register(link: AsyncLink, region: Region) -> None:
    params = {"name": region.name, "byte_size": region.nbytes}
    await link.call("SystemSharedMemoryRegister", params, [region.descriptor], None)
