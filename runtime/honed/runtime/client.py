"""The client for apps: models on the machine's service, called like functions.

    from honed.runtime import Client
    with Client() as client:
        out = client.infer("lightglue", {"kpts0": a, "kpts1": b})

Needs NumPy and msgpack only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike, NDArray

from . import calls, endpoint
from .arrivals import close_all
from .calls import Outputs
from .endpoint import Progress
from .errors import InvalidArgument, Unavailable
from .exported import Exported, exported
from .link import Link
from .protocol import MissingFiles
from .regions import Region
from .wire import Response

_GRACE = 5.0  # seconds the service's own DEADLINE_EXCEEDED may take to arrive


class Client:
    """A connection to the service; threads may share it, and it reconnects if the service restarted.

    Every method raises the errors of `honed.runtime.errors` that the service answered with, and
    Unavailable where there is no service. Maps are returned as docs/protocol.md describes them.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout: float = 60.0) -> None:
        """`socket`: its path; None looks where honed listens. `timeout`: seconds a call may take."""
        self.socket = str(socket) if socket is not None else endpoint.default_socket(os.environ)
        self.timeout = timeout
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._regions: dict[str, Region] = {}
        self._made = 0  # regions so far

    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Outputs | None = None,
        timeout: float | None = None,
        priority: int = 2,
        finite: bool = False,
    ) -> dict[str, NDArray[Any]]:
        """Run `model` on `inputs`; gives its outputs by name.

        Arrays that lie in a `region` of this client are not copied. `outputs`: the names wanted, or arrays
        by name to write them to. `timeout` in seconds; `priority` 1 (first) to 3 (last); `finite` refuses
        inputs with NaN or infinity.
        """
        seconds = self.timeout if timeout is None else timeout
        with self._lock:
            regions = list(self._regions.values())
        call = calls.infer_call(
            model, inputs, outputs, regions, timeout=seconds, priority=priority, finite=finite
        )
        return calls.infer_result(call, self._call("ModelInfer", call.params, timeout=seconds + _GRACE))

    def models(self) -> list[dict[str, Any]]:
        """All models: name, version, state and reason."""
        models: list[dict[str, Any]] = self._call("RepositoryIndex", {})["models"]
        return models

    def metadata(self, model: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of `model`; without one, the service's name, version and limits."""
        if model is None:
            return self._call("ServerMetadata", {})
        return self._call("ModelMetadata", {"name": model})

    def live(self) -> bool:
        """Whether the service answers at all; raises Unavailable where not."""
        return bool(self._call("ServerLive", {})["live"])

    def ready(self, model: str | None = None) -> bool:
        """Whether `model` can be run; without one, whether the service and all its models can."""
        if model is None:
            return bool(self._call("ServerReady", {})["ready"])
        return bool(self._call("ModelReady", {"name": model})["ready"])

    def status(self) -> dict[str, Any]:
        """What the service is doing, on which device."""
        return self._call("ServerStatus", {})

    def statistics(self, model: str | None = None) -> list[dict[str, Any]]:
        """Counts and times of served requests, of `model` or of all."""
        stats: list[dict[str, Any]] = self._call("ModelStatistics", {"name": model or ""})["model_stats"]
        return stats

    def metrics(self) -> dict[str, Any]:
        """Every figure the service has of itself and its models (docs/metrics.md)."""
        return self._call("Metrics", {})

    def openmetrics(self) -> str:
        """The same as OpenMetrics text."""
        return str(self._call("Metrics", {"format": "openmetrics"})["text"])

    def config(self) -> dict[str, Any]:
        """The settings in force, and what the service's files say instead."""
        return self._call("ConfigShow", {})

    def reload_config(self) -> dict[str, Any]:
        """Have the service read its files again; raises InvalidArgument where one is wrong."""
        return self._call("ConfigReload", {})

    def show(self, model: str) -> dict[str, Any]:
        """Where `model` comes from, how it was proven right, and its kernels."""
        return self._call("ModelShow", {"name": model})

    def export(self, model: str) -> Exported:
        """The files of `model` as the service keeps them, open for reading: compiled, and its sources."""
        return exported(*self._exchange("ModelExport", {"name": model}))

    def profile(
        self, model: str, runs: int = 5, *, timeline: bool = False, timeout: float | None = None
    ) -> dict[str, Any]:
        """Time per kernel of `model`, mean of `runs` inferences; `timeout` in seconds, None: no limit.

        With `timeline`, when each command of the first of them was enqueued and computed, too.
        """
        params = calls.profile_call(model, runs, timeline=timeline)
        return self._call("ModelProfile", params, timeout=timeout)

    def add(
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
        """Add an ONNX or `.honed` file; returns when it is served. `name` defaults to the file's stem.

        External data is sent along from the file's folder. `device` is one of the service's, or "fastest" to
        have them compared; None leaves that to the service. `calibration` is a folder of .npz files, each
        with one set of inputs, that errors in fp16 are measured on where the precision is "auto".
        `progress` gets each Progress map. Raises ModelRefused with every reason where the model cannot be
        served.
        """
        file = Path(path)
        model = name if name is not None else calls.model_name_for(file)
        opened: dict[str, int] = {}
        sets: dict[str, int] = {}

        def load() -> dict[str, Any]:
            params = calls.load_params(model, list(opened), shapes, precision, replace, device, list(sets))
            sent = [*opened.values(), *sets.values()]
            return self._call(
                "RepositoryModelLoad", params, descriptors=sent, timeout=None, progress=progress
            )

        try:
            opened[file.name] = calls.open_model(file)
            sets |= calls.open_calibration(calibration)
            try:
                return load()
            except MissingFiles as missing:
                opened |= calls.open_beside(file, missing)
                return load()
        finally:
            for descriptor in (*opened.values(), *sets.values()):
                os.close(descriptor)

    def publish(self, model: str, path: str | os.PathLike[str], *, expected: str, why: str) -> dict[str, Any]:
        """Serve a faster form of `model`, a `.honed` file, if the service finds it right and faster.

        `expected` is the SHA-256 of the compiled file served when it was made (`export` tells). The result
        says in "published" whether it is served, and in "sentence" why. Raises AlreadyExists where another
        version came meanwhile, ModelRefused where it is not this model.
        """
        descriptor = calls.open_model(Path(path))
        try:
            params = {"name": model, "expected": expected, "why": why}
            return self._call("ModelPublish", params, descriptors=[descriptor], timeout=None)
        finally:
            os.close(descriptor)

    def history(self, model: str) -> dict[str, Any]:
        """Versions of `model`: what was served when, and why each came and went."""
        return self._call("ModelHistory", {"name": model})

    def rollback(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Serve an earlier version of `model` again, None: the one before; the one left stays out."""
        return self._call("ModelRollback", {"name": model, "version": version}, timeout=None)

    def pin(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Serve a version, None: the present one, and let no other take its place; 0 allows that again."""
        return self._call("ModelPin", {"name": model, "version": version}, timeout=None)

    def report(self, text: str) -> None:
        """For tuners: what they do, shown in the service's status while this connection lasts."""
        self._call("TunerReport", {"text": text})

    def run_tuner(
        self,
        params: Mapping[str, Any],
        *,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> tuple[dict[str, Any], list[int]]:
        """Have the service tune, or work on its records (docs/protocol.md, TunerRun).

        Gives the result, and the open files that came with it, which are the caller's.
        """
        return self._exchange(
            "TunerRun", dict(params), timeout=None, descriptors=descriptors, progress=progress
        )

    def stop_tuner(self, model: str) -> None:
        """End a `run_tuner` of this model soon; it uses what was found. Raises NotFound where none runs."""
        self._call("TunerStop", {"model": model})

    def remove(self, model: str) -> None:
        """Remove `model` and its files for good."""
        self._call("RepositoryModelUnload", {"model_name": model})

    @contextmanager
    def region(self, nbytes: int) -> Iterator[Region]:
        """Shared memory of `nbytes` bytes for the arrays of `infer`; see `Region.array`."""
        with self._lock:
            self._made += 1
            region = Region(f"r{self._made}", nbytes)
        try:
            self._register(self._connected(), region)
            with self._lock:
                self._regions[region.name] = region
            yield region
        finally:
            with self._lock:
                known = self._regions.pop(region.name, None)
            if known is not None:
                self._unregister(region)
            region.close()

    def close(self) -> None:
        """End the connection; a later call opens a new one."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self,
        method: str,
        params: dict[str, Any],
        *,
        timeout: float | None = -1.0,
        descriptors: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Call a method and return its result; `timeout` -1: the client's own, None: none."""
        result, unwanted = self._exchange(
            method, params, timeout=timeout, descriptors=descriptors, progress=progress
        )
        close_all(unwanted)
        return result

    def _exchange(
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
        deadline = None if limit is None else time.monotonic() + limit
        link = self._connected()
        try:
            waiting = link.send(method, params, descriptors)
        except Unavailable:
            # The service went away before it had the whole request, so sending it again is safe.
            self._drop(link)
            link = self._connected()
            waiting = link.send(method, params, descriptors)
        while True:
            news = link.wait(waiting, deadline)
            if isinstance(news, Response):
                return _result(news), waiting.descriptors
            if progress is not None:
                try:
                    progress(news)
                except BaseException:
                    link.cancel(waiting)
                    raise

    def _connected(self) -> Link:
        """A usable connection that knows this client's regions."""
        with self._lock:
            if self._link is not None and self._link.usable():
                return self._link
            if self._link is not None:
                self._link.close()
            self._link = None
            link = Link(self.socket, self.timeout)
            try:
                for region in self._regions.values():
                    self._register(link, region)
            except BaseException:
                link.close()
                raise
            self._link = link
            return link

    def _drop(self, link: Link) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
        link.close()

    def _register(self, link: Link, region: Region) -> None:
        params = {"name": region.name, "byte_size": region.nbytes}
        waiting = link.send("SystemSharedMemoryRegister", params, [region.descriptor])
        link.wait(waiting, time.monotonic() + self.timeout)

    def _unregister(self, region: Region) -> None:
        with self._lock:
            link = self._link
        if link is None or not link.usable():
            return  # the service forgets regions with their connection
        try:
            waiting = link.send("SystemSharedMemoryUnregister", {"name": region.name}, ())
            link.wait(waiting, time.monotonic() + self.timeout)
        except Unavailable:
            self._drop(link)


def _result(response: Response) -> dict[str, Any]:
    if not isinstance(response.result, dict):
        raise InvalidArgument("the service answered something that is no map; compare versions")
    return response.result
