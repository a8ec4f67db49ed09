"""The CPU engine's process for parts of models whose rest is compiled; whoever runs the rest starts it.

python -m honed.cpu.parts FD THREADS

It answers on the socket FD until that closes (`honed.runtime.execution.partcalls`). Parts are as untrusted
as models.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from honed.daemon.worker.host import Array, connect
from honed.protocol import streams, strict
from honed.protocol.errors import DeviceError, HonedError, Internal, NotFound
from honed.protocol.params import Data
from honed.protocol.peer import Peer, RequestReceived
from honed.protocol.results import Empty
from honed.protocol.wire import close_all
from honed.runtime.calling.shared_memory import map_descriptor
from honed.runtime.compiled.model import PartTensor
from honed.runtime.compiled.parts import covers, met_sizes
from honed.runtime.dtypes import dtype
from honed.runtime.execution.partcalls import (
    FRAMES,
    LoadPart,
    PartCall,
    PartsRan,
    RunParts,
    ShareMemory,
    UnloadPart,
    laid_out,
)

from .session import Session, spare_stacks


class Parts:
    """The loaded parts by number."""

    def __init__(self, connected: socket.socket, threads: int) -> None:
        self._socket = connected
        self._threads = threads
        self._peer = Peer(serves=True, receiving=FRAMES, sending=FRAMES)
        self._parts: dict[int, tuple[Session, tuple[PartTensor, ...]]] = {}
        self._memory: Array = np.empty(0, np.uint8)  # shared

    def serve(self) -> None:
        """Answer until the other end hangs up."""
        while streams.receive(self._socket, self._peer):
            while (event := self._peer.next_event()) is not None:
                if isinstance(event, RequestReceived):
                    self._answer(event)
                    close_all(event.descriptors)
                    streams.send(self._socket, self._peer)

    def _answer(self, request: RequestReceived) -> None:
        try:
            kind, answer = _ANSWERS[request.method]
            call = strict.from_plain(kind, request.params, where=request.method)
            result = strict.to_plain(answer(self, call, request.descriptors))
        except HonedError as error:
            self._peer.refuse(request.msgid, error)
        except MemoryError:
            told = DeviceError("the CPU engine ran out of memory in a part of the model")
            self._peer.refuse(request.msgid, told)
        except Exception as raised:  # noqa: BLE001 - a bug in one call must not end the others
            self._peer.refuse(request.msgid, Internal(f"a part of the model failed: {raised!r}"))
        else:
            self._peer.answer(request.msgid, result)

    def _load(self, call: LoadPart, descriptors: Sequence[int]) -> Empty:
        file = Path(f"/proc/self/fd/{descriptors[0]}")
        self._parts[call.part] = Session(file, self._threads, level=call.level, alone=True), call.inputs
        return Empty()

    def _share(self, call: ShareMemory, descriptors: Sequence[int]) -> Empty:
        self._memory = map_descriptor(descriptors[0], 0, call.nbytes)
        return Empty()

    def _unload(self, call: UnloadPart, _: Sequence[int]) -> Empty:
        self._parts.pop(call.part, None)
        return Empty()

    def _run(self, call: RunParts, _: Sequence[int]) -> PartsRan:
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
            sizes.append(met_sizes(takes, [array.shape for array in given.values()]))
            if any(s.part == number and covers(s.sizes, s.least, sizes[-1]) for s in call.stops):
                break
            began = time.perf_counter_ns()
            found = session.run(given)
            ns += time.perf_counter_ns() - began
            made |= found
            values |= found
            done += 1
        needed = {t.name for number in call.parts[done:] for t in self._parts[number][1]}.union(call.wanted)
        return self._answered(call, done, ns, sizes, {n: array for n, array in made.items() if n in needed})

    def _answered(
        self,
        call: RunParts,
        done: int,
        ns: int,
        sizes: Sequence[tuple[int, ...]],
        found: Mapping[str, Array],
    ) -> PartsRan:
        outputs = tuple(
            PartTensor(name=name, dtype=array.dtype.name, shape=array.shape) for name, array in found.items()
        )
        raw = tuple(array.reshape(-1).view(np.uint8) for array in found.values())
        places, end = laid_out([each.size for each in raw], call.room)
        ran = PartsRan(done=done, ns=ns, sizes=tuple(sizes), outputs=outputs)
        if not call.places or end > self._memory.size:
            ran.raw = tuple(each.data for each in raw)
            return ran
        for place, each in zip(places, raw, strict=True):
            self._memory[place : place + each.size] = each
        ran.places = places
        return ran


_ANSWERS: Mapping[str, tuple[type[PartCall], Callable[..., object]]] = {
    LoadPart.method: (LoadPart, Parts._load),
    RunParts.method: (RunParts, Parts._run),
    UnloadPart.method: (UnloadPart, Parts._unload),
    ShareMemory.method: (ShareMemory, Parts._share),
}


def _array(tensor: PartTensor, data: Data) -> Array:
    kind = dtype(tensor.dtype).numpy
    return np.frombuffer(data, kind, math.prod(tensor.shape)).reshape(tensor.shape)


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    connected = connect(int(arguments[0]))
    spare_stacks()
    with contextlib.suppress(ConnectionError):  # the other end hung up: there is nobody to answer
        Parts(connected, int(arguments[1])).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
