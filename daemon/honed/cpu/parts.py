"""Runs CPU partitions of models in a process, which the worker that runs their compiled partitions starts.

python -m honed.cpu.parts THREADS FD

It answers on the socket FD until that closes (`honed.runtime.execution.cpuparts`). Partitions are as
untrusted as models.
"""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from honed.daemon.worker.host import Array, connect
from honed.process.rpc import RpcServer, by_name
from honed.protocol.errors import DeviceError, HonedError, Internal, NotFound
from honed.protocol.values import Data
from honed.runtime.calling.shared_memory import map_descriptor
from honed.runtime.compiled.model import PartitionTensor
from honed.runtime.compiled.parts import covers, observed_sizes
from honed.runtime.dtypes import dtype
from honed.runtime.execution.cpuparts import (
    FRAMES,
    LoadPart,
    PartitionsResult,
    RunParts,
    ShareMemory,
    UnloadPart,
    lay_out,
)

from .session import Session, prepare


class Parts(RpcServer):
    """A server that runs the loaded partitions, by number."""

    def __init__(self, connected: socket.socket, threads: int) -> None:
        super().__init__(connected, FRAMES)
        self._threads = threads
        self._parts: dict[int, tuple[Session, tuple[PartitionTensor, ...]]] = {}
        self._memory: Array = np.empty(0, np.uint8)  # Memory shared with the worker

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Return the error to answer for an exception; a bug in a call must not end the others."""
        if isinstance(raised, HonedError):
            return raised
        if isinstance(raised, MemoryError):
            return DeviceError("the CPU engine ran out of memory in a part of the model")
        return Internal(f"a part of the model failed: {raised!r}")

    def _load(self, call: LoadPart) -> None:
        file = Path(f"/proc/self/fd/{self.descriptors[0]}")
        self._parts[call.part] = Session(file, self._threads, level=call.level, alone=True), call.inputs

    def _share(self, call: ShareMemory) -> None:
        self._memory = map_descriptor(self.descriptors[0], 0, call.nbytes)

    def _unload(self, call: UnloadPart) -> None:
        self._parts.pop(call.part, None)

    def _run(self, call: RunParts) -> PartitionsResult:
        if not self._parts.keys() >= set(call.parts):
            raise NotFound("a part is not loaded; this is a fault of honed")
        data: Sequence[Data] = call.raw
        if call.places:
            data = [self._memory[place:].data for place in call.places]
        values = {given.name: _array(given, held) for given, held in zip(call.inputs, data, strict=True)}
        made: dict[str, Array] = {}
        sizes: list[tuple[int, ...]] = []
        done = ns = 0
        for number in call.parts:
            session, takes = self._parts[number]
            given = {tensor.name: values[tensor.name] for tensor in takes}
            sizes.append(observed_sizes(takes, [array.shape for array in given.values()]))
            if any(s.part == number and covers(s.sizes, s.least, sizes[-1]) for s in call.stops):
                break
            began = time.perf_counter_ns()
            found = session.run(given)
            ns += time.perf_counter_ns() - began
            made |= found
            values |= found
            done += 1
        needed = {t.name for number in call.parts[done:] for t in self._parts[number][1]}.union(call.wanted)
        return self._build_result(
            call, done, ns, sizes, {n: array for n, array in made.items() if n in needed}
        )

    def _build_result(
        self,
        call: RunParts,
        done: int,
        ns: int,
        sizes: Sequence[tuple[int, ...]],
        computed: Mapping[str, Array],
    ) -> PartitionsResult:
        outputs = tuple(
            PartitionTensor(name=name, dtype=array.dtype.name, shape=array.shape)
            for name, array in computed.items()
        )
        raw = tuple(array.reshape(-1).view(np.uint8) for array in computed.values())
        places, end = lay_out([each.size for each in raw], call.room)
        ran = PartitionsResult(done=done, ns=ns, sizes=tuple(sizes), outputs=outputs)
        if not call.places or end > self._memory.size:
            ran.raw = tuple(each.data for each in raw)
            return ran
        for place, each in zip(places, raw, strict=True):
            self._memory[place : place + each.size] = each
        ran.places = places
        return ran

    METHODS = by_name({LoadPart: _load, RunParts: _run, UnloadPart: _unload, ShareMemory: _share})


def _array(tensor: PartitionTensor, data: Data) -> Array:
    kind = dtype(tensor.dtype).numpy
    return np.frombuffer(data, kind, math.prod(tensor.shape)).reshape(tensor.shape)


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    connected = connect(arguments)
    Parts(connected, prepare(int(arguments[0])).threads).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
