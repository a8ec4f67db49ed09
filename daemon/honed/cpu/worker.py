"""Runs ONNX files by ONNX Runtime for the service, as the process of a CPU engine.

python -m honed.cpu.worker CACHE_DIR THREADS BOUND FD

It answers the service on the socket FD until that closes (`honed.daemon.worker.host`), as the worker of
a device does. A file has one probe, a run on zeros, which shows whether it crashes the process.
"""

from __future__ import annotations

import logging
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import onnxruntime

from honed.daemon.worker.calls import (
    BuildModel,
    BuiltModel,
    CheckedProbe,
    CheckProbe,
    ComparisonRun,
    FindDevice,
    FoundDevice,
    OpenDevice,
    ProfileModel,
    RunOnProbe,
    RunStep,
    UnloadModel,
    WarmUp,
    WorkerCall,
)
from honed.daemon.worker.host import Array, Host, Stepped, connect
from honed.daemon.worker.turns import CallUnderWay
from honed.machine.processors import ThreadPlacement
from honed.machine.profile import DeviceIdentity
from honed.process.limits import give_back_freed
from honed.process.rpc import Method, by_name
from honed.protocol.errors import NotFound, NotLoaded
from honed.protocol.peer import RequestReceived
from honed.protocol.values import Empty, ModelProfile, ObservedSizes, OrtSessionConfig
from honed.runtime.compiled import modelfile

from . import profiling
from .session import Session, prepare, running_now
from .steps import CpuSequences

_DEVICE = "ONNX Runtime/CPU"
_log = logging.getLogger(__name__)
_TIMED = frozenset(each.method for each in (RunOnProbe, WarmUp, ProfileModel))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A session, and the configuration it was loaded with."""

    session: Session
    asked: OrtSessionConfig


def _with_room(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Return methods that, if memory runs out, evict other models and try again."""

    def with_retry(handler: Callable[..., object]) -> Callable[..., object]:
        def answer(engine: CpuEngine, call: WorkerCall[Any]) -> object:
            try:
                return handler(engine, call)
            except MemoryError:
                if not engine.make_room(_key_of(call)):
                    raise
            return handler(engine, call)

        return answer

    return {name: (kind, with_retry(handler)) for name, (kind, handler) in methods.items()}


def _key_of(call: WorkerCall[Any]) -> str:
    """Return the key of the model that a call runs; "" for a load, which also evicts its old session."""
    if isinstance(call, BuildModel):
        return ""
    return call.run.key if isinstance(call, RunStep) else getattr(call, "key", "")


