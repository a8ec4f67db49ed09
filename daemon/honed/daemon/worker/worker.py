"""The serving worker: a child process that owns a device and runs models on it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from honed.jobs.surveying import survey
from honed.machine import peaks
from honed.machine.devices import Device, select
from honed.machine.profile import DeviceProfile
from honed.process.rpc import by_name
from honed.protocol import strict
from honed.protocol.errors import DeviceError, Internal, InvalidArgument, ModelRefused, NotFound, NotLoaded
from honed.protocol.results import ComparedOutput, Empty, ModelProfile, ObservedSizes
from honed.runtime.dtypes import dtype
from honed.runtime.engines import UNLIMITED, PartLimits
from honed.runtime.execution.cpuparts import CpuPartitionProcess
from honed.runtime.execution.executor import Executor, load
from honed.runtime.execution.segments import running_now
from honed.runtime.execution.verification import Difference, check_numbered, differences, probe_count

from .calls import (
    BuildModel,
    BuiltModel,
    CheckedProbe,
    CheckProbe,
    ComparisonRun,
    DropSequences,
    FindDevice,
    FoundDevice,
    OpenDevice,
    ProfileModel,
    RunComparison,
    RunStep,
    SetSequence,
    UnloadModel,
)
from .host import Array, Host, Stepped, check_timeline, connect
from .steps import DeviceSequences, growth
from .turns import CallUnderWay

# ---- Two versions of a model run in turns on the same inputs, one run at a time ----

Inputs = dict[str, NDArray[Any]]
_RECORDED_BYTES = 16 << 20  # Of one model's inputs; larger ones are not recorded
_RECORDED = 2
_PERIOD = 5.0  # Seconds between two that are recorded


class InputRecorder:
    """The last inputs that clients sent to each model, to compare its successor on."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Inputs]] = {}
        self._noted: dict[str, float] = {}

    def note(self, key: str, inputs: Inputs) -> None:
        """Keep a copy now and then: the arrays may be a client's memory."""
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
        """Forget the inputs of a model that is gone."""
        self._kept.pop(key, None)
        self._noted.pop(key, None)


class VersionComparison:
    """Runs the old version and the new one in turns, over the probes and the recorded inputs.

    Where the CPU engine runs a last part it is timed, too, and what it is given is compared: small
    differences may make it choose otherwise.
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
        self._answers: dict[int, Inputs] = {}  # Of the present pair of runs, by version: 0 old, 1 new

    def turn(self, pair: int, which: int) -> tuple[int, str]:
        """Run the old version (`which` 0) or the new one (1); gives nanoseconds, and how the answers differ.

        They are compared, "" where they do not differ, once both have run. Either version may be off by the
        tolerance of its proof, so they may differ by twice that.
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

    def _difference(self, expected: Inputs, found: Inputs) -> str:
        model = self.pair[0].model
        selections = model.proof.selections if model.proof is not None else ()
        known = {tensor.name: expected[tensor.name] for tensor in model.outputs}
        off = (one for one in differences(known, found, self._tolerance, selections) if not one.right)
        return str(next(off, ""))


def zeros(executor: Executor) -> Inputs:
    """Return inputs of zeros for a model that has no probes, or what it serves instead."""
    made = {t.name: np.zeros(t.shape, dtype(t.dtype).numpy) for t in executor.model.inputs}
    for each in executor.model.preconditions:
        made[each.input] = np.full_like(made[each.input], min(max(0, each.low), each.high))
    return made


# ---- The serving worker: a child process that owns the device and runs what the service passes to it ----
#
# python -m honed.daemon.worker CACHE_DIR DEVICE_SPEC THREADS MEMORY_MIB BOUND FD
#
# It answers the service on the socket FD until that closes (`hosting`). THREADS and MEMORY_MIB are for the
# process in which parts of models run that the CPU engine takes; it is there while there are any.

_NICENESS = 10  # At least, of the thread that builds kernels
_log = logging.getLogger(__name__)


