"""Checks the steps of a plan: which buffers each may use, which are written first, which may share memory.

Preparation runs once, before the first inference: it uses constants and prepared buffers only, and no
inference may change what it wrote.

A buffer with all that lie within it is a family. No byte of a family is written through two buffers, and
each byte is written before it is read. A family is live from the first use of any of its buffers to the last.
Two scratch buffers may share bytes only if they are never live at the same step, or are of one family.
"readwrite" means that a kernel reads back what it wrote itself or updates in place, so it counts as a write
if it comes first.

The other modules of rules, too, report broken ones with `require`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from honed.protocol.errors import ModelFileError
from honed.runtime.dtypes import dtype

from .model import (
    CPU_PART,
    Buffer,
    CompiledModel,
    Copy,
    HostCall,
    Kernel,
    Launch,
    PartitionTensor,
    Place,
    Step,
)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A list of steps: its name in messages, and the places that its steps may read and write."""

    called: str
    reads: frozenset[Place]
    writes: frozenset[Place]


_PREPARATION = _Stage("preparation step", frozenset({"constant", "prepared"}), frozenset({"prepared"}))
_INFERENCE = _Stage("step", frozenset(get_args(Place)), frozenset({"output", "scratch"}))
_OF_FAMILIES: tuple[Place, ...] = ("input", "output", "scratch")  # Places of buffers within others


class Use(NamedTuple):
    """A use of one buffer by one step, which either writes the buffer, or reads what was written earlier."""

    buffer: int
    writes: bool


def family_of(buffers: Sequence[Buffer], index: int) -> int:
    """Return the index of the buffer that holds a buffer's memory: another, or itself."""
    within = buffers[index].within
    return index if within is None else within


def bytes_of(buffers: Sequence[Buffer], index: int) -> range:
    """Return the byte range of a buffer, counted from the start of its family."""
    buffer = buffers[index]
    start = 0 if buffer.within is None else buffer.offset
    return range(start, start + buffer.nbytes)


def share_bytes(buffers: Sequence[Buffer], one: int, other: int) -> bool:
    """Return whether two buffers are the same, or overlap within one family."""
    if one == other:
        return True
    mine, yours = bytes_of(buffers, one), bytes_of(buffers, other)
    alike = family_of(buffers, one) == family_of(buffers, other)
    return alike and mine.start < yours.stop and yours.start < mine.stop


def families(buffers: Sequence[Buffer]) -> frozenset[int]:
    """Return the indices of buffers that others lie within."""
    return frozenset(b.within for b in buffers if b.within is not None)


def check(model: CompiledModel) -> None:
    """Raise ModelFileError unless every step can run at its place in the order."""
    for where, step, stage in _in_order(model):
        _check_step(model, where, step)
        _check_access(model, where, step, stage)
    _check_order(model)
    _check_sharing(model)


def check_declared(buffers: Sequence[Buffer], align: int) -> None:
    """Raise ModelFileError unless each buffer declared to lie within another may, and does.

    `align` is the device's alignment of sub-buffers in bytes.
    """
    for i, buffer in enumerate(buffers):
        if buffer.within is None:
            continue
        where = f"buffer {i} lies within buffer {buffer.within}"
        require(0 <= buffer.within < len(buffers), f"{where}, which does not exist")
        outer = buffers[buffer.within]
        require(outer.within is None, f"{where}, which itself lies within another")
        alike = buffer.place == outer.place and buffer.place in _OF_FAMILIES
        require(alike, f"{where}, and they are of the places {buffer.place} and {outer.place}")
        require(buffer.dtype == outer.dtype, f"{where}, and they are {buffer.dtype} and {outer.dtype}")
        require(buffer.nbytes > 0, f"{where} and has no bytes")
        aligned = buffer.offset >= 0 and buffer.offset % align == 0
        require(aligned, f"{where} at offset {buffer.offset}, no multiple of {align}")
        end = buffer.offset + buffer.nbytes
        require(end <= outer.nbytes, f"{where}, which has {outer.nbytes} bytes, and ends at {end}")


def uses(kernels: Sequence[Kernel], step: Step) -> Iterator[Use]:
    """Yield every use of a buffer by `step`, in the order of its arguments."""
    if isinstance(step, Launch):
        for arg, index in zip(kernels[step.kernel].args, step.buffers, strict=True):
            yield Use(index, writes=arg.access != "read")
    elif isinstance(step, Copy):
        yield Use(step.source, writes=False)
        yield Use(step.target, writes=True)
    else:
        yield from (Use(index, writes=False) for index in step.inputs)
        yield from (Use(index, writes=True) for index in step.outputs)


def constants_of(model: CompiledModel, steps: Iterable[Step]) -> frozenset[int]:
    """Return the indices of the constants that the steps read."""
    touched = {use.buffer for step in steps for use in uses(model.kernels, step)}
    return frozenset(index for index in touched if model.buffers[index].place == "constant")


