"""Checks the rules of models in partitions (docs/dev/format.md).

The partitions' process reads the ONNX files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from honed.runtime.dtypes import DTYPES, dtype
from honed.runtime.engines import LEVELS

from .model import CompiledModel, CpuPartition, PartitionTable, PartitionTensor, Probe, Tensor
from .plan import check_there, require

MAX_PARTS = 16
MAX_REASONS = 64  # Reasons of one partition
MAX_SIZES = 64  # Sizes of all partitions: specialised, or skipped
_MAX_RANK = 32
_MAX_BYTES = 1 << 40  # Bytes of one tensor: larger sizes might overflow when multiplied
_DTYPE_NAMES = frozenset(d.name for d in DTYPES)


def check(model: CompiledModel) -> None:
    """Raise ModelFileError if the partitions break a rule; `plan` checks the steps that run them."""
    split = model.split
    if split is None:
        require(not model.forms, "there are forms of parts, and no parts")
        return
    require(0 < len(split.parts) <= MAX_PARTS, f"the model has {len(split.parts)} parts")
    require(split.nodes >= 0 and split.flops >= 0, "less than nothing of the model is compiled")
    for i, part in enumerate(split.parts):
        _check_part(model, f"part {i}", part, tail=i in split.tail)
    made = _check_behind(model, split)
    _check_tensors("the model", "output", split.outputs, tail=True)
    require(bool(split.outputs), "the model has no outputs")
    for tensor in split.outputs:
        require(_signature(tensor) in made, f"nothing gives output {tensor.name!r} of the model")
    _check_forms(model, split)


def _check_behind(model: CompiledModel, split: PartitionTable) -> set[_Signature]:
    """Return the outputs of steps and tail; check that each partition of the tail gets its inputs.

    Raises ModelFileError if a rule is broken.
    """
    require(len(set(split.tail)) == len(split.tail), "a part runs twice behind the steps")
    made = _signatures(model.outputs)
    for number in split.tail:
        require(0 <= number < len(split.parts), f"there is no part {number}")
        part = split.parts[number]
        there = made | _signatures(model.inputs)
        for tensor in part.inputs:
            require(_signature(tensor) in there, f"nothing gives input {tensor.name!r} of part {number}")
        given = {name for name, _, _ in made}
        both = next((t.name for t in part.outputs if t.name in given), "")
        require(not both, f"two things give {both!r}")
        made |= _signatures(part.outputs)
    return made


def _check_forms(model: CompiledModel, split: PartitionTable) -> None:
    """Raise ModelFileError unless size specialisations are of partitions that may have them.

    `validate.check` checks the rules of the specialisations' own models.
    """
    known = [(form.part, form.sizes) for form in model.forms]
    known += [(out.part, out.sizes) for out in split.left_out]
    require(len(known) <= MAX_SIZES, f"parts were compiled for {len(known)} sizes")
    require(len(set(known)) == len(known), "a part has two forms for the same sizes")
    for number, sizes in known:
        require(
            number in split.tail, f"there are sizes of part {number}, which does not run behind the steps"
        )
        part = split.parts[number]
        require(
            part.sized and len(sizes) == open_count(part.inputs) and all(size > 0 for size in sizes),
            f"part {number} cannot be compiled for the sizes {list(sizes)}",
        )
    for form in model.forms:
        part, own = split.parts[form.part], form.model
        called = f"the form of part {form.part} for {list(form.sizes)}"
        wanted = fill_sizes(part.inputs, form.sizes)
        require(
            [_signature(t) for t in own.inputs] == [_signature(t) for t in wanted], f"{called} takes others"
        )
        gives = len(own.outputs) == len(part.outputs) and all(
            (t.name, t.dtype) == (o.name, o.dtype) and takes(t, o.shape)
            for t, o in zip(part.outputs, own.outputs, strict=True)
        )
        require(gives, f"{called} gives others")
        require(own.split is None and not own.forms, f"{called} has parts of its own")
        require(own.constant_bytes == model.constant_bytes, f"{called} has another constant section")
        rows = part.by_rows and len(set(form.sizes)) == 1 and 0 < form.least <= form.sizes[0]
        require(form.least == 0 or rows, f"{called} cannot run for {form.least} rows")
        times = form.times
        measured = times is None or all(0 < us < math.inf for us in (times.compiled_us, times.cpu_us))
        require(measured, f"{called} was run in no time at all")


def open_count(tensors: Iterable[PartitionTensor]) -> int:
    """Return the number of sizes of the tensors that depend on the data."""
    return sum(tensor.shape.count(-1) for tensor in tensors)


def fill_sizes(tensors: Iterable[PartitionTensor], sizes: Sequence[int]) -> tuple[PartitionTensor, ...]:
    """Return the tensors with each -1 replaced by the next of `sizes`."""
    left = iter(sizes)
    return tuple(
        replace(t, shape=tuple(next(left) if size == -1 else size for size in t.shape)) for t in tensors
    )


def covers(sizes: Sequence[int], least: int, observed: Sequence[int]) -> bool:
    """Return whether a specialisation for `sizes` runs a partition with the `observed` sizes.

    `least` is that of `SizeSpecialisation`.
    """
    if tuple(sizes) == tuple(observed):
        return True
    return least > 0 and len(set(observed)) == 1 and least <= observed[0] <= sizes[0]


def observed_sizes(tensors: Iterable[PartitionTensor], shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sizes in `shapes` at the place of each -1 of the tensors, in order."""
    return tuple(
        found
        for tensor, shape in zip(tensors, shapes, strict=True)
        for size, found in zip(tensor.shape, shape, strict=True)
        if size == -1
    )


