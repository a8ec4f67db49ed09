"""Whether a part is to run compiled for sizes: by turns with the CPU engine, on the device that will serve it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.runtime import modelfile
from honed.runtime.cpuparts import CpuParts, OpenParts
from honed.runtime.devices import Device
from honed.runtime.engines import compiled_serves
from honed.runtime.executor import Executor
from honed.runtime.model import FormTimes
from honed.runtime.partlimits import PROVING_MIB, PartLimits

_ROUNDS = 7  # runs of each
Values = Mapping[str, NDArray[Any]]


def in_turns(main: Path, part: int, compiled: Path, device: Device) -> FormTimes:
    """Time part number `part` of the compiled file `main` in both, on the inputs of its form's first probe.

    The lower quartiles: what else runs on the machine can only make a run longer. Raises as running does.
    """
    with modelfile.read(main, verify=False) as whole, modelfile.read(compiled, verify=False) as file:
        proof = file.model.proof
        assert proof is not None  # compiling made it
        given = {
            tensor.name: np.array(file.constant(index))
            for tensor, index in zip(file.model.inputs, proof.probes[0].inputs, strict=True)
        }
        wanted = [tensor.name for tensor in file.model.outputs]
        process = CpuParts(PartLimits(memory_mib=PROVING_MIB))
        with process.open(whole) as parts, Executor(file, device) as form:
            taken = [_turn(parts, part, form, given, wanted) for _ in range(_ROUNDS + 1)][1:]
    compiled_us, cpu_us = (sorted(each)[(_ROUNDS - 1) // 4] for each in zip(*taken, strict=True))
    return FormTimes(compiled_us=compiled_us, cpu_us=cpu_us)


def why_not(times: FormTimes, device: Device) -> str:
    """Why the CPU engine is to run the part nevertheless, or ""."""
    same_cores = device.profile.family.processor
    if compiled_serves(times.compiled_us, times.cpu_us, same_cores=same_cores):
        return ""
    return (
        f"the CPU engine is faster: compiled {times.compiled_us / 1e3:.3g} ms with handing over, ONNX Runtime "
        f"{times.cpu_us / 1e3:.3g} ms, measured in turns"
    )


def _turn(
    parts: OpenParts, part: int, form: Executor, given: Values, wanted: list[str]
) -> tuple[float, float]:
    """Microseconds compiled, and in the CPU engine, whose way to and fro is what handing over takes."""
    began = time.perf_counter_ns()
    ran, _ = parts.run_chain([part], given, wanted)
    handing_over = time.perf_counter_ns() - began - ran.ns
    began = time.perf_counter_ns()
    form.run(given)
    return (time.perf_counter_ns() - began + handing_over) / 1e3, ran.ns / 1e3
