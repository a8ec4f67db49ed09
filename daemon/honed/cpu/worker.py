"""The CPU engine's process, which runs ONNX files as they are for the service.

python -m honed.cpu.worker FD CACHE_DIR THREADS

It answers the service on the socket FD until that closes (`honed.daemon.hosting`), as the worker of a device
does. A file has one probe, a run on zeros, which shows whether it ends the process.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import onnxruntime

from honed.daemon.hosting import Array, Host, connect
from honed.protocol import strict
from honed.protocol.errors import NotFound, Unimplemented
from honed.runtime import modelfile
from honed.runtime.profile import DeviceIdentity

from .session import Session

_DEVICE = "ONNX Runtime/CPU"


class Worker(Host):
    """The loaded models by key."""

    def __init__(self, connected: socket.socket, threads: int) -> None:
        super().__init__(connected)
        self._threads = threads
        self._models: dict[str, Session] = {}
        self._sets: tuple[str, list[dict[str, Array]]] = ("", [])  # of the model compared now

    def loaded(self, key: str) -> Session:
        """A loaded model; raises NotFound."""
        session = self._models.get(key)
        if session is None:
            raise NotFound("the model is not loaded in the CPU engine; this is a fault of the service")
        return session

    def ran(self, key: str, inputs: dict[str, Array], keep: bool) -> None:
        """Nothing is remembered."""

    def _hello(self, models: bool, measure_seconds: float | None) -> dict[str, Any]:
        identity = DeviceIdentity(
            platform="ONNX Runtime",
            vendor=platform.machine(),
            name="CPU",
            driver_version=onnxruntime.__version__,
            kernel_driver="",
        )
        return {"spec": _DEVICE, "identity": strict.to_plain(identity), "profile": None}

    def _open(self) -> dict[str, Any]:
        return {}

    def _load(self, key: str, path: str) -> dict[str, Any]:
        if key not in self._models:
            self._models[key] = Session(Path(path), self._threads)
        interface = strict.to_plain(self._models[key].interface)
        return {"device": _DEVICE, "probes": 1, "interface": interface}

    def _check(self, key: str, probe: int) -> dict[str, Any]:
        self.loaded(key).try_out()
        return {"outputs": []}

    def _turn(self, key: str, compiled: str, turn: int) -> dict[str, Any]:
        """One run on the inputs of a compiled file's probe, with its time."""
        session = self.loaded(key)
        if self._sets[0] != compiled:
            self._sets = compiled, _probes(compiled)
        sets = self._sets[1]
        if not sets:
            raise NotFound("the compiled file has no inputs to compare engines on")
        inputs = sets[turn % len(sets)]
        begun = time.monotonic_ns()
        session.run(inputs)
        return {"ns": time.monotonic_ns() - begun, "sets": len(sets)}

    def _unload(self, key: str) -> dict[str, Any]:
        self._models.pop(key, None)
        self._sets = "", []
        return {}

    def _profile(self, key: str, timeline: bool) -> dict[str, Any]:
        raise Unimplemented("the CPU engine gives no profile; only compiled models have one")

    LOADING: ClassVar[Mapping[str, Callable[..., dict[str, Any]]]] = {
        "Hello": _hello,
        "Open": _open,
        "Load": _load,
    }
    METHODS: ClassVar[Mapping[str, Callable[..., dict[str, Any]]]] = {
        "Check": _check,
        "Turn": _turn,
        "Unload": _unload,
        "Profile": _profile,
    }


def _probes(compiled: str) -> list[dict[str, Array]]:
    with modelfile.read(compiled) as file:
        proof, tensors = file.model.proof, file.model.inputs
        return [
            {t.name: file.constant(i).copy() for t, i in zip(tensors, probe.inputs, strict=True)}
            for probe in (proof.probes if proof else ())
        ]


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    connected = connect(int(arguments[0]))
    with contextlib.suppress(ConnectionError):  # the service hung up: there is nobody to answer
        Worker(connected, int(arguments[2])).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
