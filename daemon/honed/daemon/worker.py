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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol import strict
from honed.protocol.arrivals import close_all
from honed.protocol.errors import (
    DeviceError,
    HonedError,
    Internal,
    InvalidArgument,
    ModelRefused,
    NotFound,
)
from honed.protocol.params import Data
from honed.protocol.peer import Peer, RequestReceived
from honed.protocol.results import ComparedOutput, Empty, ModelProfile
from honed.protocol.wire import FrameLimits
from honed.runtime import peaks, transport
from honed.runtime.devices import Device, select
from honed.runtime.dtypes import dtype
from honed.runtime.executor import Executor, load
from honed.runtime.profile import DeviceProfile
from honed.runtime.proof import Difference, check_probe
from honed.runtime.regions import map_descriptor
from honed.runtime.surveying import survey

from .comparison import Comparison, Recorder
from .profiling import profile
from .workercalls import (
    BuildModel,
    BuiltModel,
    CheckedProbe,
    CheckProbe,
    ComparedTurn,
    CompareTurn,
    DropRegion,
    FindDevice,
    FoundDevice,
    GivenInput,
    MapRegion,
    ModelRan,
    OpenDevice,
    Ping,
    ProfileModel,
    RegionSlice,
    RunModel,
    UnloadModel,
    WorkerCall,
)

Array = NDArray[Any]
_FRAMES = FrameLimits(max_bytes=1 << 30)  # the service is trusted, and bounds what it sends
_log = logging.getLogger(__name__)
_Method = tuple[type[WorkerCall[Any]], Callable[["Worker", Any], object]]