class Worker(Host):
    """The device, and the loaded models by key."""

    def __init__(
        self,
        connected: socket.socket,
        cache_dir: Path,
        spec: str,
        parts: PartLimits = UNLIMITED,
        bound: str = "",
    ) -> None:
        super().__init__(connected, bound)
        self._parts = CpuPartitionProcess(parts)
        self._cache_dir = cache_dir
        self._spec = spec
        self._found: DeviceProfile | None = None
        self._device: Device | None = None  # From the first model on
        self._models: dict[str, Executor] = {}
        self._checked: dict[str, dict[int, tuple[Difference, ...]]] = {}  # By key and probe
        self._recorder = InputRecorder()
        self._comparison: VersionComparison | None = None
        self._sequences = DeviceSequences()
        # Building kernels takes processor time from inferences; a thread has a niceness of its own in Linux.
        # Only this one has: one that runs Python would hold the interpreter's lock while it waits its turn.
        self._builder = ThreadPoolExecutor(1, "builder", initializer=_be_nice)

    def loaded(self, key: str) -> Executor:
        """Return a loaded model, to be run on inputs of any kind; raise NotLoaded if it is not."""
        executor = self._form(key)
        if executor in self._sequences.inside:
            self._sequences.leave(executor)
        return executor

    def _form(self, key: str) -> Executor:
        """Return a loaded model that may have a sequence in its inputs; raise as `loaded`."""
        executor = self._models.get(key)
        if executor is None:
            raise NotLoaded("the model is not loaded in the worker")
        return executor

    def ran(self, key: str, inputs: dict[str, Array], keep: bool) -> tuple[ObservedSizes, ...]:
        """Keep a client's inputs, to compare a successor on."""
        if keep:
            self._recorder.note(key, inputs)
        else:
            self._recorder.forget(key)
        return self.loaded(key).observed

    def begin_call(self, call: CallUnderWay) -> None:
        """Have the device's launches end when nobody waits for the call any more."""
        running_now.ended = lambda: call.ended

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
        return FoundDevice(spec=self._spec, identity=self._found.identity, profile=self._found)

    def _open(self, call: OpenDevice) -> Empty:
        """Open the device; raise a HonedError if another device or driver is there now.

        This process is then to be replaced.
        """
        if self._device is None:
            device = select(self._spec)
            if self._found is None or device.profile.identity != self._found.identity:
                raise DeviceError(f"the driver of {self._spec} has changed")
            self._device = replace(device, profile=self._found)
        return Empty()

    def _load(self, call: BuildModel) -> BuiltModel:
        """Load a model, which may serve once each of its probes was checked.

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
                progress=self.built,
                parts=self._parts,
            )
            self._checked[key] = {}
        return BuiltModel(device=self._device_spec(), probes=probe_count(self._models[key]))

    def _check(self, call: CheckProbe) -> CheckedProbe:
        """Check a probe; raise ModelRefused if an answer is wrong.

        Where the device fails while it runs, its state is unknown: the result then says so, and this process
        must be replaced.
        """
        executor, checked, probe = self.loaded(call.key), self._checked[call.key], call.probe
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
        """Run one turn of a comparison of two models, see `VersionComparison`."""
        if call.pair == call.which == 0:
            pair = (self.loaded(call.old), self.loaded(call.new))
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

    def stepped(self, call: RunStep, inputs: dict[str, Array]) -> Stepped:
        """Run a step of a sequence by a compiled form, which has its state."""
        form = self._form(call.run.key)
        if form.model.split is not None:
            raise InvalidArgument("parts of the form are run by the CPU engine, which cannot keep its state")
        return self._sequences.step(form, call, inputs)

    def rows_of(self, sequence: int, rows: int) -> Mapping[str, Array]:
        """Return the first rows of a sequence."""
        return self._sequences.state(sequence, rows)

    def set_sequence(self, call: SetSequence, values: Mapping[str, Array]) -> None:
        """Keep the rows until a form runs a step on them."""
        self._sequences.set(call.sequence, growth(call.tensors), call.rows, values)

    def drop_sequences(self, call: DropSequences) -> Empty:
        """Let go of sequences."""
        self._sequences.drop(call.sequences)
        return Empty()

    def _profile(self, call: ProfileModel) -> ModelProfile:
        return _profiled(self.loaded(call.key), call.name, timeline=call.timeline)

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

    A process that is nicer already may not be less so without privileges.
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


def _profiled(executor: Executor, name: str, *, timeline: bool) -> ModelProfile:
    """Return the result of ModelProfile for one run of the model called `name`.

    Raises InvalidArgument where a timeline is asked for that is too long.
    """
    if timeline:
        check_timeline(f"takes {len(executor.model.steps)} steps", len(executor.model.steps))
    probes = executor.model.probes
    found = executor.profile(executor.file.inputs(probes[0]) if probes else zeros(executor))
    device = executor.device.profile
    return strict.copy_fields(
        ModelProfile,
        found,
        "engine",
        "engine_name",
        name=name,
        runs=1,
        device=device.identity,
        peaks=device.peaks,
        rows=found.kernels,
        timeline=tuple(astuple(span) for span in found.spans) if timeline else None,
    )


def main(arguments: list[str]) -> None:
    """Serve on the socket whose descriptor number is given."""
    cache_dir, spec, threads, memory_mib, bound, _ = arguments
    connected = connect(arguments)
    parts = PartLimits(threads=int(threads), memory_mib=int(memory_mib))
    Worker(connected, Path(cache_dir), spec, parts, bound).serve()
