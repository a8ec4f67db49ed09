"""Compiles partitions whose sizes depend on the data for observed sizes, where that is faster.

Each is compiled as a model of its own, and timed in turns with the CPU engine on the device. These models
become size specialisations in the file of the whole model, in its one section of constants.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.protocol import strict
from honed.protocol.values import ObservedSizes
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import (
    Buffer,
    CompiledModel,
    CpuPartition,
    PartitionTensor,
    SizeSpecialisation,
    SkippedSizes,
    SpecialisationTimes,
)
from honed.runtime.compiled.parts import MAX_SIZES
from honed.runtime.compiled.validate import CONSTANT_OFFSET_ALIGN
from honed.runtime.engines import PROVING_MIB, PairedTiming, PartLimits, allowance, can_compiled_serve
from honed.runtime.execution.cpuparts import CpuPartitionProcess, LoadedPartitions
from honed.runtime.execution.executor import Executor
from honed.tuner.compiler.partition import PartitionedModel
from honed.tuner.frontend import Precision

# Shares of a specialisation's rows for which it is timed against the CPU engine
_SHARES = (3 / 4, 1 / 2, 1 / 3, 1 / 4)
Values = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class FormTiming:
    """Times of a form and of the CPU engine, the fewest rows to run it for, or 0, and why not, or ""."""

    times: SpecialisationTimes
    least: int
    why_not: str


def in_turns(main: Path, number: int, compiled: Path, device: Device, *, keep_slower: bool) -> FormTiming:
    """Time partition `number` of the compiled file `main` in both engines, on its form's first probe.

    With `keep_slower` the form is to run however slow it is. Raises what running the model raises.
    """
    with modelfile.read(main, verify=False) as whole, modelfile.read(compiled, verify=False) as file:
        split = whole.model.split
        assert split is not None
        given = {name: np.array(value) for name, value in file.inputs(file.model.probes[0]).items()}
        process = CpuPartitionProcess(PartLimits(memory_mib=PROVING_MIB))
        with process.open(whole) as parts, Executor(file, device) as form:
            allowed = allowance(same_cores=device.profile.family.processor)
            both = _ComparedEngines(parts, number, split.parts[number], form, allowed)
            runs = both.compare(given)
            cpu, here = runs.times
            times = SpecialisationTimes(compiled_us=1e6 * here, cpu_us=1e6 * cpu)
            if not (runs.within_allowance or keep_slower):
                why = (
                    f"the CPU engine is faster: compiled {times.compiled_us / 1e3:.3g} ms with handing over, "
                    f"ONNX Runtime {times.cpu_us / 1e3:.3g} ms, measured in turns"
                )
                return FormTiming(times, 0, why)
            return FormTiming(times, both.least(given, keep_slower=keep_slower), "")


@dataclass(slots=True)
class _ComparedEngines:
    """A partition in the CPU engine and its size specialisation with the same transfers, timed in turns."""

    parts: LoadedPartitions
    number: int
    part: CpuPartition
    form: Executor
    allowance: float
    transfers: float = 0.0  # Seconds

    def compare(self, values: Values, fewer: Values | None = None) -> PairedTiming:
        """Run the CPU engine, with `fewer` rows, and the form in turns."""
        by_cpu, by_form = partial(self._in_cpu, fewer or values), partial(self._in_form, values)
        return PairedTiming(self.allowance).take_turns(by_cpu, by_form)

    def least(self, values: Values, *, keep_slower: bool) -> int:
        """Return the fewest rows, of those tried, for which the CPU engine is not faster.

        Returns 0 where the form runs for its full number of rows only, because rows are not independent or
        the inputs differ in their number of rows; else 1 where `keep_slower` is set.
        """
        counts = {int(array.shape[0]) for array, _ in self._open(values)}
        if not self.part.by_rows or len(counts) != 1:
            return 0
        [rows] = counts
        if keep_slower:
            return 1
        found: int = rows
        for share in _SHARES:
            fewer = max(1, round(share * rows))
            cut = dict(values) | {t.name: array[:fewer] for array, t in self._open(values)}
            if not self.compare(values, cut).within_allowance:
                break
            found = fewer
        return found

    def _open(self, values: Values) -> list[tuple[NDArray[Any], PartitionTensor]]:
        """Return the inputs whose size depends on the data, each with its declaration."""
        return [(values[tensor.name], tensor) for tensor in self.part.inputs if -1 in tensor.shape]

    def _in_form(self, values: Values) -> float:
        """Return the seconds of a run of the form, with the transfers."""
        began = time.perf_counter_ns()
        self.form.run(values)
        return (time.perf_counter_ns() - began) / 1e9 + self.transfers

    def _in_cpu(self, values: Values) -> float:
        """Return the seconds of a run in the CPU engine without the transfers."""
        began = time.perf_counter_ns()
        ran, _ = self.parts.run_chain([self.number], values, [tensor.name for tensor in self.part.outputs])
        self.transfers = (time.perf_counter_ns() - began - ran.ns) / 1e9
        return ran.ns / 1e9


Constants = Mapping[int, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart:
    """A partition compiled for sizes, as a model of its own."""

    observed: ObservedSizes
    model: CompiledModel
    constants: Constants
    times: SpecialisationTimes | None
    least: int = 0


def choose_sizes(
    cut: PartitionedModel, requested: Sequence[ObservedSizes], like: CompiledModel | None
) -> tuple[tuple[ObservedSizes, ...], tuple[SkippedSizes, ...]]:
    """Return the sizes to compile partitions for, and the sizes that were left out earlier and stay so.

    These are the sizes given, else those that `like`, a compiled model of this model, was compiled for,
    those it left out included. Sizes that no partition of the model has are skipped.
    """
    known: tuple[ObservedSizes, ...] = ()
    left_out: tuple[SkippedSizes, ...] = ()
    if like is not None:
        known = tuple(ObservedSizes(part=form.part, sizes=form.sizes) for form in like.forms)
        left_out = like.split.left_out if like.split is not None else ()
    again = tuple(ObservedSizes(part=out.part, sizes=out.sizes) for out in left_out)
    chosen = [observed for observed in dict.fromkeys(requested or (*known, *again)) if _has(cut, observed)][
        :MAX_SIZES
    ]
    stay = [
        out
        for out, observed in zip(left_out, again, strict=True)
        if observed not in chosen and _has(cut, observed)
    ]
    return tuple(chosen), tuple(stay[len(chosen) - MAX_SIZES :] if len(chosen) < MAX_SIZES else ())


def keeps_slower(like: CompiledModel | None, profile: DeviceProfile) -> bool:
    """Return whether a compiled model has size specialisations that are slower than the CPU engine."""
    if like is None:
        return False
    times = [form.times for form in like.forms if form.times is not None]
    same_cores = profile.family.processor
    return not all(can_compiled_serve(t.compiled_us, t.cpu_us, same_cores=same_cores) for t in times)


def precision(requested: Precision) -> Precision:
    """Return the precision of partitions: fp16 only on request.

    Model code after a partition may choose by its outputs.
    """
    return "fp16" if requested == "fp16" else "fp32"


def shapes_of(cut: PartitionedModel, observed: ObservedSizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the partition's inputs for these sizes."""
    left = iter(observed.sizes)
    return {
        spec.name: tuple(next(left) if size == -1 else size for size in spec.shape)
        for spec in cut.parts[observed.part].inputs
    }


