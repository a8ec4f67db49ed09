"""The CPU engine's process, which runs ONNX files as they are for the service.

python -m honed.cpu.worker CACHE_DIR THREADS BOUND FD

It answers the service on the socket FD until that closes (`honed.daemon.worker.host`), as the worker of
a device does. A file has one probe, a run on zeros, which shows whether it ends the process.
"""

from __future__ import annotations

import platform
import socket
import sys
import time
from pathlib import Path
from typing import ClassVar

import onnxruntime

from honed.daemon.worker.calls import (
    BuildModel,
    BuiltModel,
    CheckedProbe,
    CheckProbe,
    ComparedTurn,
    FindDevice,
    FoundDevice,
    OpenDevice,
    ProfileModel,
    RunTurn,
    UnloadModel,
)
from honed.daemon.worker.host import Array, Host, connect
from honed.machine.processors import ThreadPlacement
from honed.machine.profile import DeviceIdentity
from honed.process.rpc import by_name
from honed.protocol.errors import NotFound
from honed.protocol.results import Empty, MetSizes, ModelProfile
from honed.runtime.compiled import modelfile

from . import profiling
from .session import Session, prepare

_DEVICE = "ONNX Runtime/CPU"


class CpuEngine(Host):
    """The loaded models by key."""

    def __init__(self, connected: socket.socket, threads: ThreadPlacement, bound: str) -> None:
        super().__init__(connected, bound)
        self._threads = threads
        self._models: dict[str, Session] = {}
        self._sets: tuple[str, list[dict[str, Array]]] = ("", [])  # of the model compared now

    def loaded(self, key: str) -> Session:
        """Return a loaded model; raise NotFound where none has that key."""
        session = self._models.get(key)
        if session is None:
            raise NotFound("the model is not loaded in the CPU engine; this is a fault of the service")
        return session

    def ran(self, key: str, inputs: dict[str, Array], keep: bool) -> tuple[MetSizes, ...]:
        """Nothing is remembered, and whole files have no parts."""
        return ()

    def _find(self, call: FindDevice) -> FoundDevice:
        return FoundDevice(spec=_DEVICE, identity=self._identity(), profile=None)

    def _open(self, call: OpenDevice) -> Empty:
        return Empty()

    def _load(self, call: BuildModel) -> BuiltModel:
        held = self._models.get(call.key)
        if held is None or held.level != call.level:  # the one before answers until this one is there
            self._models[call.key] = Session(Path(call.path), self._threads.threads, level=call.level)
        return BuiltModel(device=_DEVICE, probes=1, interface=self._models[call.key].interface)

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

    def _unload(self, call: UnloadModel) -> Empty:
        self._models.pop(call.key, None)
        self._sets = "", []
        return Empty()

    def _profile(self, call: ProfileModel) -> ModelProfile:
        whole_us, nodes = self.loaded(call.key).profiled(Path(call.path))
        return profiling.told(call.name, whole_us, nodes, self._identity(), timeline=call.timeline)

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
        {CheckProbe: _check, RunTurn: _turn, UnloadModel: _unload, ProfileModel: _profile}
    )


def _probes(compiled: str) -> list[dict[str, Array]]:
    with modelfile.read(compiled) as file:
        sets = map(file.inputs, file.model.probes)
        return [{name: array.copy() for name, array in inputs.items()} for inputs in sets]


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    _, threads, bound, _ = arguments
    connected = connect(arguments)
    CpuEngine(connected, prepare(int(threads)), bound).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
