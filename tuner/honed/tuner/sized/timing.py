"""Whether a part is to run compiled for sizes: by runs in turns with the CPU engine, on the device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine.devices import Device
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CpuPart, FormTimes, PartTensor
from honed.runtime.engines import compiled_serves
from honed.runtime.execution.cpuparts import CpuParts, OpenParts
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.partcalls import PROVING_MIB, PartLimits

_ROUNDS = 7  # runs of each
_SHARES = (3 / 4, 1 / 2, 1 / 3, 1 / 4)  # of a form's rows, at which it is tried whether it is still faster
Values = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class FormTiming:
    """Times of a form and of the CPU engine, the fewest rows it is to run for, or 0, and why not, or ""."""

    times: FormTimes
    least: int
    why_not: str


def in_turns(main: Path, number: int, compiled: Path, device: Device, *, slower_too: bool) -> FormTiming:
    """Time part `number` of the compiled file `main` in both, on the inputs of its form's first probe.

    With `slower_too` the form is to run whatever it takes. Raises as running does.
    """
    with modelfile.read(main, verify=False) as whole, modelfile.read(compiled, verify=False) as file:
        proof, split = file.model.proof, whole.model.split
        assert proof is not None  # compiling made it
        assert split is not None
        given = {
            tensor.name: np.array(file.constant(index))
            for tensor, index in zip(file.model.inputs, proof.probes[0].inputs, strict=True)
        }
        process = CpuParts(PartLimits(memory_mib=PROVING_MIB))
        with process.open(whole) as parts, Executor(file, device) as form:
            both = _Both(parts, number, split.parts[number], form)
            times = both.timed(given)
            serves = compiled_serves(
                times.compiled_us, times.cpu_us, same_cores=device.profile.family.processor
            )
            if not (serves or slower_too):
                return FormTiming(times, 0, _why_not(times))
            return FormTiming(times, both.least(given, times.compiled_us, device, slower_too=slower_too), "")


def _why_not(times: FormTimes) -> str:
    return (
        f"the CPU engine is faster: compiled {times.compiled_us / 1e3:.3g} ms with handing over, "
        f"ONNX Runtime {times.cpu_us / 1e3:.3g} ms, measured in turns"
    )


@dataclass(frozen=True, slots=True)
class _Both:
    """A part in the CPU engine, and a form of it."""

    parts: OpenParts
    number: int
    part: CpuPart
    form: Executor

    def timed(self, given: Values) -> FormTimes:
        """Lower quartiles: what else runs on the machine can only make a run longer."""
        taken = [self._turn(given) for _ in range(_ROUNDS + 1)][1:]
        compiled_us, cpu_us = (_quartile(each) for each in zip(*taken, strict=True))
        return FormTimes(compiled_us=compiled_us, cpu_us=cpu_us)

    def least(self, given: Values, compiled_us: float, device: Device, *, slower_too: bool) -> int:
        """The fewest rows, of those tried, for which the CPU engine is not faster; 0: none but all."""
        counts = {int(array.shape[0]) for array, _ in self._open(given)}
        if not self.part.by_rows or len(counts) != 1:
            return 0
        [rows] = counts
        if slower_too:
            return 1
        found: int = rows
        for share in _SHARES:
            fewer = max(1, round(share * rows))
            cut = dict(given) | {t.name: array[:fewer] for array, t in self._open(given)}
            cpu_us = _quartile([self._in_cpu(cut)[0] for _ in range(_ROUNDS)])
            if not compiled_serves(compiled_us, cpu_us, same_cores=device.profile.family.processor):
                break
            found = fewer
        return found

    def _open(self, given: Values) -> list[tuple[NDArray[Any], PartTensor]]:
        """The inputs whose size depends on the data."""
        return [(given[tensor.name], tensor) for tensor in self.part.inputs if -1 in tensor.shape]

    def _turn(self, given: Values) -> tuple[float, float]:
        """Microseconds compiled, and in the CPU engine, whose way to and fro is what handing over takes."""
        cpu_us, handing_over = self._in_cpu(given)
        began = time.perf_counter_ns()
        self.form.run(given)
        return (time.perf_counter_ns() - began) / 1e3 + handing_over, cpu_us

    def _in_cpu(self, given: Values) -> tuple[float, float]:
        """Microseconds of a run, and of the way there and back."""
        began = time.perf_counter_ns()
        ran, _ = self.parts.run_chain([self.number], given, [tensor.name for tensor in self.part.outputs])
        return ran.ns / 1e3, (time.perf_counter_ns() - began - ran.ns) / 1e3


def _quartile(taken: Sequence[float]) -> float:
    return sorted(taken)[(len(taken) - 1) // 4]
