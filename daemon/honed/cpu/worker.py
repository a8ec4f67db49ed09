"""The CPU engine's process, which runs ONNX files as they are for the service.

python -m honed.cpu.worker CACHE_DIR THREADS BOUND FD

It answers the service on the socket FD until that closes (`honed.daemon.worker.host`), as the worker of
a device does. A file has one probe, a run on zeros, which shows whether it ends the process.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import onnxruntime

from honed.daemon.worker.calls import (
    BuildModel,
    BuiltModel,
    CheckedProbe,
    CheckProbe,
    ComparedTurn,
    DropSequences,
    FindDevice,
    FoundDevice,
    OpenDevice,
    ProfileModel,
    RunStep,
    RunTurn,
    SetSequence,
    UnloadModel,
    WarmUp,
)
from honed.daemon.worker.host import Array, Host, Stepped, connect
from honed.daemon.worker.turns import CallUnderWay
from honed.machine.processors import ThreadPlacement
from honed.machine.profile import DeviceIdentity
from honed.process.rpc import by_name
from honed.protocol.errors import NotFound
from honed.protocol.peer import RequestReceived
from honed.protocol.results import Empty, ModelProfile, ObservedSizes, SessionAsked
from honed.runtime.compiled import modelfile

from . import profiling
from .session import Session, prepare, running_now
from .steps import HeldSequences

_DEVICE = "ONNX Runtime/CPU"
_TIMED = frozenset(each.method for each in (RunTurn, WarmUp, ProfileModel))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A session, what was asked for, and its processors, () where all are alike."""

    session: Session
    asked: SessionAsked
    processors: tuple[int, ...]


class _Here(threading.local):
    """The processors on which this thread runs, () where all are alike or it was not moved yet."""

    processors: tuple[int, ...] = ()