def with_forms(
    model: CompiledModel,
    constants: Constants,
    parts: Sequence[CompiledPart],
    left_out: Sequence[SkippedSizes],
) -> tuple[CompiledModel, list[Constants]]:
    """Return the compiled model with size specialisations of its partitions, and the constants of each.

    Constants with equal contents are in the file once.
    """
    if model.split is None:
        return model, []
    section = _Section(model, constants)
    moved = [section.move(part.model, part.constants) for part in parts]
    end = section.end
    forms = tuple(
        strict.copy_fields(
            SizeSpecialisation,
            part,
            part=part.observed.part,
            sizes=part.observed.sizes,
            model=replace(part.model, buffers=buffers, constant_bytes=end),
        )
        for part, buffers in zip(parts, moved, strict=True)
    )
    whole = replace(
        model, constant_bytes=end, split=replace(model.split, left_out=tuple(left_out)), forms=forms
    )
    return whole, [part.constants for part in parts]


class _Section:
    """The constants of a file, to which those of size specialisations are added."""

    def __init__(self, model: CompiledModel, constants: Constants) -> None:
        self.end = model.constant_bytes
        self._known: dict[bytes, int] = {}  # Offsets by contents
        for index, value in constants.items():
            self._known.setdefault(_contents(value), model.buffers[index].offset)

    def move(self, model: CompiledModel, constants: Constants) -> tuple[Buffer, ...]:
        """Return the buffers of another model, whose constants are found or added; no two share an offset."""
        buffers = list(model.buffers)
        taken: set[int] = set()
        for index, value in constants.items():
            contents = _contents(value)
            offset = self._known.get(contents)
            if offset is None or offset in taken:
                offset = -(-self.end // CONSTANT_OFFSET_ALIGN) * CONSTANT_OFFSET_ALIGN
                self.end = offset + value.nbytes
                self._known.setdefault(contents, offset)
            if value.nbytes:
                taken.add(offset)
            buffers[index] = replace(buffers[index], offset=offset)
        return tuple(buffers)


def _contents(value: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).digest()


def _has(cut: PartitionedModel, observed: ObservedSizes) -> bool:
    if not 0 <= observed.part < len(cut.parts) or not cut.parts[observed.part].sized:
        return False
    count = sum(spec.shape.count(-1) for spec in cut.parts[observed.part].inputs)
    return len(observed.sizes) == count and all(size > 0 for size in observed.sizes)
