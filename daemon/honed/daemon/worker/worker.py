"""The serving worker: a child process that owns a device and runs models on it."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from honed.machine import peaks
from honed.machine.devices import Device, select
from honed.machine.profile import DeviceProfile
from honed.process.rpc import by_name
from honed.protocol import strict
from honed.protocol.errors import DeviceError, Internal, InvalidArgument, ModelRefused, NotFound, NotLoaded
from honed.protocol.values import ComparedOutput, Empty, ModelProfile, ObservedSizes
from honed.runtime.compiled import modelfile
from honed.runtime.dtypes import dtype
from honed.runtime.engines import UNLIMITED, PartLimits
from honed.runtime.execution.cpuparts import CpuPartitionProcess
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.segments import running_now
from honed.runtime.execution.verification import Difference, check_numbered, differences, probe_count

from .calls import (
    BuildModel,
    BuiltModel,
    CheckedProbe,
    CheckProbe,
    ComparisonRun,
    FindDevice,
    FoundDevice,
    OpenDevice,
    ProfileModel,
    RunComparison,
    RunStep,
    UnloadModel,
)
from .host import Array, Host, Stepped, check_timeline, connect
from .steps import DeviceSequences
from .turns import CallUnderWay

# ---- Comparison of two versions of a model, which run in turns on equal inputs ----

Inputs = dict[str, NDArray[Any]]
_RECORDED_BYTES = 16 << 20  # Limit of a model's recorded inputs; larger ones are not recorded
_RECORDED = 2
_PERIOD = 5.0  # Minimum interval of recording, in seconds


class InputRecorder:
    """A recorder of the last inputs that clients sent to each model, on which versions are compared."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Inputs]] = {}
        self._noted: dict[str, float] = {}

    def note(self, key: str, inputs: Inputs) -> None:
        """Record a copy of inputs, at most every `_PERIOD`; the arrays may lie in a client's memory."""
        now = time.monotonic()
        if now - self._noted.get(key, -_PERIOD) < _PERIOD:
            return
        self._noted[key] = now
        if sum(array.nbytes for array in inputs.values()) * _RECORDED <= _RECORDED_BYTES:
            copies = {name: np.array(array) for name, array in inputs.items()}
            self._kept[key] = [*self._kept.get(key, []), copies][-_RECORDED:]

    def of(self, *keys: str) -> list[Inputs]:
        """Return the inputs recorded under these keys."""
        return [inputs for key in keys for inputs in self._kept.get(key, [])]

    def forget(self, key: str) -> None:
        """Drop the recorded inputs of a model."""
        self._kept.pop(key, None)
        self._noted.pop(key, None)


class VersionComparison:
    """A comparison that runs the old and the new version in turns on the probes and recorded inputs.

    A tail that the CPU engine runs is timed, too, but its inputs are compared: small differences in them may
    make it decide otherwise.
    """

    def __init__(self, old: Executor, new: Executor, recorded: list[Inputs]) -> None:
        self.pair = (old, new)
        probes = old.model.probes
        kept = [*old.model.preconditions, *new.model.preconditions]
        sets = [*recorded, *map(old.file.inputs, probes)] or [zeros(old)]
        served = [each for each in sets if all(one.allows(each[one.input]) for one in kept)]
        self.sets = served or [*map(new.file.inputs, new.model.probes)] or [zeros(old)]
        self._tolerance = [
            2 * max((probe.tolerance[i] for probe in probes), default=1e-3)
            for i in range(len(old.model.outputs))
        ]
        self._answers: dict[int, Inputs] = {}  # Outputs of the present pair by version: 0 old, 1 new

    def turn(self, pair: int, which: int) -> tuple[int, str]:
        """Run the old version (`which` 0) or the new one (1); return nanoseconds, and how outputs differ.

        That is "" if they do not differ, or only one has run. Each version may be off by the tolerance of its
        verification, so they may differ by twice that.
        """
        executor, inputs = self.pair[which], self.sets[pair % len(self.sets)]
        begun = time.monotonic_ns()
        answers = executor.run_compiled(inputs)
        executor.run_behind(answers, inputs)
        taken = time.monotonic_ns() - begun
        other = self._answers.pop(1 - which, None)
        if other is None:
            self._answers[which] = answers
            return taken, ""
        old, new = (other, answers) if which else (answers, other)
        return taken, self._difference(old, new)

    def _difference(self, expected: Inputs, actual: Inputs) -> str:
        model = self.pair[0].model
        selections = model.proof.selections if model.proof is not None else ()
        known = {tensor.name: expected[tensor.name] for tensor in model.outputs}
        off = (one for one in differences(known, actual, self._tolerance, selections) if not one.right)
        return str(next(off, ""))