class CpuEngine(Host):
    """The loaded models by key.

    Those that are to have more threads than others run on `all_processors`. With `fixed`, all models have
    `threads`, whatever is asked for.
    """

    def __init__(
        self,
        connected: socket.socket,
        threads: ThreadPlacement,
        bound: str,
        all_processors: tuple[int, ...] = (),
        *,
        fixed: bool = False,
    ) -> None:
        super().__init__(connected, bound)
        self._threads = threads
        self._all_processors = all_processors
        self._fixed = fixed
        self._here = _Here()
        self._models: dict[str, _Loaded] = {}
        self._sequences = HeldSequences()
        self._sets: tuple[str, list[dict[str, Array]]] = ("", [])  # of the model compared now

    def loaded(self, key: str) -> Session:
        """Return a loaded model; raise NotFound where none has that key."""
        held = self._models.get(key)
        if held is None:
            raise NotFound("the model is not loaded in the CPU engine; this is a fault of the service")
        if held.processors != self._here.processors:
            self._move(held.processors)
        return held.session

    def _move(self, where: tuple[int, ...]) -> None:
        """Have this thread run on these processors, and the threads that it starts."""
        os.sched_setaffinity(0, where)
        self._here.processors = where

    def begin_call(self, call: CallUnderWay) -> None:
        """Have ONNX Runtime end what it runs for the call when nobody waits for that any more."""
        running_now.options = options = onnxruntime.RunOptions()
        call.ends_by(partial(setattr, options, "terminate", True))

    def beside(self, call: RequestReceived, other: RequestReceived) -> bool:
        """Return whether a call may begin while another one that takes long runs: not where that is timed."""
        return other.method not in _TIMED

    def ran(self, key: str, inputs: dict[str, Array], keep: bool) -> tuple[ObservedSizes, ...]:
        """Nothing is remembered, and whole files have no parts."""
        return ()

    def lowered(self, key: str) -> str:
        """Return once what ONNX Runtime said to an optimised form that is not run any more, else ""."""
        session = self._models[key].session
        said, session.lowered = session.lowered, ""
        return said

    def _find(self, call: FindDevice) -> FoundDevice:
        return FoundDevice(spec=_DEVICE, identity=self._identity(), profile=None)

    def _open(self, call: OpenDevice) -> Empty:
        return Empty()

    def _load(self, call: BuildModel) -> BuiltModel:
        held, threads = self._models.get(call.key), self._threads.threads
        if call.threads and not self._fixed:
            threads = call.threads
        asked = SessionAsked(call.level, threads, call.spinning, call.arena, call.half)
        if held is None or held.asked != asked:  # the one before answers until this one is there
            where = self._threads.processors
            if where:
                where = where if threads <= self._threads.threads else self._all_processors
                self._move(where)
            session = Session(
                Path(call.path), threads, level=call.level, spinning=call.spinning, arena=call.arena
            )
            self._models[call.key] = held = _Loaded(session, asked, where)
        return BuiltModel(device=_DEVICE, probes=1, interface=held.session.interface)

    def _check(self, call: CheckProbe) -> CheckedProbe:
        self.loaded(call.key).try_out()
        return CheckedProbe()

    def _turn(self, call: RunTurn) -> ComparedTurn:
        session = self.loaded(call.key)
        if self._sets[0] != call.compiled:
            self._sets = call.compiled, _probes(call.compiled)
        sets = self._sets[1]
        if not sets:
            raise NotFound("the compiled file has no inputs to compare engines on")
        inputs = sets[call.turn % len(sets)]
        begun = time.monotonic_ns()
        session.run(inputs)
        return ComparedTurn(ns=time.monotonic_ns() - begun, sets=len(sets))

    def stepped(self, call: RunStep, inputs: dict[str, Array]) -> Stepped:
        """Run a step of a sequence whose state ONNX Runtime holds."""
        return self._sequences.step(self.loaded(call.run.key), call, inputs)

    def rows_of(self, sequence: int, rows: int) -> Mapping[str, Array]:
        """Return the first rows of a sequence."""
        return self._sequences.state(sequence, rows)

    def set_sequence(self, call: SetSequence, values: Mapping[str, Array]) -> None:
        """Hold rows that were computed elsewhere."""
        self._sequences.set(call, values)

    def drop_sequences(self, call: DropSequences) -> Empty:
        """Let go of sequences."""
        self._sequences.drop(call.sequences)
        return Empty()

    def _unload(self, call: UnloadModel) -> Empty:
        self._models.pop(call.key, None)
        self._sets = "", []
        return Empty()

    def _profile(self, call: ProfileModel) -> ModelProfile:
        whole_us, nodes = self.loaded(call.key).profiled(Path(call.path))
        return profiling.result(call.name, whole_us, nodes, self._identity(), timeline=call.timeline)

    def _identity(self) -> DeviceIdentity:
        return DeviceIdentity(
            platform="ONNX Runtime",
            vendor=platform.machine(),
            # Times of both engines are taken again when it changes.
            name=f"CPU, {self._threads}" if self._threads.processors else "CPU",
            driver_version=onnxruntime.__version__,
            kernel_driver="",
        )

    LOADING: ClassVar = by_name({FindDevice: _find, OpenDevice: _open, BuildModel: _load})
    METHODS: ClassVar = Host.METHODS | by_name(
        {
            CheckProbe: _check,
            RunTurn: _turn,
            UnloadModel: _unload,
            ProfileModel: _profile,
        }
    )


def _probes(compiled: str) -> list[dict[str, Array]]:
    with modelfile.read(compiled) as file:
        sets = map(file.inputs, file.model.probes)
        return [{name: array.copy() for name, array in inputs.items()} for inputs in sets]


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    _, threads, bound, _ = arguments
    connected = connect(arguments)
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    CpuEngine(connected, prepare(int(threads)), bound, everywhere, fixed=threads != "0").serve()


if __name__ == "__main__":
    main(sys.argv[1:])
