"""The serving worker: a child process that owns the device and runs what the service passes to it.

python -m honed.daemon.worker FD CACHE_DIR DEVICE_SPEC

It answers the service on the socket FD until that closes (`hosting`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from honed.protocol import strict
from honed.protocol.errors import DeviceError, Internal, ModelRefused, NotFound
from honed.runtime import peaks
from honed.runtime.devices import Device, select
from honed.runtime.executor import Executor, load
from honed.runtime.profile import DeviceProfile
from honed.runtime.profilefile import to_dict
from honed.runtime.proof import Difference, check_probe
from honed.runtime.surveying import survey

from .duel import Recorder, Turns
from .hosting import Array, Host, connect
from .profiling import profile

_log = logging.getLogger(__name__)


class Worker(Host):
    """The device, and the loaded models by key."""

    def __init__(self, connected: socket.socket, cache_dir: Path, spec: str) -> None:
        super().__init__(connected)
        self._cache_dir = cache_dir
        self._spec = spec
        self._found: DeviceProfile | None = None
        self._device: Device | None = None  # from the first model on
        self._models: dict[str, Executor] = {}
        self._checked: dict[str, dict[int, tuple[Difference, ...]]] = {}  # by key and probe
        self._recorder = Recorder()
        self._turns: Turns | None = None
        # Building kernels takes processor time from inferences; a thread has a niceness of its own in Linux.
        # Only this one has: one that runs Python would hold the interpreter's lock while it waits its turn.
        self._builder = ThreadPoolExecutor(1, "builder", initializer=_be_nice)

    def loaded(self, key: str) -> Executor:
        """A loaded model; raises NotFound."""
        executor = self._models.get(key)
        if executor is None:
            raise NotFound("the model is not loaded in the worker; this is a fault of the service")
        return executor

    def ran(self, key: str, inputs: dict[str, Array], keep: bool) -> None:
        """Keep a client's inputs, to compare a successor on."""
        if keep:
            self._recorder.note(key, inputs)
        else:
            self._recorder.forget(key)

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
        return {
            "spec": self._spec,
            "identity": strict.to_plain(self._found.identity),
            "profile": to_dict(self._found),
        }

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
                path, self._device, cache_dir=self._cache_dir, builder=self._builder, progress=self.built
            )
            self._checked[key] = {}
        proof = self._models[key].model.proof
        return {"device": self._device_spec(), "probes": len(proof.probes) if proof else 0}

    def _check(self, key: str, probe: int) -> dict[str, Any]:
        """Compare a model's answers on this device with those its file knows to be right, for one probe.

        Raises ModelRefused where they are wrong. Where the device fails while it runs, its state is unknown:
        the result is then "spoilt", and this process must be replaced.
        """
        executor, checked = self.loaded(key), self._checked[key]
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
            self._turns = Turns(self.loaded(old), self.loaded(new), self._recorder.of(old, new))
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

    def _profile(self, key: str, timeline: bool) -> dict[str, Any]:
        return profile(self.loaded(key), timeline=timeline)

    LOADING: ClassVar[Mapping[str, Callable[..., dict[str, Any]]]] = {
        "Hello": _hello,
        "Open": _open,
        "Load": _load,
    }
    METHODS: ClassVar[Mapping[str, Callable[..., dict[str, Any]]]] = {
        "Check": _check,
        "Duel": _duel,
        "Unload": _unload,
        "Profile": _profile,
    }


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _worst(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    """For each output the largest error over the probes."""
    worst: dict[str, dict[str, Any]] = {}
    for d in differences:
        if d.output not in worst or d.error > worst[d.output]["error"]:
            worst[d.output] = {"name": d.output, "tolerance": d.tolerance, "error": d.error}
    return list(worst.values())


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    connected = connect(int(arguments[0]))
    with contextlib.suppress(ConnectionError):  # the service hung up: there is nobody to answer
        Worker(connected, Path(arguments[1]), arguments[2]).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