class CpuEngine(Host):
    """The host of ONNX Runtime, with the loaded models by key.

    If memory runs out in a call, all other models are evicted and the call is repeated; the service loads
    them again when they are requested.
    """

    _sequences: CpuSequences

    def __init__(self, connected: socket.socket, threads: ThreadPlacement, bound: str) -> None:
        super().__init__(connected, bound)
        self._threads = threads
        self._models: dict[str, _Loaded] = {}
        self._sequences = CpuSequences()
        self._sets: tuple[str, list[dict[str, Array]]] = ("", [])  # Probe inputs of the model being compared

    def require_loaded(self, key: str) -> Session:
        """Return a loaded model; raise NotLoaded if none has that key."""
        held = self._models.get(key)
        if held is None:
            raise NotLoaded("the model is not loaded in the CPU engine")
        return held.session

    def make_room(self, but: str) -> bool:
        """Evict all models except `but` ("": none); return whether there were any.

        A running model is freed when its run has ended.
        """
        others = [key for key in list(self._models) if key != but]
        for key in others:
            self._models.pop(key, None)
        self._sequences.unbind()
        self._sets = "", []
        give_back_freed()
        if others:
            _log.warning("memory is short: %d models make room", len(others))
        return bool(others)

    def begin_call(self, call: CallUnderWay) -> None:
        """Have ONNX Runtime end the run of a call when its client gives up."""
        running_now.options = options = onnxruntime.RunOptions()
        # A processor captures no graphs. ONNX Runtime's Python asks for this at each bound run, and spends
        # 23 us on an exception where it is not set.
        options.add_run_config_entry("gpu_graph_id", "-1")
        call.ends_by(partial(setattr, options, "terminate", True))

    def beside(self, call: RequestReceived, other: RequestReceived) -> bool:
        """Return whether a call may begin while a long one runs: not if that is timed."""
        return other.method not in _TIMED

    def finish_run(self, key: str, inputs: dict[str, Array], keep: bool) -> tuple[ObservedSizes, ...]:
        """Return no sizes, as ONNX files have no partitions; record nothing."""
        return ()

    def take_lowering(self, key: str) -> str:
        """Return the error of an optimised session that was given up, once; otherwise ""."""
        if (held := self._models.get(key)) is None:  # The model was evicted after its run
            return ""
        said, held.session.lowered = held.session.lowered, ""
        return said

    def _find(self, call: FindDevice) -> FoundDevice:
        return FoundDevice(spec=_DEVICE, identity=self._identity(), profile=None)

    def _open(self, call: OpenDevice) -> Empty:
        return Empty()

    def _load(self, call: BuildModel) -> BuiltModel:
        held, asked = self._models.get(call.key), OrtSessionConfig(call.level, call.half)
        if held is None or held.asked != asked:  # The previous session answers until the new one is loaded
            session = Session(Path(call.path), self._threads.threads, level=call.level)
            self._models[call.key] = held = _Loaded(session, asked)
        return BuiltModel(device=_DEVICE, probes=1, interface=held.session.interface)

    def _check(self, call: CheckProbe) -> CheckedProbe:
        self.require_loaded(call.key).try_out()
        return CheckedProbe()

    def _turn(self, call: RunOnProbe) -> ComparisonRun:
        session = self.require_loaded(call.key)
        if self._sets[0] != call.compiled:
            self._sets = call.compiled, _probes(call.compiled)
        sets = self._sets[1]
        if not sets:
            raise NotFound("the compiled file has no inputs to compare engines on")
        inputs = sets[call.turn % len(sets)]
        begun = time.monotonic_ns()
        session.run(inputs)
        return ComparisonRun(ns=time.monotonic_ns() - begun, sets=len(sets))

    def run_step(self, call: RunStep, inputs: dict[str, Array]) -> Stepped:
        """Run a step of a sequence whose state ONNX Runtime holds."""
        return self._sequences.step(self.require_loaded(call.run.key), call, inputs)

    def _unload(self, call: UnloadModel) -> Empty:
        self._models.pop(call.key, None)
        self._sets = "", []
        return Empty()

    def _profile(self, call: ProfileModel) -> ModelProfile:
        whole_us, nodes = self.require_loaded(call.key).profile_run(Path(call.path))
        return profiling.result(call.name, whole_us, nodes, self._identity(), timeline=call.timeline)

    def _identity(self) -> DeviceIdentity:
        return DeviceIdentity(
            platform="ONNX Runtime",
            vendor=platform.machine(),
            # A change of the name makes the service compare engines again.
            name=f"CPU, {self._threads}" if self._threads.processors else "CPU",
            driver_version=onnxruntime.__version__,
            kernel_driver="",
        )

    LOADING: ClassVar = _with_room(by_name({FindDevice: _find, OpenDevice: _open, BuildModel: _load}))
    METHODS: ClassVar = _with_room(
        Host.METHODS
        | by_name(
            {
                CheckProbe: _check,
                RunOnProbe: _turn,
                UnloadModel: _unload,
                ProfileModel: _profile,
            }
        )
    )


def _probes(compiled: str) -> list[dict[str, Array]]:
    with modelfile.read(compiled) as file:
        sets = map(file.inputs, file.model.probes)
        return [{name: array.copy() for name, array in inputs.items()} for inputs in sets]


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    _, threads, bound, _ = arguments
    CpuEngine(connect(arguments), prepare(int(threads)), bound).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
