"""Describes a model's interface and its compiled file, as far as the service uses them."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from honed.machine.profile import DeviceIdentity
from honed.protocol import strict
from honed.protocol.values import (
    ComparedOutput,
    ModelProof,
    PartitionInfo,
    ShownKernel,
    SpecialisationInfo,
    TensorMetadata,
)
from honed.runtime.compiled.model import (
    CompiledModel,
    Copy,
    CpuPartition,
    HostCall,
    Launch,
    PartitionTable,
    PartitionTensor,
    SizeSpecialisation,
    SourceModel,
    Tensor,
)
from honed.runtime.dtypes import dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An input or output. A size of -1 is dynamic; `shape` None: any number of dimensions.

    `symbols` holds the name of each dimension, "" if it has none; dimensions of a name have equal sizes.
    """

    name: str
    dtype: str  # NumPy's name
    shape: tuple[int, ...] | None
    symbols: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Return whether the shape is known only at run time."""
        return self.shape is None or -1 in self.shape

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor may have this shape."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            size in (-1, given) for size, given in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """The interface of a file, with its opset and producer.

    `state` pairs outputs with the inputs that receive them next. Inputs that are `in_place` are caches with
    room for new rows, whose position another input has; None: stored by an earlier version.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    producer: str
    state: tuple[tuple[str, str], ...] = ()
    in_place: tuple[str, ...] | None = field(default=None, metadata=strict.ABSENT)


@dataclass(frozen=True, kw_only=True)  # Cached properties need a __dict__, so there are no slots
class CompiledFileInfo:
    """A summary of a valid compiled file, without constants, sources and plan.

    `schedules` is a SHA-256 over what the device runs; it is equal for files that differ only in dates and
    notes. `outputs` are the model's. The steps produce the tensors `handed`, some of which may be inputs of
    the tail, the last of `parts`.
    """

    source: SourceModel
    compiler: dict[str, str]
    device: DeviceIdentity
    inputs: tuple[Tensor, ...]
    outputs: tuple[PartitionTensor, ...]
    handed: tuple[Tensor, ...]
    kernels: tuple[ShownKernel, ...]
    launches: int
    copies: int
    host_calls: int
    constant_bytes: int
    arena_bytes: int
    prepared_bytes: int
    proof: ModelProof | None
    schedules: str
    parts: tuple[PartitionInfo, ...] = ()
    preconditions: tuple[str, ...] = ()
    names_values: bool = False

    @property
    def may_assume_values(self) -> bool:
        """Return whether outputs may be wrong for values of integer inputs that no precondition covers."""
        return not self.names_values and any(tensor.dtype in ("int32", "int64") for tensor in self.inputs)

    @functools.cached_property
    def engine(self) -> str:
        """The kind that answers report: "gpu", or "gpu+cpu" if the CPU engine runs partitions."""
        return "gpu+cpu" if self.parts else "gpu"

    @property
    def device_bytes(self) -> int:
        """The bytes of device memory that the file needs."""
        return self.constant_bytes + self.arena_bytes + self.prepared_bytes

    @functools.cached_property
    def interface(self) -> Interface:
        """The interface; with CPU partitions, sizes of outputs may be dynamic."""
        return interface_of(self.inputs, self.outputs)


def interface_of(inputs: Sequence[Tensor], outputs: Sequence[PartitionTensor]) -> Interface:
    """Return the interface of a compiled file with these inputs and outputs."""
    return Interface(inputs=_as_open(inputs), outputs=_as_open(outputs), opset=0, producer="")


def _as_open(tensors: Sequence[Tensor | PartitionTensor]) -> tuple[TensorSpec, ...]:
    return tuple(strict.copy_fields(TensorSpec, tensor, "symbols") for tensor in tensors)


def summarise(model: CompiledModel) -> CompiledFileInfo:
    """Return the summary of a compiled model, without what only a worker needs."""
    return strict.copy_fields(
        CompiledFileInfo,
        model,
        device=model.device.identity,
        outputs=model.model_outputs,
        handed=model.outputs,
        kernels=_kernels(model),
        launches=sum(isinstance(step, Launch) for step in model.steps),
        copies=sum(isinstance(step, Copy) for step in model.steps),
        host_calls=sum(isinstance(step, HostCall) for step in model.steps),
        arena_bytes=sum(each.arena_bytes for each in (model, *(form.model for form in model.forms))),
        prepared_bytes=sum(each.prepared_bytes for each in (model, *(form.model for form in model.forms))),
        proof=_proof(model),
        schedules=_schedules(model),
        parts=_parts(model),
        preconditions=tuple(map(str, model.preconditions)),
    )


def _parts(model: CompiledModel) -> tuple[PartitionInfo, ...]:
    """Return the compiled partition, then those of the CPU engine; nothing without a partition table."""
    split = model.split
    if split is None:
        return ()
    whole = PartitionInfo(engine="gpu", nodes=split.nodes, flops=split.flops)
    return whole, *(_part(model, split, n, part) for n, part in enumerate(split.parts))


def _part(model: CompiledModel, split: PartitionTable, number: int, part: CpuPartition) -> PartitionInfo:
    return strict.copy_fields(
        PartitionInfo,
        part,
        engine="cpu",
        inputs=tuple(map(_tensor, part.inputs)),
        outputs=tuple(map(_tensor, part.outputs)),
        last=number in split.tail,
        forms=(
            *(_form(form) for form in model.forms if form.part == number),
            *(SpecialisationInfo(sizes=o.sizes, why=o.why) for o in split.left_out if o.part == number),
        ),
    )


def _form(form: SizeSpecialisation) -> SpecialisationInfo:
    shown, times = SpecialisationInfo(sizes=form.sizes, least=form.least), form.times
    return replace(shown, compiled_us=times.compiled_us, cpu_us=times.cpu_us) if times is not None else shown


def _tensor(tensor: PartitionTensor) -> TensorMetadata:
    return TensorMetadata(name=tensor.name, datatype=dtype(tensor.dtype).datatype, shape=tensor.shape)


def _kernels(model: CompiledModel) -> tuple[ShownKernel, ...]:
    launches, prepared = (
        Counter(step.kernel for step in steps if isinstance(step, Launch))
        for steps in (model.steps, model.prepare)
    )
    own = tuple(
        strict.copy_fields(ShownKernel, kernel, launches=launches[n], prepared=prepared[n])
        for n, kernel in enumerate(model.kernels)
    )
    return *own, *(kernel for form in model.forms for kernel in _of_form(form))


def _of_form(form: SizeSpecialisation) -> Iterator[ShownKernel]:
    """Yield the kernels of a specialisation, with 0 launches, as only inferences of its sizes run them."""
    sizes = "x".join(map(str, form.sizes))
    for kernel in _kernels(form.model):
        yield replace(kernel, name=f"{kernel.name} [part {form.part}, size {sizes}]", launches=0)


def _proof(model: CompiledModel) -> ModelProof | None:
    proof = model.proof
    if proof is None:
        return None
    outputs = tuple(
        ComparedOutput(
            name=tensor.name,
            tolerance=max((probe.tolerance[i] for probe in proof.probes), default=0.0),
            error=proof.error[i] if proof.error else None,
            covered=proof.covered[i] if proof.covered else None,
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
    for form in model.forms:
        digest.update(repr((form.part, form.sizes, form.least, _schedules(form.model))).encode())
    for out in model.split.left_out if model.split is not None else ():
        digest.update(repr((out.part, out.sizes)).encode())
    return digest.hexdigest()
