"""Compiles models in memory and runs them once, unproven."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx

from honed.machine.devices import Device
from honed.protocol import strict
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel, SourceModel
from honed.runtime.execution.cpuparts import CpuParts
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.partcalls import PROVING_MIB, PartLimits

from . import frontend
from .assemble import assemble
from .attend import joins
from .frontend import Precision
from .lower.module import First, lower_module
from .schedules import first_kernels


def opened(model: CompiledModel, constants: Mapping[int, np.ndarray], device: Device) -> Executor:
    """An executor over a file that is gone when the executor is closed."""
    with tempfile.TemporaryDirectory(prefix="honed-") as folder:
        path = Path(folder) / "draft.honed"
        modelfile.write(path, model, constants)
        parts = CpuParts(PartLimits(memory_mib=PROVING_MIB))
        return Executor(modelfile.read(path, verify=False), device, parts=parts)


def run_model(
    model: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
    device: Device,
    precision: Precision = "auto",
    first: First = first_kernels,
) -> dict[str, np.ndarray]:
    """Compile a model of static shapes with schedules that need no trial, and run it once.

    Computes in the model's own types where the precision is "auto".
    Raises as `compile_file`.
    """
    return next(run_sets(model, [inputs], device, precision, first))


def run_sets(
    model: onnx.ModelProto,
    inputs: Iterable[Mapping[str, np.ndarray]],
    device: Device,
    precision: Precision,
    first: First,
    processes: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Compile likewise, and run with several sets of inputs, one when its outputs are asked for.

    `processes` is as in `CompileRequest`.
    """
    profile = device.profile
    normalised = frontend.normalise(
        model, precision=precision, fp16=profile.limits.fp16, fp64=profile.limits.fp64
    )
    imported = frontend.import_named(normalised)
    lowered = lower_module(
        imported.module,
        profile,
        first=first,
        names=imported.names,
        processes=processes,
        joins=joins(profile),
    )
    sha256 = hashlib.sha256(model.SerializeToString()).hexdigest()
    source = strict.like(SourceModel, normalised, sha256=sha256, filename="(in memory)", notes=())
    compiled, constants = assemble(source, profile, normalised, lowered, None)
    with opened(compiled, constants, device) as executor:
        for each in inputs:
            yield executor.run(each)
