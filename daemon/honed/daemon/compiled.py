"""What the service knows of a compiled file. Its constants, kernel sources and plan stay in the file."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from honed.protocol import strict
from honed.protocol.results import ComparedOutput, ModelProof, ShownKernel
from honed.runtime.model import CompiledModel, Copy, HostCall, Launch, Source, Tensor
from honed.runtime.profile import DeviceIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled file that is whole and keeps every rule of its format.

    `schedules` is a SHA-256 over what the device runs: equal for files that differ in nothing but dates and
    notes.
    """

    source: Source
    compiler: dict[str, str]
    device: DeviceIdentity
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    kernels: tuple[ShownKernel, ...]
    launches: int
    copies: int
    host_calls: int
    constant_bytes: int
    arena_bytes: int
    prepared_bytes: int
    proof: ModelProof | None
    schedules: str


def summarise(model: CompiledModel) -> Compiled:
    """Leave out what only a worker needs."""
    return Compiled(
        source=model.source,
        compiler=model.compiler,
        device=model.device.identity,
        inputs=model.inputs,
        outputs=model.outputs,
        kernels=_kernels(model),
        launches=sum(isinstance(step, Launch) for step in model.steps),
        copies=sum(isinstance(step, Copy) for step in model.steps),
        host_calls=sum(isinstance(step, HostCall) for step in model.steps),
        constant_bytes=model.constant_bytes,
        arena_bytes=model.arena_bytes,
        prepared_bytes=model.prepared_bytes,
        proof=_proof(model),
        schedules=_schedules(model),
    )


def _kernels(model: CompiledModel) -> tuple[ShownKernel, ...]:
    launches, prepared = (
        Counter(step.kernel for step in steps if isinstance(step, Launch))
        for steps in (model.steps, model.prepare)
    )
    return tuple(
        strict.like(ShownKernel, kernel, launches=launches[n], prepared=prepared[n])
        for n, kernel in enumerate(model.kernels)
    )


def _proof(model: CompiledModel) -> ModelProof | None:
    proof = model.proof
    if proof is None:
        return None
    outputs = tuple(
        ComparedOutput(
            name=tensor.name,
            tolerance=max((probe.tolerance[i] for probe in proof.probes), default=0.0),
            error=proof.error[i] if proof.error else None,
        )
        for i, tensor in enumerate(model.outputs)
    )
    return ModelProof(
        reference=proof.reference, probes=len(proof.probes), device=proof.device, outputs=outputs
    )


def _schedules(model: CompiledModel) -> str:
    digest = hashlib.sha256()
    for kernel in model.kernels:
        digest.update(repr((kernel.entry, kernel.grid, kernel.block)).encode())
        digest.update(model.sources[kernel.source].encode())
    if model.prepare:
        digest.update(repr(model.prepare).encode())
    return digest.hexdigest()