def _by_name(handlers: Mapping[type[WorkerCall[Any]], Callable[[Worker, Any], object]]) -> dict[str, _Method]:
    """What answers each call, by the name that travels."""
    return {call.method: (call, handler) for call, handler in handlers.items()}


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
        self._comparison: Comparison | None = None
        self._regions: dict[int, Array] = {}
        self._peer = Peer(serves=True, receiving=_FRAMES, sending=_FRAMES)
        self._descriptors: list[int] = []  # of the request being answered
        self._sending = threading.Lock()
        self._loads: queue.SimpleQueue[RequestReceived] = queue.SimpleQueue()
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
                    case RequestReceived(method=method) if method in self._LOADING:
                        self._loads.put(event)
                    case RequestReceived(method=method):
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

    def _answer(self, request: RequestReceived, method: _Method) -> None:
        """Call a method and send what it returns or raises."""
        kind, handler = method
        error: HonedError
        try:
            call = strict.from_plain(kind, request.params, where=request.method)
            result = strict.to_plain(handler(self, call))
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

    def _find(self, call: FindDevice) -> FoundDevice:
        device = select(self._spec or None) if call.models else None
        if device is not None and peaks.known(device, self._cache_dir):
            self._spec, self._found = device.spec, peaks.measured(device, self._cache_dir)
        elif device is not None and call.measure_seconds is None:
            self._spec, self._found = device.spec, device.profile
        else:
            found = survey(self._spec, self._cache_dir, seconds=call.measure_seconds)
            if found.no_peaks:
                _log.warning("%s", found.no_peaks)
            self._spec, self._found = found.spec, found.profile
        return FoundDevice(spec=self._spec, profile=self._found)

    def _open(self, call: OpenDevice) -> Empty:
        """Raises a HonedError where another device or driver is there now: this process is to be replaced."""
        if self._device is None:
            device = select(self._spec)
            if self._found is None or device.profile.identity != self._found.identity:
                raise DeviceError(f"the driver of {self._spec} has changed")
            self._device = replace(device, profile=self._found)
        return Empty()

    def _load(self, call: BuildModel) -> BuiltModel:
        """It may serve once each of its probes was checked.

        A DeviceError means that this model cannot be built or held here.
        """
        key = call.key
        if key not in self._models:
            if self._device is None:
                raise Internal("the worker has no device yet; this is a fault of the service")
            self._models[key] = load(
                call.path,
                self._device,
                cache_dir=self._cache_dir,
                builder=self._builder,
                progress=self._built,
            )
            self._checked[key] = {}
        proof = self._models[key].model.proof
        return BuiltModel(device=self._device_spec(), probes=len(proof.probes) if proof else 0)

    def _check(self, call: CheckProbe) -> CheckedProbe:
        """Raises ModelRefused where an answer is wrong.

        Where the device fails while it runs, its state is unknown: the result is then spoilt, and this
        process must be replaced.
        """
        executor, checked, probe = self._executor(call.key), self._checked[call.key], call.probe
        if probe not in checked:
            proof = executor.model.proof
            assert proof is not None
            try:
                checked[probe] = check_probe(executor, proof.probes[probe])
            except DeviceError as error:
                return CheckedProbe(spoilt=str(error))
        wrong = tuple(str(d) for d in checked[probe] if not d.right)
        if wrong:
            raise ModelRefused(
                f"on {self._device_spec()} the model gives wrong answers for inputs whose right outputs "
                "are known, so it is not served; compile it again on this device",
                wrong,
            )
        return CheckedProbe(outputs=_worst(d for found in checked.values() for d in found))

    def _compare(self, call: CompareTurn) -> ComparedTurn:
        """One turn of two models, see `comparison.Comparison`."""
        if call.turn == 0:
            pair = (self._executor(call.old), self._executor(call.new))
            self._comparison = Comparison(*pair, self._recorder.of(call.old, call.new))
        if self._comparison is None:
            raise NotFound("one of the two versions was unloaded while they were compared")
        try:
            ns, wrong = self._comparison.turn(call.turn)
        except DeviceError as error:
            return ComparedTurn(spoilt=str(error))
        return ComparedTurn(ns=ns, wrong=wrong, sets=len(self._comparison.sets))

    def _device_spec(self) -> str:
        return self._device.spec if self._device is not None else ""

    def _unload(self, call: UnloadModel) -> Empty:
        executor = self._models.pop(call.key, None)
        self._checked.pop(call.key, None)
        self._recorder.forget(call.key)
        if executor is not None:
            if self._comparison is not None and executor in self._comparison.pair:
                self._comparison = None
            executor.close()
        return Empty()

    def _map(self, call: MapRegion) -> Empty:
        descriptor = self._descriptors.pop(0)
        try:
            self._regions[call.region] = map_descriptor(descriptor, call.offset, call.byte_size)
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"the shared memory cannot be mapped any more ({error}); register a region anew"
            ) from error
        finally:
            os.close(descriptor)
        return Empty()

    def _ping(self, call: Ping) -> Empty:
        return Empty()

    def _drop(self, call: DropRegion) -> Empty:
        self._regions.pop(call.region, None)
        return Empty()

    def _infer(self, call: RunModel) -> ModelRan:
        start = time.monotonic_ns()
        executor = self._executor(call.key)
        contents = iter(call.raw)
        given = {tensor.name: self._tensor(tensor, contents) for tensor in call.inputs}
        if call.finite:
            _check_finite(given)
        begun = time.monotonic_ns()
        computed = executor.run(given)
        ended = time.monotonic_ns()
        if call.keep:
            self._recorder.note(call.key, given)
        else:
            self._recorder.forget(call.key)
        inline = []
        for output in call.outputs:
            data = computed[output.name].reshape(-1).view(np.uint8)
            if output.place is None:
                inline.append(data.data)
            else:
                self._place(output.place)[:] = data
        done = time.monotonic_ns()
        return ModelRan(
            raw=tuple(inline), input_ns=begun - start, infer_ns=ended - begun, output_ns=done - ended
        )

    def _profile(self, call: ProfileModel) -> ModelProfile:
        return profile(self._executor(call.key), call.name, timeline=call.timeline)

    def _executor(self, key: str) -> Executor:
        executor = self._models.get(key)
        if executor is None:
            raise NotFound("the model is not loaded in the worker; this is a fault of the service")
        return executor

    def _tensor(self, given: GivenInput, contents: Iterator[Data]) -> Array:
        data = next(contents) if given.place is None else self._place(given.place)
        array = np.frombuffer(data, dtype(given.dtype).numpy).reshape(given.shape)
        if given.dtype == "bool":
            values = array.view(np.uint8)
            if given.place is not None:
                return np.not_equal(values, 0)  # the client can write any byte at any time
            if np.any(values > 1):
                raise InvalidArgument(
                    f"the data of input {given.name!r} must hold the bytes 0 and 1 only; it is BOOL"
                )
        return array

    def _place(self, place: RegionSlice) -> Array:
        return self._regions[place.region][place.offset : place.offset + place.nbytes]

    _LOADING = _by_name({FindDevice: _find, OpenDevice: _open, BuildModel: _load})
    _METHODS = _by_name(
        {
            CheckProbe: _check,
            CompareTurn: _compare,
            UnloadModel: _unload,
            MapRegion: _map,
            DropRegion: _drop,
            Ping: _ping,
            RunModel: _infer,
            ProfileModel: _profile,
        }
    )


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _check_finite(inputs: dict[str, Array]) -> None:
    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidArgument(
                f"input {name!r} holds NaN or infinity; correct it, or do not ask for finite"
            )


def _worst(differences: Iterable[Difference]) -> tuple[ComparedOutput, ...]:
    """For each output the largest error over the probes."""
    worst: dict[str, Difference] = {}
    for d in differences:
        if d.output not in worst or d.error > worst[d.output].error:
            worst[d.output] = d
    return tuple(ComparedOutput(name=d.output, tolerance=d.tolerance, error=d.error) for d in worst.values())


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