def allocations(buffers: Sequence[Buffer], place: Place) -> list[range]:
    """Return the byte ranges of a section that are allocated together, in order.

    Buffers that overlap share one range.
    """
    found: list[range] = []
    for start, end in sorted(
        (b.offset, b.offset + b.nbytes) for b in buffers if b.place == place and b.within is None and b.nbytes
    ):
        if found and start < found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, end))
        else:
            found.append(range(start, end))
    return found


def fail(problem: str) -> ModelFileError:
    """Return the error for a model that breaks a rule."""
    return ModelFileError(f"{problem}; compile the model again")


def require(condition: bool, problem: str) -> None:
    """Raise the error of `fail` if the condition is false."""
    if not condition:
        raise fail(problem)


def check_there(where: str, what: str, number: int, of: Sequence[object]) -> None:
    """Raise ModelFileError unless `number` is the index of an item of `of`."""
    if not 0 <= number < len(of):
        raise fail(f"{where} names {what} {number}, which does not exist")


def _in_order(model: CompiledModel) -> Iterator[tuple[str, Step, _Stage]]:
    """Yield all steps in the order in which they first run, with their names in messages and their stages."""
    for stage, steps in ((_PREPARATION, model.prepare), (_INFERENCE, model.steps)):
        for i, step in enumerate(steps):
            yield f"{stage.called} {i}", step, stage


def _check_step(model: CompiledModel, where: str, step: Step) -> None:
    if isinstance(step, Launch):
        _check_launch(model, where, step)
    elif isinstance(step, Copy):
        _check_indices(model, where, (step.source, step.target))
        source, target = model.buffers[step.source], model.buffers[step.target]
        if source.nbytes != target.nbytes:
            raise fail(f"{where} copies {source.nbytes} bytes to a buffer of {target.nbytes}")
    else:
        _check_indices(model, where, step.inputs + step.outputs)
        if step.function != CPU_PART:
            raise fail(f"{where} calls the host function {step.function!r}, which does not exist")
        _check_part_call(model, where, step)


def _check_part_call(model: CompiledModel, where: str, step: HostCall) -> None:
    """Raise ModelFileError unless a host call of a partition has its inputs and outputs."""
    split = model.split
    attrs = dict(step.attrs)
    number, wanted = attrs.pop("part", None), attrs.pop("wanted", None)
    if type(number) is not int or not isinstance(wanted, tuple) or attrs:
        raise fail(f"{where} does not say which part it runs, and for which outputs")
    if split is None or not 0 <= number < len(split.parts) or number in split.tail:
        raise fail(f"{where} runs part {number}, which cannot run there")
    part = split.parts[number]
    require(
        bool(wanted) and all(0 <= index < len(part.outputs) for index in wanted),
        f"{where} wants outputs {list(wanted)} of a part with {len(part.outputs)}",
    )
    _check_part_buffers(model, f"{where}, input", part.inputs, step.inputs)
    _check_part_buffers(model, f"{where}, output", [part.outputs[index] for index in wanted], step.outputs)


def _check_part_buffers(
    model: CompiledModel, where: str, tensors: Sequence[PartitionTensor], indices: Sequence[int]
) -> None:
    require(len(indices) == len(tensors), f"{where}s: there are {len(indices)} instead of {len(tensors)}")
    for index, tensor in zip(indices, tensors, strict=True):
        buffer = model.buffers[index]
        castable = dtype(buffer.dtype).floating == dtype(tensor.dtype).floating
        require(
            castable and buffer.shape == tensor.shape,
            f"{where} {tensor.name!r} is {tensor.dtype}{list(tensor.shape)} and its buffer "
            f"{buffer.dtype}{list(buffer.shape)}",
        )


def _check_indices(model: CompiledModel, where: str, indices: tuple[int, ...]) -> None:
    for index in indices:
        check_there(where, "buffer", index, model.buffers)


def _check_launch(model: CompiledModel, where: str, step: Launch) -> None:
    check_there(where, "kernel", step.kernel, model.kernels)
    kernel = model.kernels[step.kernel]
    where = f"{where}, kernel {kernel.name!r}"
    if len(step.buffers) != len(kernel.args):
        raise fail(f"{where}: it takes {len(kernel.args)} buffers and gets {len(step.buffers)}")
    _check_indices(model, where, step.buffers)
    for i, (arg, index) in enumerate(zip(kernel.args, step.buffers, strict=True)):
        buffer = model.buffers[index]
        if buffer.dtype != arg.dtype:
            raise fail(f"{where}: argument {i} is {arg.dtype} and buffer {index} is {buffer.dtype}")
        if buffer.nbytes < arg.nbytes:
            raise fail(
                f"{where}: argument {i} needs {arg.nbytes} bytes and buffer {index} has {buffer.nbytes}"
            )


def _check_access(model: CompiledModel, where: str, step: Step, stage: _Stage) -> None:
    touched: dict[int, bool] = {}  # Index of a buffer -> whether a use writes it
    for use in uses(model.kernels, step):
        place = model.buffers[use.buffer].place
        if place not in (stage.writes if use.writes else stage.reads):
            does = "writes" if use.writes else "reads"
            raise fail(f"{where} {does} buffer {use.buffer}, which is of place {place}")
        if use.buffer in touched and (use.writes or touched[use.buffer]):
            raise fail(f"{where} uses buffer {use.buffer} twice and writes it")
        touched[use.buffer] = touched.get(use.buffer, False) or use.writes
    if both := _find_overlap(model.buffers, touched.items()):
        raise fail(f"{where} uses buffers {both[0]} and {both[1]}, which share bytes, and writes one of them")


