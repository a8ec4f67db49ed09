"""Checks the steps of a plan: which buffers each may use, which are written first, which may share memory.

Preparation runs once, before the first inference: it uses constants and prepared buffers only, and no
inference may change what it wrote.

A buffer is live from its first use to its last, and one with others within it (see `sub_buffers`) as long as
any of them. Two scratch buffers may share bytes only if they are never live at the same step, or one is
declared to lie within the other, or both in a third. "readwrite" means that a kernel reads back what it wrote
itself or updates in place, so it counts as a write if it comes first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from . import parts
from .model import CPU_PART, Buffer, CompiledModel, Copy, Kernel, Launch, Place, Step
from .sub_buffers import (
    WrittenBytes,
    bytes_of,
    check_there,
    check_writers,
    fail,
    families,
    family_of,
    overlap,
)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A list of steps: its name in messages, and the places that its steps may read and write."""

    called: str
    reads: frozenset[Place]
    writes: frozenset[Place]


_PREPARATION = _Stage("preparation step", frozenset({"constant", "prepared"}), frozenset({"prepared"}))
_INFERENCE = _Stage("step", frozenset(get_args(Place)), frozenset({"output", "scratch"}))


@dataclass(frozen=True, slots=True)
class Use:
    """A use of one buffer by one step."""

    buffer: int
    reads: bool  # Requires an earlier write
    writes: bool

    @classmethod
    def of(cls, buffer: int, access: Literal["read", "write", "readwrite"]) -> Use:
        """Return a kernel's use of a buffer, from its access to the argument."""
        return cls(buffer, reads=access == "read", writes=access != "read")


def check(model: CompiledModel) -> None:
    """Raise ModelFileError unless every step can run at its place in the order."""
    for where, step, stage in _in_order(model):
        _check_step(model, where, step)
        _check_access(model, where, step, stage)
    _check_order(model)
    _check_sharing(model)


def uses(kernels: Sequence[Kernel], step: Step) -> Iterator[Use]:
    """Yield every use of a buffer by `step`, in the order of its arguments."""
    if isinstance(step, Launch):
        for arg, index in zip(kernels[step.kernel].args, step.buffers, strict=True):
            yield Use.of(index, arg.access)
    elif isinstance(step, Copy):
        yield Use(step.source, reads=True, writes=False)
        yield Use(step.target, reads=False, writes=True)
    else:
        for index in step.inputs:
            yield Use(index, reads=True, writes=False)
        for index in step.outputs:
            yield Use(index, reads=False, writes=True)


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
        parts.check_call(model, where, step)


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
    if both := overlap(model.buffers, touched.items()):
        raise fail(f"{where} uses buffers {both[0]} and {both[1]}, which share bytes, and writes one of them")


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
            if use.reads and not has_contents(use.buffer):
                whole = family_of(buffers, use.buffer) in parts
                missing = "all of it was written" if whole else "anything was written to it"
                raise fail(f"{where} reads buffer {use.buffer} before {missing}")
        for use in uses(model.kernels, step):
            if use.writes and family_of(buffers, use.buffer) in parts:
                parts[family_of(buffers, use.buffer)].add(bytes_of(buffers, use.buffer))
                writers.add(use.buffer)
            elif use.writes:
                written.add(use.buffer)
    check_writers(buffers, writers)
    for tensor in model.outputs:
        if not has_contents(tensor.buffer):
            raise fail(f"nothing writes {'all of ' * (tensor.buffer in parts)}output {tensor.name!r}")


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