def check_probe(model: CompiledModel, where: str, probe: Probe) -> None:
    """Raise ModelFileError unless a probe has the outputs of the tail."""
    outputs = model.tail_outputs
    require(
        len(probe.behind) in (0, len(outputs)),
        f"{where} has {len(probe.behind)} outputs of parts, which make {len(outputs)}",
    )
    for index, tensor in zip(probe.behind, outputs, strict=False):
        check_there(where, "buffer", index, model.buffers)
        buffer = model.buffers[index]
        require(
            (buffer.place, buffer.dtype) == ("constant", tensor.dtype) and takes(tensor, buffer.shape),
            f"{where}: buffer {index} is no constant that output {tensor.name!r} of a part can be",
        )


def takes(tensor: PartitionTensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor may have this shape."""
    return len(shape) == len(tensor.shape) and all(
        size in (-1, given) for size, given in zip(tensor.shape, shape, strict=True)
    )


def _check_part(model: CompiledModel, where: str, part: CpuPartition, *, tail: bool) -> None:
    check_there(where, "buffer", part.onnx, model.buffers)
    buffer = model.buffers[part.onnx]
    require(
        (buffer.place, buffer.dtype, len(buffer.shape)) == ("constant", "uint8", 1) and buffer.nbytes > 0,
        f"{where}: buffer {part.onnx} is no constant of bytes",
    )
    require(part.nodes >= 0 and part.flops >= 0, f"{where} has less than no work")
    require(part.level in LEVELS, f"{where} has the unknown level {part.level!r}")
    require(len(part.why) <= MAX_REASONS, f"{where} has {len(part.why)} reasons")
    require(tail or not part.sized, f"{where} is sized and does not run behind the steps")
    rows = part.sized and all(-1 not in tensor.shape[1:] for tensor in (*part.inputs, *part.outputs))
    require(rows or not part.by_rows, f"{where} has no rows that could be computed each by itself")
    _check_tensors(where, "input", part.inputs, tail=tail)
    _check_tensors(where, "output", part.outputs, tail=tail)
    require(bool(part.outputs), f"{where} has no outputs")


def _check_tensors(where: str, what: str, tensors: Sequence[PartitionTensor], *, tail: bool) -> None:
    names = [tensor.name for tensor in tensors]
    require(all(names) and len(set(names)) == len(names), f"{where}: an {what}'s name is empty or not unique")
    least = -1 if tail else 0
    for tensor in tensors:
        called = f"{where}: {what} {tensor.name!r}"
        require(tensor.dtype in _DTYPE_NAMES, f"{called} has the unknown element type {tensor.dtype!r}")
        require(
            len(tensor.shape) <= _MAX_RANK and all(size >= least for size in tensor.shape),
            f"{called} has the shape {list(tensor.shape)}",
        )
        require(
            math.prod(abs(size) for size in tensor.shape) * dtype(tensor.dtype).itemsize <= _MAX_BYTES,
            f"{called} is larger than any can be",
        )


_Signature = tuple[str, str, tuple[int, ...]]


def _signature(tensor: PartitionTensor | Tensor) -> _Signature:
    return tensor.name, tensor.dtype, tensor.shape


def _signatures(tensors: Iterable[PartitionTensor | Tensor]) -> set[_Signature]:
    return {_signature(tensor) for tensor in tensors}
