"""Parts of models that the CPU engine runs, in a process of their own: the end that asks.

The process is `honed.cpu.parts`, of the package honed-cpu. It starts with the first model that has parts and
ends with the last one. What an untrusted part does to it is told as a DeviceError.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine.bundle import has_cpu_engine
from honed.machine.children import Bounds, Death, kill_group, python, start
from honed.protocol import strict
from honed.protocol.errors import DeviceError, InvalidArgument
from honed.protocol.params import Data
from honed.protocol.peer import Peer, ResponseReceived
from honed.protocol.wire import PeerFault

from . import transport
from .dtypes import dtype
from .model import CpuPart, PartTensor
from .modelfile import ModelFile
from .partcalls import (
    FRAMES,
    LOAD,
    RUN,
    SHARE,
    UNLOAD,
    LoadPart,
    PartRan,
    RunPart,
    ShareMemory,
    UnloadPart,
    laid_out,
)
from .partlimits import UNLIMITED, PartLimits
from .regions import Region

Array = NDArray[Any]
_MODULE = "honed.cpu.parts"
_SHARED_BYTES = 1 << 16  # in and out of a part; less goes over the socket
_GRACE_SECONDS = 1.0  # for a process whose socket is closed to have ended


class CpuParts:
    """The process, which holds the parts of any number of models. Calls from several threads take turns.

    The process ends with the thread that opened the first model.
    """

    def __init__(self, limits: PartLimits = UNLIMITED) -> None:
        """Nothing runs yet."""
        self._limits = limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._peer = _peer()
        self._next = 0
        self._open = 0
        self._region: Region | None = None  # for tensors, known to the present process

    def open(self, file: ModelFile) -> OpenParts:
        """Load the parts of a model that has some.

        Raises DeviceError where the CPU engine is not there or the process ends, and what it says of a part.
        """
        split = file.model.split
        assert split is not None
        if not has_cpu_engine():
            raise DeviceError(
                "parts of this model run in the CPU engine, which is not installed; install honed-cpu"
            )
        loaded: list[int] = []  # grows, so that what was loaded is let go of where the next is refused
        with self._lock:
            self._open += 1
        opened = OpenParts(self, split.parts, loaded)
        try:
            for part in split.parts:
                loaded += [self._load(file.constant(part.onnx), part)]
        except BaseException:
            opened.close()
            raise
        return opened

    def run(self, number: int, part: CpuPart, inputs: Sequence[Array]) -> list[Array]:
        """The outputs of a loaded part, as it says they are; raises as `OpenParts.run`."""
        given = tuple(
            PartTensor(name=t.name, dtype=t.dtype, shape=a.shape)
            for t, a in zip(part.inputs, inputs, strict=True)
        )
        with self._lock:
            places, room = self._placed(part, inputs)
            call = RunPart(
                part=number,
                inputs=given,
                raw=() if places else tuple(map(_bytes, inputs)),
                places=places,
                room=room,
            )
            ran = strict.from_plain(PartRan, self._call(RUN, call), where=RUN)
            outputs = zip(part.outputs, ran.outputs, strict=True)
            if not ran.places:
                return [_checked(*both, data) for both, data in zip(outputs, ran.raw, strict=True)]
            assert self._region is not None
            whole = self._region.array("uint8", (self._region.nbytes,), 0)
            # The next run takes the same memory.
            return [
                np.array(_checked(*both, whole[at : at + _nbytes(both[1])].data))
                for both, at in zip(outputs, ran.places, strict=True)
            ]

    def unload(self, numbers: Sequence[int]) -> None:
        """Let go of a model's parts; with the last model the process ends."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._end()
            if self._child is None:
                return
            with contextlib.suppress(DeviceError):  # a process that is gone has forgotten them
                for number in numbers:
                    self._call(UNLOAD, UnloadPart(part=number))

    def _placed(self, part: CpuPart, inputs: Sequence[Array]) -> tuple[tuple[int, ...], int]:
        """Put much data into shared memory: where each input is, and where outputs may begin."""
        places, room = laid_out([array.nbytes for array in inputs], 0)
        _, end = laid_out([_nbytes(t) for t in part.outputs if -1 not in t.shape], room)
        if end < _SHARED_BYTES or not inputs:
            return (), 0
        if self._region is None or self._region.nbytes < end:
            self._forget_region()
            region = Region("parts", end)
            try:
                self._call(SHARE, ShareMemory(nbytes=end), [region.descriptor])
            except BaseException:
                region.close()
                raise
            self._region = region
        for place, array in zip(places, inputs, strict=True):
            self._region.array(array.dtype.name, array.shape, place)[...] = array
        return places, room

    def _load(self, data: Array, part: CpuPart) -> int:
        descriptor = os.memfd_create("honed-part", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data.data)
            names = tuple(tensor.name for tensor in part.outputs)
            with self._lock:
                self._next += 1
                number = self._next
                self._call(LOAD, LoadPart(part=number, outputs=names), [descriptor])
        finally:
            os.close(descriptor)
        return number

    def _call(self, method: str, call: object, descriptors: Sequence[int] = ()) -> Any:
        """The answer; whoever calls this holds the lock."""
        connected = self._connected()
        try:
            self._peer.call(method, strict.to_plain(call), descriptors)
            transport.send(connected, self._peer)
            return self._answer(connected)
        except (OSError, PeerFault) as error:
            raise self._lost() from error

    def _answer(self, connected: socket.socket) -> Any:
        while transport.receive(connected, self._peer):
            while (event := self._peer.next_event()) is not None:
                if isinstance(event, ResponseReceived):
                    if event.error is not None:
                        raise event.error
                    return event.result
        raise self._lost()

    def _connected(self) -> socket.socket:
        """The way to the process, which is started where there is none."""
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                command = python(_MODULE, str(theirs.fileno()), str(self._limits.threads))
                bounds = Bounds(memory_mib=self._limits.memory_mib)
                try:
                    self._child = start(command, bounds, pass_fds=[theirs.fileno()])
                except OSError as error:
                    ours.close()
                    raise DeviceError(f"the CPU engine cannot be started: {error}") from error
            self._socket, self._peer = ours, _peer()
        return self._socket

    def _lost(self) -> DeviceError:
        """The process has ended, or says what it should not, and is ended."""
        child = self._child
        assert child is not None
        try:
            child.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_group(child.pid)
        death = Death(status=child.wait())
        self._end()
        return DeviceError(f"the CPU engine's process for parts of the model is gone: {death}")

    def _forget_region(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.close()

    def _end(self) -> None:
        self._forget_region()
        child, connected, self._child, self._socket = self._child, self._socket, None, None
        self._peer.close()
        if connected is not None:
            connected.close()
        if child is not None:
            kill_group(child.pid)
            child.wait()


class OpenParts:
    """The parts of one model."""

    def __init__(self, process: CpuParts, parts: Sequence[CpuPart], numbers: Sequence[int]) -> None:
        self._process = process
        self._parts = parts
        self._numbers = numbers
        self._closed = False

    def run(self, index: int, inputs: Sequence[Array]) -> list[Array]:
        """Run a part on inputs of its shapes, and of types that can be cast to its own.

        Raises InvalidArgument where it cannot be run on these inputs, DeviceError where its process ended.
        """
        part = self._parts[index]
        given = [
            np.asarray(array, dtype(tensor.dtype).numpy, order="C")
            for tensor, array in zip(part.inputs, inputs, strict=True)
        ]
        return self._process.run(self._numbers[index], part, given)

    def close(self) -> None:
        """Let go of them."""
        if not self._closed:
            self._closed = True
            self._process.unload(self._numbers)

    def __enter__(self) -> OpenParts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def named(part: CpuPart, *given: Mapping[str, Array]) -> list[Array]:
    """The inputs of a part out of values by name."""
    return [next(values[t.name] for values in given if t.name in values) for t in part.inputs]


def _peer() -> Peer:
    return Peer(serves=False, receiving=FRAMES, sending=FRAMES)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _nbytes(tensor: PartTensor) -> int:
    return math.prod(tensor.shape) * dtype(tensor.dtype).itemsize


def _checked(wanted: PartTensor, given: PartTensor, data: Data) -> Array:
    """An output as the part's header has it; raises InvalidArgument for one of another type or shape."""
    fits = len(wanted.shape) == len(given.shape) and all(
        size in (-1, found) for size, found in zip(wanted.shape, given.shape, strict=True)
    )
    if wanted.dtype != given.dtype or not fits:
        raise InvalidArgument(
            f"a part of the model gave {given.name!r} as {given.dtype}{list(given.shape)} instead of "
            f"{wanted.dtype}{list(wanted.shape)}; add the model with engine cpu"
        )
    return np.frombuffer(data, dtype(given.dtype).numpy).reshape(given.shape)
