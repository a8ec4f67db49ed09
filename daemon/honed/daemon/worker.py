"""The serving worker: a child process that owns the device and runs what the service passes to it.

python -m honed.daemon.worker FD CACHE_DIR DEVICE_SPEC

It answers MessagePack-RPC requests on the socket FD until that closes. Models are loaded in a thread of
their own, so that building kernels does not hold up inferences. Whatever goes wrong in here or in the
driver ends this process and not the service.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.arrivals import close_all
from honed.protocol.errors import (
    DeviceError,
    HonedError,
    Internal,
    InvalidArgument,
    ModelRefused,
    NotFound,
)
from honed.protocol.peer import Asked, Peer
from honed.protocol.wire import FrameLimits
from honed.runtime import peaks, transport
from honed.runtime.devices import Device, select
from honed.runtime.dtypes import dtype
from honed.runtime.executor import Executor, load
from honed.runtime.profile import DeviceProfile
from honed.runtime.profilefile import to_dict
from honed.runtime.proof import Difference, check_probe
from honed.runtime.regions import map_descriptor
from honed.runtime.surveying import survey

from .duel import Recorder, Turns
from .profiling import profile

Array = NDArray[Any]
_FRAMES = FrameLimits(max_bytes=1 << 30)  # the service is trusted, and bounds what it sends
_log = logging.getLogger(__name__)


class Worker:
    """The device, the loaded models by key, and the mapped regions by number."""

    def __init__(self, connected: socket.socket, cache_dir: Path, spec: str) -> None:
        self._socket = connected
        self._cache_dir = cache_dir
        self._spec = spec
        self._found: DeviceProfile | None = None
        self._device: Device | None = None  # from the first model on
        self._models: dict[str, Executor] = {}
        self._checked: dict[str, dict[int, tuple[Difference, ...]]] = {}  # by key and probe
        self._recorder = Recorder()
        self._turns: Turns | None = None
        self._regions: dict[int, Array] = {}
        self._peer = Peer(serves=True, receiving=_FRAMES, sending=_FRAMES)
        self._descriptors: list[int] = []  # of the request being answered
        self._sending = threading.Lock()
        self._loads: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._loading = 0  # number of the request that loads now
        # Building kernels takes processor time from inferences; a thread has a niceness of its own in Linux.
        # Only this one has: one that runs Python would hold the interpreter's lock while it waits its turn.
        self._builder = ThreadPoolExecutor(1, "builder", initializer=_be_nice)

    def serve(self) -> None:
        """Answer until the service hangs up."""
        threading.Thread(target=self._load_all, name="loader", daemon=True).start()
        while transport.receive(self._socket, self._peer):
            while (event := self._peer.next_event()) is not None:
                match event:
                    case Asked(method=method) if method in self._LOADING:
                        self._loads.put(event)
                    case Asked(method=method):
                        self._descriptors = event.descriptors
                        self._answer(event, self._METHODS[method])
                        close_all(self._descriptors)

    def _load_all(self) -> None:
        while True:
            request = self._loads.get()
            self._loading = request.msgid
            self._answer(request, self._LOADING[request.method])

    def _built(self, done: int, of: int) -> None:
        """Tell how many kernels of the model being loaded are built."""
        progress = {"msgid": self._loading, "done": done, "of": of}
        with self._saying() as peer:
            peer.notify("Progress", progress)

    def _answer(self, request: Asked, method: Callable[..., dict[str, Any]]) -> None:
        """Call a method and send what it returns or raises."""
        error: HonedError
        try:
            result = method(self, **request.params)
        except HonedError as raised:
            error = raised
        except MemoryError:
            error = DeviceError("the worker ran out of memory; remove models or use smaller ones")
        except Exception as raised:  # noqa: BLE001 - a bug in one request must not end the others
            _log.exception("%s failed", request.method)
            error = Internal(f"the worker failed in {request.method} ({raised!r}); its log says more")
        else:
            with self._saying() as peer:
                peer.answer(request.msgid, result)
            return
        with self._saying() as peer:
            peer.refuse(request.msgid, error)

    @contextlib.contextmanager
    def _saying(self) -> Iterator[Peer]:
        """One thread at a time says something, which is then sent."""
        with self._sending:
            yield self._peer
            transport.send(self._socket, self._peer)

    def _hello(self, models: bool, measure_seconds: float | None) -> dict[str, Any]:
        """Find the device and its profile, with peaks where they are known or can be measured in that time.

        Its driver takes memory, so that it stays out of this process until there are `models`. None: it is to
        build only, and needs no peaks.
        """
        device = select(self._spec or None) if models else None
        if device is not None and peaks.known(device, self._cache_dir):
            self._spec, self._found = device.spec, peaks.measured(device, self._cache_dir)
        elif device is not None and measure_seconds is None:
            self._spec, self._found = device.spec, device.profile
        else:
            found = survey(self._spec, self._cache_dir, seconds=measure_seconds)
            if found.no_peaks:
                _log.warning("%s", found.no_peaks)
            self._spec, self._found = found.spec, found.profile
        return {"spec": self._spec, "profile": to_dict(self._found)}

    def _open(self) -> dict[str, Any]:
        """Load the driver of the device that was found, unless it is loaded.

        Raises a HonedError where another device or driver is there now; this process is then to be replaced.
        """
        if self._device is None:
            device = select(self._spec)
            if self._found is None or device.profile.identity != self._found.identity:
                raise DeviceError(f"the driver of {self._spec} has changed")
            self._device = replace(device, profile=self._found)
        return {}

    def _load(self, key: str, path: str) -> dict[str, Any]:
        """Build a compiled file; it may serve once each of its `probes` was checked.

        A DeviceError means that this model cannot be built or held here.
        """
        if key not in self._models:
            if self._device is None:
                raise Internal("the worker has no device yet; this is a fault of the service")
            self._models[key] = load(
                path, self._device, cache_dir=self._cache_dir, builder=self._builder, progress=self._built
            )
            self._checked[key] = {}
        proof = self._models[key].model.proof
        return {"device": self._device_spec(), "probes": len(proof.probes) if proof else 0}

    def _check(self, key: str, probe: int) -> dict[str, Any]:
        """Compare a model's answers on this device with those its file knows to be right, for one probe.

        Raises ModelRefused where they are wrong. Where the device fails while it runs, its state is unknown:
        the result is then "spoilt", and this process must be replaced.
        """
        executor, checked = self._executor(key), self._checked[key]
        if probe not in checked:
            proof = executor.model.proof
            assert proof is not None
            try:
                checked[probe] = check_probe(executor, proof.probes[probe])
            except DeviceError as error:
                return {"spoilt": str(error)}
        wrong = tuple(str(d) for d in checked[probe] if not d.right)
        if wrong:
            raise ModelRefused(
                f"on {self._device_spec()} the model gives wrong answers for inputs whose right outputs "
                "are known, so it is not served; compile it again on this device",
                wrong,
            )
        return {"outputs": _worst(d for found in checked.values() for d in found)}

    def _duel(self, old: str, new: str, turn: int) -> dict[str, Any]:
        """One turn of two models, see `duel.Turns`; turn 0 begins anew."""
        if turn == 0:
            self._turns = Turns(self._executor(old), self._executor(new), self._recorder.of(old, new))
        if self._turns is None:
            raise NotFound("one of the two versions was unloaded while they were compared")
        try:
            ns, wrong = self._turns.turn(turn)
        except DeviceError as error:
            return {"spoilt": str(error)}
        return {"ns": ns, "wrong": wrong, "sets": len(self._turns.sets)}

    def _device_spec(self) -> str:
        return self._device.spec if self._device is not None else ""

    def _unload(self, key: str) -> dict[str, Any]:
        executor = self._models.pop(key, None)
        self._checked.pop(key, None)
        self._recorder.forget(key)
        if executor is not None:
            if self._turns is not None and executor in self._turns.pair:
                self._turns = None
            executor.close()
        return {}

    def _map(self, region: int, offset: int, byte_size: int) -> dict[str, Any]:
        descriptor = self._descriptors.pop(0)
        try:
            self._regions[region] = map_descriptor(descriptor, offset, byte_size)
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"the shared memory cannot be mapped any more ({error}); register a region anew"
            ) from error
        finally:
            os.close(descriptor)
        return {}

    def _ping(self) -> dict[str, Any]:
        """Tell that the serving thread is well."""
        return {}

    def _drop(self, region: int) -> dict[str, Any]:
        self._regions.pop(region, None)
        return {}

    def _infer(
        self, key: str, inputs: list[Any], outputs: list[Any], raw: list[bytes], finite: bool, keep: bool
    ) -> dict[str, Any]:
        """Run once; see `inference.Plan.for_worker` for what the lists hold."""
        start = time.monotonic_ns()
        executor = self._executor(key)
        contents = iter(raw)
        given = {
            name: self._tensor(name, kind, shape, place, contents) for name, kind, shape, place in inputs
        }
        if finite:
            _check_finite(given)
        begun = time.monotonic_ns()
        computed = executor.run(given)
        ended = time.monotonic_ns()
        if keep:
            self._recorder.note(key, given)
        else:
            self._recorder.forget(key)
        inline = []
        for name, place in outputs:
            data = computed[name].reshape(-1).view(np.uint8)
            if place is None:
                inline.append(data.data)
            else:
                self._place(place)[:] = data
        done = time.monotonic_ns()
        return {
            "raw": inline,
            "input_ns": begun - start,
            "infer_ns": ended - begun,
            "output_ns": done - ended,
        }

    def _profile(self, key: str, timeline: bool) -> dict[str, Any]:
        return profile(self._executor(key), timeline=timeline)

    def _executor(self, key: str) -> Executor:
        executor = self._models.get(key)
        if executor is None:
            raise NotFound("the model is not loaded in the worker; this is a fault of the service")
        return executor

    def _tensor(
        self, name: str, kind: str, shape: list[int], place: list[int] | None, contents: Any
    ) -> Array:
        data = next(contents) if place is None else self._place(place)
        array = np.frombuffer(data, dtype(kind).numpy).reshape(shape)
        if kind == "bool":
            values = array.view(np.uint8)
            if place is not None:
                return np.not_equal(values, 0)  # the client can write any byte at any time
            if np.any(values > 1):
                raise InvalidArgument(
                    f"the data of input {name!r} must hold the bytes 0 and 1 only; it is BOOL"
                )
        return array

    def _place(self, place: list[int]) -> Array:
        region, offset, nbytes = place
        return self._regions[region][offset : offset + nbytes]

    _LOADING: dict[str, Callable[..., dict[str, Any]]] = {"Hello": _hello, "Open": _open, "Load": _load}
    _METHODS: dict[str, Callable[..., dict[str, Any]]] = {
        "Check": _check,
        "Duel": _duel,
        "Unload": _unload,
        "Map": _map,
        "Drop": _drop,
        "Ping": _ping,
        "Infer": _infer,
        "Profile": _profile,
    }


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _check_finite(inputs: dict[str, Array]) -> None:
    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidArgument(
                f"input {name!r} holds NaN or infinity; correct it, or do not ask for finite"
            )


def _worst(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    """For each output the largest error over the probes."""
    worst: dict[str, dict[str, Any]] = {}
    for d in differences:
        if d.output not in worst or d.error > worst[d.output]["error"]:
            worst[d.output] = {"name": d.output, "tolerance": d.tolerance, "error": d.error}
    return list(worst.values())


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    connected = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(connected.fileno(), False)
    os.dup2(2, 1)  # drivers print to both; only standard error goes to the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="worker: %(message)s")
    with contextlib.suppress(ConnectionError):  # the service hung up: there is nobody to answer
        Worker(connected, Path(arguments[1]), arguments[2]).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