def _find_overlap(buffers: Sequence[Buffer], touched: Iterable[tuple[int, bool]]) -> tuple[int, int] | None:
    """Return two buffers of one family that overlap, one of them written; None without such buffers.

    `touched` are buffers, each once, and whether they are written.
    """
    spans = sorted((family_of(buffers, i), bytes_of(buffers, i).start, i, writes) for i, writes in touched)
    furthest: dict[bool, tuple[int, int]] = {}  # Largest end so far, by `writes`, and its buffer
    family = -1
    for root, start, index, writes in spans:
        if root != family:
            family, furthest = root, {}
        for other in (True, False) if writes else (True,):
            if other in furthest and start < furthest[other][0]:
                return furthest[other][1], index
        end = bytes_of(buffers, index).stop
        furthest[writes] = max(furthest.get(writes, (end, index)), (end, index))
    return None


def _check_order(model: CompiledModel) -> None:
    """Raise ModelFileError if a buffer is read before it is written, or an output is never written.

    Empty buffers need no write. Families of sub-buffers are tracked byte by byte.
    """
    buffers = model.buffers
    written = {i for i, b in enumerate(buffers) if b.place in ("constant", "input") or b.nbytes == 0}
    written |= {tensor.buffer for tensor in model.inputs}
    parts = {root: WrittenBytes() for root in families(buffers) if buffers[root].place != "input"}
    writers: set[int] = set()

    def has_contents(index: int) -> bool:
        bytes_written = parts.get(family_of(buffers, index))
        return index in written if bytes_written is None else bytes_written.covers(bytes_of(buffers, index))

    for where, step, _ in _in_order(model):
        for use in uses(model.kernels, step):
            if not use.writes and not has_contents(use.buffer):
                whole = family_of(buffers, use.buffer) in parts
                missing = "all of it was written" if whole else "anything was written to it"
                raise fail(f"{where} reads buffer {use.buffer} before {missing}")
        for use in uses(model.kernels, step):
            if use.writes and family_of(buffers, use.buffer) in parts:
                parts[family_of(buffers, use.buffer)].add(bytes_of(buffers, use.buffer))
                writers.add(use.buffer)
            elif use.writes:
                written.add(use.buffer)
    if both := _find_overlap(buffers, [(index, True) for index in writers]):
        family = family_of(buffers, both[0])
        raise fail(f"steps write buffers {both[0]} and {both[1]}, which share bytes of buffer {family}")
    for tensor in model.outputs:
        if not has_contents(tensor.buffer):
            raise fail(f"nothing writes {'all of ' * (tensor.buffer in parts)}output {tensor.name!r}")


@dataclass()
class WrittenBytes:
    """The written bytes as sorted ranges: `starts[n]` to `ends[n]`."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, span: range) -> None:
        """Add a range of written bytes."""
        first, last = bisect_left(self.ends, span.start), bisect_right(self.starts, span.stop)
        start, end = min([span.start, *self.starts[first:last]]), max([span.stop, *self.ends[first:last]])
        self.starts[first:last], self.ends[first:last] = [start], [end]

    def covers(self, span: range) -> bool:
        """Return whether all bytes of a range were written."""
        at = bisect_right(self.starts, span.start) - 1
        return at >= 0 and span.stop <= self.ends[at]


def _check_sharing(model: CompiledModel) -> None:
    """Raise ModelFileError if two scratch buffers that are live at one step overlap.

    Buffers of one family may overlap. Takes n log n steps for n buffers.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, step in enumerate(model.steps):
        for use in uses(model.kernels, step):
            index = family_of(model.buffers, use.buffer)
            buffer = model.buffers[index]
            if buffer.place == "scratch" and buffer.nbytes:
                first.setdefault(index, i)
                last[index] = i
    starting: dict[int, list[int]] = {}
    ending: dict[int, list[int]] = {}
    for index, i in first.items():
        starting.setdefault(i, []).append(index)
        ending.setdefault(last[index], []).append(index)
    live: list[tuple[int, int, int]] = []  # Tuples (offset, end, buffer), sorted and disjoint
    for i in range(len(model.steps)):
        for index in starting.get(i, ()):
            offset = model.buffers[index].offset
            span = (offset, offset + model.buffers[index].nbytes, index)
            at = bisect_left(live, span)
            for neighbour in live[max(at - 1, 0) : at + 1]:
                if neighbour[0] < span[1] and span[0] < neighbour[1]:
                    raise fail(
                        f"buffers {neighbour[2]} and {index} share scratch bytes and both live at step {i}"
                    )
            insort(live, span)
        for index in ending.get(i, ()):
            offset = model.buffers[index].offset
            live.pop(bisect_left(live, (offset, offset + model.buffers[index].nbytes, index)))