def zeros(executor: Executor) -> Inputs:
    """Return inputs of zeros for a model without probes, or the nearest values that it accepts."""
    made = {t.name: np.zeros(t.shape, dtype(t.dtype).numpy) for t in executor.model.inputs}
    for each in executor.model.preconditions:
        made[each.input] = np.full_like(made[each.input], min(max(0, each.low), each.high))
    return made


# ---- The serving worker: a child process that owns the device and runs the service's calls ----
#
# python -m honed.daemon.worker.worker CACHE_DIR DEVICE_SPEC THREADS MEMORY_MIB BOUND FD
#
# It answers the service on the socket FD until that closes (`host.py`). THREADS and MEMORY_MIB are for the
# process that runs CPU partitions of models; it runs while models have any.

_NICENESS = 10  # Minimum niceness of the thread that builds kernels
_log = logging.getLogger(__name__)


class Worker(Host):
    """The host of a device, with the loaded models by key."""

    _sequences: DeviceSequences

    def __init__(
        self,
        connected: socket.socket,
        cache_dir: Path,
        spec: str,
        parts: PartLimits = UNLIMITED,
        bound: str = "",
    ) -> None:
        super().__init__(connected, bound)
        self._part_process = functools.cache(functools.partial(CpuPartitionProcess, parts))  # One for all
        self._cache_dir = cache_dir
        self._spec = spec
        self._found: DeviceProfile | None = None
        self._device: Device | None = None  # Opened for the first model
        self._models: dict[str, Executor] = {}
        self._checked: dict[str, dict[int, tuple[Difference, ...]]] = {}  # Differences by key and probe
        self._recorder = InputRecorder()
        self._comparison: VersionComparison | None = None
        self._sequences = DeviceSequences()
        # Building kernels takes processor time from inferences; a thread has a niceness of its own in Linux.
        # Only this thread is nice: one that runs Python would hold the interpreter's lock while it waits.
        self._builder = ThreadPoolExecutor(1, "builder", initializer=_be_nice)

    def require_loaded(self, key: str) -> Executor:
        """Return a loaded model for any run, after saving a sequence in its inputs; raise NotLoaded."""
        executor = self._form(key)
        if executor in self._sequences.inside:
            self._sequences.leave(executor)
        return executor

    def _form(self, key: str) -> Executor:
        """Return a loaded model, whose inputs may hold a sequence; raise NotLoaded if it is not loaded."""
        executor = self._models.get(key)
        if executor is None:
            raise NotLoaded("the model is not loaded in the worker")
        return executor

    def finish_run(self, key: str, inputs: dict[str, Array], keep: bool) -> tuple[ObservedSizes, ...]:
        """Record a client's inputs, on which versions are compared, and return the observed sizes."""
        if keep:
            self._recorder.note(key, inputs)
        else:
            self._recorder.forget(key)
        return self.require_loaded(key).observed

    def begin_call(self, call: CallUnderWay) -> None:
        """Have the device's launches end when the call's client gives up."""
        running_now.ended = lambda: call.ended

    def _find(self, call: FindDevice) -> FoundDevice:
        device = select(self._spec or None) if call.models else None
        if device is not None and peaks.has_stored(device, self._cache_dir):
            self._spec, self._found = device.spec, peaks.load_or_measure(device, self._cache_dir)
        elif device is not None and call.measure_seconds is None:
            self._spec, self._found = device.spec, device.profile
        else:
            found = peaks.survey(self._spec, self._cache_dir, seconds=call.measure_seconds)
            if found.no_peaks:
                _log.warning("%s", found.no_peaks)
            self._spec, self._found = found.spec, found.profile
        return FoundDevice(spec=self._spec, identity=self._found.identity, profile=self._found)

    def _open(self, call: OpenDevice) -> Empty:
        """Open the device; raise a HonedError if the device or driver has changed since it was found.

        The service must then replace this process.
        """
        if self._device is None:
            device = select(self._spec)
            if self._found is None or device.profile.identity != self._found.identity:
                raise DeviceError(f"the driver of {self._spec} has changed")
            self._device = replace(device, profile=self._found)
        return Empty()

    def _load(self, call: BuildModel) -> BuiltModel:
        """Load a model, which may serve once its probes are verified.

        Raises DeviceError if the device cannot build or hold it.
        """
        key = call.key
        if key not in self._models:
            if self._device is None:
                raise Internal("the worker has no device yet; this is a fault of the service")
            self._models[key] = Executor(
                modelfile.read(call.path),
                self._device,
                cache_dir=self._cache_dir,
                builder=self._builder,
                progress=self.report_build,
                part_process=self._part_process,
            )
            self._checked[key] = {}
        return BuiltModel(device=self._device_spec(), probes=probe_count(self._models[key]))

    def _check(self, call: CheckProbe) -> CheckedProbe:
        """Verify a probe; raise ModelRefused if an output is wrong.

        If the device fails during the run, its state is unknown: the result says so, and the service must
        replace this process.
        """
        executor, checked, probe = self.require_loaded(call.key), self._checked[call.key], call.probe
        if probe not in checked:
            try:
                checked[probe] = check_numbered(executor, probe)
            except DeviceError as error:
                return CheckedProbe(device_error=str(error))
        wrong = tuple(str(d) for d in checked[probe] if not d.right)
        if wrong:
            raise ModelRefused(
                f"on {self._device_spec()} the model gives wrong answers for inputs whose right outputs "
                "are known, so it is not served; compile it again on this device",
                wrong,
            )
        return CheckedProbe(outputs=_worst(d for found in checked.values() for d in found))

    def _compare(self, call: RunComparison) -> ComparisonRun:
        """Run a turn of a `VersionComparison` of two models."""
        if call.pair == call.which == 0:
            pair = (self.require_loaded(call.old), self.require_loaded(call.new))
            self._comparison = VersionComparison(*pair, self._recorder.of(call.old, call.new))
        if self._comparison is None:
            raise NotFound("one of the two versions was unloaded while they were compared")
        for executor in self._comparison.pair:
            self._sequences.leave(executor)
        try:
            ns, wrong = self._comparison.turn(call.pair, call.which)
        except DeviceError as error:
            return ComparisonRun(device_error=str(error))
        clock_hz = self._device.clock_hz() if self._device is not None else None
        return ComparisonRun(ns=ns, wrong=wrong, sets=len(self._comparison.sets), clock_hz=clock_hz)

    def _device_spec(self) -> str:
        return self._device.spec if self._device is not None else ""

    def _unload(self, call: UnloadModel) -> Empty:
        executor = self._models.pop(call.key, None)
        self._checked.pop(call.key, None)
        self._recorder.forget(call.key)
        if executor is not None:
            if self._comparison is not None and executor in self._comparison.pair:
                self._comparison = None
            self._sequences.leave(executor)
            executor.close()
        return Empty()

    def run_step(self, call: RunStep, inputs: dict[str, Array]) -> Stepped:
        """Run a step of a sequence in a compiled shape."""
        form = self._form(call.run.key)
        if form.model.split is not None:
            raise InvalidArgument("parts of the form are run by the CPU engine, which cannot keep its state")
        return self._sequences.step(form, call, inputs)

    def _profile(self, call: ProfileModel) -> ModelProfile:
        """Return the result of ModelProfile for one run.

        Raises InvalidArgument if a requested timeline would be too long.
        """
        executor = self.require_loaded(call.key)
        if call.timeline:
            check_timeline(f"takes {len(executor.model.steps)} steps", len(executor.model.steps))
        probes = executor.model.probes
        found = executor.profile(executor.file.inputs(probes[0]) if probes else zeros(executor))
        device = executor.device.profile
        return strict.copy_fields(
            ModelProfile,
            found,
            "engine",
            "engine_name",
            name=call.name,
            runs=1,
            device=device.identity,
            peaks=device.peaks,
            rows=found.kernels,
            timeline=tuple(astuple(span) for span in found.spans) if call.timeline else None,
        )

    LOADING: ClassVar = by_name({FindDevice: _find, OpenDevice: _open, BuildModel: _load})
    METHODS: ClassVar = Host.METHODS | by_name(
        {
            CheckProbe: _check,
            RunComparison: _compare,
            UnloadModel: _unload,
            ProfileModel: _profile,
        }
    )


def _be_nice() -> None:
    """Give this thread a lower priority than the serving ones.

    The niceness is not reduced, which needs privileges.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _worst(differences: Iterable[Difference]) -> tuple[ComparedOutput, ...]:
    """Return for each output the largest error over the probes."""
    worst: dict[str, Difference] = {}
    for d in differences:
        if d.output not in worst or d.error > worst[d.output].error:
            worst[d.output] = d
    return tuple(ComparedOutput(name=d.output, tolerance=d.tolerance, error=d.error) for d in worst.values())


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    cache_dir, spec, threads, memory_mib, bound, _ = arguments
    connected = connect(arguments)
    parts = PartLimits(threads=int(threads), memory_mib=int(memory_mib))
    Worker(connected, Path(cache_dir), spec, parts, bound).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
