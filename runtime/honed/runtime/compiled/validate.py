"""Checks every rule of a compiled model before anything of it reaches a device.

`check` raises ModelFileError with the first broken rule. `plan` has the rules of the order of steps, and of
what they may read and write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise

from honed.protocol.errors import ModelFileError, ProfileError
from honed.runtime.dtypes import DTYPES, dtype

from . import parts, plan
from .model import Buffer, CompiledModel, Kernel, Place, Probe, Selection, Tensor
from .plan import check_there, require

MAX_RANK = 32  # NumPy 1's limit
MAX_GRID = 2**31 - 1  # Work-groups along one axis
CONSTANT_OFFSET_ALIGN = 64  # Bytes: suits any dtype, and is a cache line
PRECISIONS = ("fp16", "fp32", "fp64", "mixed")
MAX_KERNEL_WORDS = 100_000  # Occurrences in the sources: far more than kernels of any model
_DECLARATION = 800  # Characters from __kernel to the end of its name: attributes and the type
_KERNEL = re.compile(
    r"kernel(?:(?<=\b__kernel)|(?<=\bkernel))\b"
)  # A pattern that begins with letters is searched faster
_HEAD = re.compile(rf"[^;{{}}]{{0,{_DECLARATION}}}")
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(", re.ASCII)
_DTYPE_NAMES = frozenset(d.name for d in DTYPES)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check(model: CompiledModel) -> None:
    """Raise ModelFileError unless `model` keeps every rule of docs/dev/format.md."""
    _check_identity(model)
    _check_buffers(model)
    _check_tensors(model)
    _check_kernels(model)
    parts.check(model)
    plan.check(model)
    _check_parts(model)
    _check_proof(model)
    _check_preconditions(model)
    for form in model.forms:
        check(form.model)  # Recursion ends: `parts` refuses specialisations of specialisations


def _check_identity(model: CompiledModel) -> None:
    require(
        bool(_SHA256.fullmatch(model.source.sha256)), "source.sha256 is not 64 lower-case hexadecimal digits"
    )
    require(model.source.precision in PRECISIONS, f"precision {model.source.precision!r} is unknown")
    require(model.source.opset >= 0, f"opset {model.source.opset} is negative")
    try:
        model.device.check()
    except ProfileError as error:
        raise ModelFileError(f"the device profile in the model is impossible: {error}") from error


def _check_buffers(model: CompiledModel) -> None:
    limits = model.device.limits
    for nbytes, section in (
        (model.arena_bytes, "the scratch arena"),
        (model.prepared_bytes, "the prepared section"),
    ):
        require(
            0 <= nbytes <= limits.global_mem_bytes,
            f"{section} of {nbytes} bytes exceeds the device's memory, {limits.global_mem_bytes}",
        )
    require(model.constant_bytes >= 0, "the constant section has a negative size")
    plan.check_declared(model.buffers, limits.base_align_bytes)
    for i, buffer in enumerate(model.buffers):
        _check_buffer(f"buffer {i}", buffer)
        require(
            buffer.nbytes <= limits.max_alloc_bytes,
            f"buffer {i} of {buffer.nbytes} bytes exceeds what the device can allocate at once, "
            f"{limits.max_alloc_bytes}",
        )
    constants, prepared, scratch = (
        [(i, b) for i, b in enumerate(model.buffers) if b.place == place and b.within is None]
        for place in ("constant", "prepared", "scratch")
    )
    _check_places(scratch, limits.base_align_bytes, model.arena_bytes, "the scratch arena")
    _check_places(prepared, limits.base_align_bytes, model.prepared_bytes, "the prepared section")
    _check_allocations(model, "scratch")
    _check_allocations(model, "prepared")
    _check_places(constants, CONSTANT_OFFSET_ALIGN, model.constant_bytes, "the constant section")
    _check_disjoint(constants, "constants")
    _check_disjoint(prepared, "prepared values")


def _check_allocations(model: CompiledModel, place: Place) -> None:
    most = model.device.limits.max_alloc_bytes
    largest = max(map(len, plan.allocations(model.buffers, place)), default=0)
    require(
        largest <= most,
        f"{largest} bytes of {place} buffers lie together, more than the {most} that the device can allocate "
        "at once",
    )


def _check_buffer(where: str, buffer: Buffer) -> None:
    require(buffer.dtype in _DTYPE_NAMES, f"{where} has the unknown element type {buffer.dtype!r}")
    require(
        len(buffer.shape) <= MAX_RANK, f"{where} has {len(buffer.shape)} dimensions, more than {MAX_RANK}"
    )
    require(all(d >= 0 for d in buffer.shape), f"{where} has a negative dimension")
    size = math.prod(buffer.shape) * dtype(buffer.dtype).itemsize
    require(
        buffer.nbytes == size,
        f"{where} says {buffer.nbytes} bytes and {buffer.dtype}{list(buffer.shape)} takes {size}",
    )
    if buffer.place in ("input", "output") and buffer.within is None:
        require(
            buffer.offset == 0,
            f"{where} is an {buffer.place} and has the offset {buffer.offset} instead of 0",
        )


def _check_places(buffers: Iterable[tuple[int, Buffer]], align: int, end: int, section: str) -> None:
    for i, buffer in buffers:
        require(buffer.offset >= 0, f"buffer {i} has a negative offset")
        require(
            buffer.offset % align == 0, f"buffer {i} is at offset {buffer.offset}, no multiple of {align}"
        )
        require(
            buffer.offset + buffer.nbytes <= end,
            f"buffer {i} ends at {buffer.offset + buffer.nbytes}, outside {section} of {end} bytes",
        )


def _check_disjoint(buffers: list[tuple[int, Buffer]], what: str) -> None:
    filled = sorted((b.offset, b.offset + b.nbytes, i) for i, b in buffers if b.nbytes)
    for (_, end, i), (start, _, j) in pairwise(filled):
        require(end <= start, f"the {what} in buffers {i} and {j} overlap")


def _check_tensors(model: CompiledModel) -> None:
    for place, tensors in (("input", model.inputs), ("output", model.outputs)):
        names = [t.name for t in tensors]
        require(all(names), f"an {place} has an empty name")
        require(len(set(names)) == len(names), f"two {place}s have the same name")
        for tensor in tensors:
            _check_tensor(model, f"{place} {tensor.name!r}", place, tensor)
        bound = [t.buffer for t in tensors]
        owned = {i for i, b in enumerate(model.buffers) if b.place == place and b.within is None}
        require(owned <= set(bound), f"an {place} buffer belongs to no {place}")
        if place == "input":
            require(len(set(bound)) == len(bound), "two inputs share a buffer")


def _check_tensor(model: CompiledModel, where: str, place: str, tensor: Tensor) -> None:
    check_there(where, "buffer", tensor.buffer, model.buffers)
    buffer = model.buffers[tensor.buffer]
    places = ("input", "output") if place == "input" else ("output",)  # Some outputs keep most of an input
    require(buffer.place in places, f"{where} is in buffer {tensor.buffer}, which is of place {buffer.place}")
    require(buffer.within is None, f"{where} is in buffer {tensor.buffer}, which lies within another")
    require(tensor.dtype in _DTYPE_NAMES, f"{where} has the unknown element type {tensor.dtype!r}")
    require(
        tensor.shape == buffer.shape,
        f"{where} has shape {list(tensor.shape)} and its buffer {list(buffer.shape)}",
    )
    kinds = {dtype(name).floating for name in (tensor.dtype, buffer.dtype)}
    require(len(kinds) == 1, f"{where} is {tensor.dtype} and its buffer {buffer.dtype}, which cannot be cast")


def _check_kernels(model: CompiledModel) -> None:
    require(all("\0" not in source for source in model.sources), "an OpenCL source holds a zero character")
    names = [kernel.name for kernel in model.kernels]
    require(all(names) and len(set(names)) == len(names), "kernel names are empty or not unique")
    words = sum(len(_KERNEL.findall(source)) for source in model.sources)
    require(words <= MAX_KERNEL_WORDS, f"the OpenCL sources say __kernel {words} times")
    declared = [_kernel_names(source) for source in model.sources]
    for kernel in model.kernels:
        _check_kernel(model, f"kernel {kernel.name!r}", kernel, declared)


def _kernel_names(source: str) -> frozenset[str]:
    """Return every name that an OpenCL source may declare as a kernel."""
    return frozenset(
        name
        for start in _KERNEL.finditer(source)
        for name in _CALLED.findall(_HEAD.match(source, start.end())[0])  # type: ignore[index]
    )


def _check_kernel(model: CompiledModel, where: str, kernel: Kernel, declared: list[frozenset[str]]) -> None:
    limits = model.device.limits
    check_there(where, "source", kernel.source, model.sources)
    require(
        bool(_IDENTIFIER.fullmatch(kernel.entry)), f"{where} has the entry {kernel.entry!r}, no C identifier"
    )
    require(
        kernel.entry in declared[kernel.source], f"{where}: its source declares no __kernel {kernel.entry}"
    )
    require(
        min(kernel.block) >= 1 and limits.allows_group(kernel.block),
        f"{where} has work-groups of {list(kernel.block)} and the device allows {limits.max_work_group_size} "
        f"in all and {list(limits.max_work_item_sizes)} along each axis",
    )
    require(
        all(1 <= groups <= MAX_GRID for groups in kernel.grid),
        f"{where} has a grid of {list(kernel.grid)}; each must be from 1 to {MAX_GRID}",
    )
    require(kernel.flops >= 0 and kernel.bytes >= 0, f"{where} has negative work")
    for i, arg in enumerate(kernel.args):
        require(
            arg.dtype in _DTYPE_NAMES, f"{where}: argument {i} has the unknown element type {arg.dtype!r}"
        )
        require(arg.nbytes >= 0, f"{where}: argument {i} has a negative size")


def _check_parts(model: CompiledModel) -> None:
    for i, part in enumerate(model.parts):
        for called, numbers, steps in (
            ("preparation step", part.prepare, model.prepare),
            ("step", part.steps, model.steps),
        ):
            for number in numbers:
                check_there(f"part {i}", called, number, steps)
    for i, view in enumerate(model.views):
        check_there(f"view {i}", "buffer", view.buffer, model.buffers)
        buffer = model.buffers[view.buffer]
        require(
            math.prod(view.shape) == math.prod(buffer.shape) and all(extent >= 0 for extent in view.shape),
            f"view {i} has shape {list(view.shape)} and its buffer {list(buffer.shape)}",
        )


def _check_proof(model: CompiledModel) -> None:
    proof = model.proof
    if proof is None:
        return
    require(
        len(proof.error) in (0, len(model.outputs)),
        f"the proof has {len(proof.error)} errors for its outputs",
    )
    require(all(_is_share(e) for e in proof.error), "the proof has an error that is negative or not finite")
    require(
        len(proof.covered) in (0, len(model.outputs)) and all(0 <= share <= 1 for share in proof.covered),
        "the proof does not say of each output which share of it is covered",
    )
    for i, selection in enumerate(proof.selections):
        _check_selection(model, f"selection {i} of the proof", selection)
    for i, probe in enumerate(proof.probes):
        _check_probe(model, f"probe {i}", probe)


def _check_preconditions(model: CompiledModel) -> None:
    names = {tensor.name for tensor in model.inputs}
    for i, each in enumerate(model.preconditions):
        require(each.input in names, f"precondition {i} is about {each.input!r}, which is no input")
        require(each.low <= each.high, f"precondition {i} allows no value: {each.low} to {each.high}")


def _check_selection(model: CompiledModel, where: str, selection: Selection) -> None:
    require(
        len(selection.outputs) == len(selection.axes) == len(set(selection.outputs)) > 0,
        f"{where} does not name outputs with an axis for each",
    )
    require(selection.score in (None, *selection.outputs), f"{where} has a score that is none of its outputs")
    rows = set()
    for number, axis in zip(selection.outputs, selection.axes, strict=True):
        check_there(where, "output", number, model.outputs)
        shape = model.outputs[number].shape
        require(0 <= axis < len(shape), f"{where} has an axis that output {number} has not")
        rows.add(shape[axis])
    require(len(rows) == 1 and rows != {0}, f"{where} has outputs of no rows, or of several numbers of them")


def _check_probe(model: CompiledModel, where: str, probe: Probe) -> None:
    require(len(probe.tolerance) == len(model.outputs), f"{where} has not one tolerance for each output")
    require(
        all(_is_share(t) for t in probe.tolerance), f"{where} has a tolerance that is negative or not finite"
    )
    for what, indices, tensors in (
        ("input", probe.inputs, model.inputs),
        ("output", probe.outputs, model.outputs),
    ):
        require(
            len(indices) == len(tensors), f"{where} has {len(indices)} {what}s and the model {len(tensors)}"
        )
        for index, tensor in zip(indices, tensors, strict=True):
            check_there(where, "buffer", index, model.buffers)
            buffer = model.buffers[index]
            require(
                (buffer.place, buffer.dtype, buffer.shape) == ("constant", tensor.dtype, tensor.shape),
                f"{where}: buffer {index} is not a constant of the type and shape of {what} {tensor.name!r}",
            )
    parts.check_probe(model, where, probe)


def _is_share(value: float) -> bool:
    return math.isfinite(value) and value >= 0
