"""Turns a program into buffers with a storage plan, kernels and steps.

Scratch memory is an arena of slots. Each scratch buffer lives from the step that writes it to the last that
reads it, and lies at the start of a slot that it shares with none alive at the same time; the largest are
placed first, each in the smallest slot that is free ("greedy by size for shared objects": Pisarchyk and Lee,
"Efficient Memory Management for Deep Neural Net Inference", 2020). So no buffer lies inside another's
memory, but in that of its block, and the executor allocates slots: packed at any offset they took 0 to 30 %
less. The values of a block live as long as any of them.

What depends on constants only is computed once (`prepared_steps`). Its buffers live as long as the model, so
they lie side by side in a section of their own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from honed.protocol import strict
from honed.runtime.compiled.model import (
    CONSTANT_ALIGN,
    Buffer,
    Copy,
    HostCall,
    Kernel,
    Launch,
    Preparation,
    Step,
)
from honed.runtime.compiled.plan import Use, families, family_of, uses

from .program import Function, FunctionCall, HostFunctionCall, MemoryValue, Program

# Prepared values take memory for as long as the model is loaded, where a step of each inference would have
# them in the arena for a moment. Packing keeps the size of its constants, and a wider type or rows padded to
# vectors at most double it; values that grow more are broadcast, and are computed as fast as read. Small
# tables are always prepared: launching a kernel takes longer than filling them.
_GROWTH = 2
_SMALL_BYTES = 16 << 10


def align(offset: int, to: int) -> int:
    """Return `offset` rounded up to a multiple of `to`."""
    return -(-offset // to) * to


def prepared_steps(
    steps: Sequence[Sequence[Use] | None], buffers: Sequence[Buffer], room: int, alignment: int
) -> frozenset[int]:
    """Return the numbers of the steps that read only constants, or what other such steps wrote.

    A step is the list of its uses of buffers, or None for a host call, which is never prepared. Each prepared
    step writes scratch buffers that only prepared steps write, all of them before any other step reads them.
    These buffers take at most twice the bytes of the constants that they depend on, or 16 KiB. All of these
    buffers together take at most `room` bytes, each rounded up to a multiple of `alignment`. Buffers do not
    share memory yet, except with those that they lie within, and such buffers are never prepared.
    """
    shared = families(buffers)
    within = {n for n in range(len(buffers)) if family_of(buffers, n) in shared}
    chosen = {n: step for n, step in enumerate(steps) if step is not None}
    while True:
        refused = _find_unpreparable(chosen, _changing(steps, chosen) | within, buffers, room, alignment)
        if not refused:
            return frozenset(chosen)
        chosen = {n: step for n, step in chosen.items() if n not in refused}


def _changing(steps: Sequence[Sequence[Use] | None], chosen: Container[int]) -> set[int]:
    """Return the buffers that would not hold one value in all inferences if the chosen steps were prepared.

    Either other steps write them, or chosen steps write them again after others have read them.
    """
    found, read = set[int](), set[int]()
    for n, step in enumerate(steps):
        for use in step or ():
            if use.writes and (n not in chosen or use.buffer in read):
                found.add(use.buffer)
        if n not in chosen:
            read.update(use.buffer for use in step or () if not use.writes)
    return found


def _find_unpreparable(
    chosen: Mapping[int, Sequence[Use]],
    changing: Container[int],
    buffers: Sequence[Buffer],
    room: int,
    alignment: int,
) -> set[int]:
    """Return the chosen steps that cannot be prepared where the buffers in `changing` change."""
    behind = {n: frozenset({n}) for n, buffer in enumerate(buffers) if buffer.place == "constant"}
    refused = set()
    for n, step in chosen.items():
        read = [use.buffer for use in step if not use.writes]
        written = [use.buffer for use in step if use.writes]
        constants = frozenset().union(*(behind.get(b, frozenset()) for b in (*read, *written)))
        allowed = max(_GROWTH * sum(buffers[b].nbytes for b in constants), _SMALL_BYTES)
        grown = sum(buffers[b].nbytes for b in written)
        taken = sum(align(buffers[b].nbytes, alignment) for b in written if b not in behind)
        if (
            all(b in behind for b in read)
            and all(buffers[b].place == "scratch" and b not in changing for b in written)
            and grown <= allowed
            and taken <= room
        ):
            room -= taken
            behind.update(dict.fromkeys(written, constants))
        else:
            refused.add(n)
    return refused


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """The operators of a call of the program, and the numbers of its prepared steps and of the others."""

    operators: tuple[str, ...]
    prepare: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedView:
    """An operator whose result is a buffer read with a shape of its own."""

    operator: str
    shape: tuple[int, ...]
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The executor's inputs, except for names and identities."""

    buffers: tuple[Buffer, ...]
    input_buffers: tuple[int, ...]
    output_buffers: tuple[int, ...]
    arena_bytes: int
    prepared_bytes: int
    constant_bytes: int
    constants: Mapping[int, np.ndarray]  # Constant arrays by buffer
    sources: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    prepare: tuple[Preparation, ...]
    steps: tuple[Step, ...]
    calls: tuple[PlannedCall, ...]
    views: tuple[PlannedView, ...]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A scratch buffer's size (bytes) and the first and last step that touch it, both included."""

    nbytes: int
    first: int
    last: int


def place(lifetimes: Sequence[Lifetime], alignment: int) -> tuple[list[int], int]:
    """Return offsets (bytes, multiples of `alignment`) of scratch buffers, and the size of the arena."""
    # First and last steps of the buffers in each slot, and their numbers
    slots: list[list[tuple[int, int, int]]] = []
    largest: list[int] = []
    for i in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].first, i)):
        one = lifetimes[i]
        free = [number for number, slot in enumerate(slots) if _is_free(slot, one)]
        if free:
            insort(slots[min(free, key=largest.__getitem__)], (one.first, one.last, i))
        else:
            slots.append([(one.first, one.last, i)])
            largest.append(one.nbytes)
    offsets, arena = [0] * len(lifetimes), 0
    for slot, nbytes in zip(slots, largest, strict=True):
        for _, _, i in slot:
            offsets[i] = arena
        arena += align(nbytes, alignment)
    return offsets, arena


def _is_free(slot: Sequence[tuple[int, int, int]], one: Lifetime) -> bool:
    """Return whether no buffer in a slot, in the order of its steps, is alive at the same time as `one`."""
    at = bisect_left(slot, (one.first,))
    return (not at or slot[at - 1][1] < one.first) and (at == len(slot) or one.last < slot[at][0])


@dataclass()
class _Draft:
    """The buffers and steps as they are collected; scratch offsets are filled in at the end.

    `at` has the buffers of the program's values.
    """

    program: Program
    at: dict[int, int] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    constant_bytes: int = 0
    kernel_of: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, value: MemoryValue, place: str, offset: int = 0, within: int | None = None) -> int:
        self.buffers.append(strict.copy_fields(Buffer, value, place=place, offset=offset, within=within))
        return len(self.buffers) - 1

    def add_value(self, v: int, place: str, offset: int = 0, within: int | None = None) -> None:
        """Give a value of the program a buffer, unless it has one."""
        if v not in self.at:
            self.at[v] = self.add(self.program.values[v], place, offset, within)

    def add_constant(self, array: np.ndarray) -> int:
        index = self.add(
            MemoryValue(dtype=array.dtype.name, shape=array.shape), "constant", self.constant_bytes
        )
        self.constants[index] = array
        self.constant_bytes = align(self.constant_bytes + array.nbytes, CONSTANT_ALIGN)
        return index

    def kernel(self, function: Function, launch: int) -> int:
        key = (function.name, launch)
        if key not in self.kernel_of:
            if launch == 0:
                self.sources.append(function.source)
            one = function.launches[launch]
            name = function.name if len(function.launches) == 1 else f"{function.name}.{launch}"
            self.kernel_of[key] = len(self.kernels)
            self.kernels.append(
                strict.copy_fields(
                    Kernel,
                    one,
                    name=name,
                    source=len(self.sources) - 1,
                    args=one.arg_types,
                    task=function.task,
                    schedule=function.schedule,
                )
            )
        return self.kernel_of[key]


def plan(
    program: Program,
    functions: Mapping[str, Function],
    alignment: int,
    room: int,
    extra: Sequence[np.ndarray] = (),
) -> Plan:
    """Lay out `program`; `extra` arrays become constants after the program's own (the probes).

    `alignment` is the device's for sub-buffers, `room` the most that may be prepared, both in bytes.
    """
    draft = _Draft(program)
    calls = [call for call in program.calls if isinstance(call, FunctionCall)]
    kept = dict(pair for call in calls if call.keeps for pair in zip(call.outputs, call.keeps, strict=True))
    for v in program.inputs:
        draft.add_value(v, "output" if v in kept.values() else "input")
    outputs, copies = _outputs(draft, kept)
    for v, value in enumerate(program.values):
        if value.constant is not None and v not in draft.at:
            draft.at[v] = draft.add_constant(value.constant)
    _add_blocks(draft)
    spans = [_add_call(call, functions, draft) for call in program.calls]
    draft.steps.extend(Copy(source=draft.at[v], target=b) for v, b in copies)
    for array in extra:
        draft.add_constant(array)
    found = [None if isinstance(s, HostCall) else list(uses(draft.kernels, s)) for s in draft.steps]
    chosen = prepared_steps(found, draft.buffers, room, alignment)
    prepare = tuple(s for n, s in enumerate(draft.steps) if n in chosen and not isinstance(s, HostCall))
    steps = tuple(s for n, s in enumerate(draft.steps) if n not in chosen)
    others = [n for n in range(len(draft.steps)) if n not in chosen]
    number = {n: at for one in (sorted(chosen), others) for at, n in enumerate(one)}
    prepared = _place_prepared(draft, prepare, alignment)
    arena = _place_scratch(draft, steps, alignment)
    return Plan(
        buffers=tuple(draft.buffers),
        input_buffers=tuple(draft.at[v] for v in program.inputs),
        output_buffers=tuple(outputs),
        arena_bytes=arena,
        prepared_bytes=prepared,
        constant_bytes=draft.constant_bytes,
        constants=draft.constants,
        sources=tuple(draft.sources),
        kernels=tuple(draft.kernels),
        prepare=prepare,
        steps=steps,
        calls=tuple(
            PlannedCall(
                call.operators,
                tuple(number[n] for n in span if n in chosen),
                tuple(number[n] for n in span if n not in chosen),
            )
            for call, span in zip(program.calls, spans, strict=True)
        ),
        views=tuple(
            PlannedView(v.operator, v.shape, draft.at[v.value]) for v in program.views if v.value in draft.at
        ),
    )


def _outputs(draft: _Draft, kept: Mapping[int, int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Give every output a buffer; a value that has one already (input, constant, other output) is copied.

    An output that keeps an input (`kept`) has that input's buffer.
    """
    program = draft.program
    buffers: list[int] = []
    copies: list[tuple[int, int]] = []
    for v, shape in zip(program.outputs, program.output_shapes, strict=True):
        value, source = program.values[v], kept.get(v)
        if source is not None and v not in draft.at:
            draft.at[v] = draft.at[source]
            buffers.append(draft.at[v])
            continue
        b = draft.add(MemoryValue(dtype=value.dtype, shape=shape), "output")
        buffers.append(b)
        if v in draft.at or value.constant is not None:
            copies.append((v, b))
        else:
            draft.at[v] = b
    return buffers, copies


def _add_blocks(draft: _Draft) -> None:
    """Give every value of a block its buffer, within that of the whole."""
    for block in draft.program.blocks:
        draft.add_value(block.whole, "scratch")
        whole = draft.at[block.whole]
        for v, offset in block.places:
            draft.add_value(v, draft.buffers[whole].place, offset, whole)


def _add_call(
    call: FunctionCall | HostFunctionCall, functions: Mapping[str, Function], draft: _Draft
) -> range:
    """Add the steps of a call, and return their numbers."""
    first = len(draft.steps)
    for v in call.outputs:
        draft.add_value(v, "scratch")
    given, outputs = [draft.at[v] for v in call.inputs], tuple(draft.at[v] for v in call.outputs)
    if isinstance(call, HostFunctionCall):
        shaped = zip(given, call.input_shapes, strict=True)
        inputs = tuple(_with_shape(draft, buffer, shape) for buffer, shape in shaped)
        draft.steps.append(HostCall(function=call.function, inputs=inputs, outputs=outputs, attrs=call.attrs))
    else:
        function = functions[call.function]
        inner = [draft.add(value, "scratch") for value in function.inner]
        memory = (*given, *outputs, *inner)
        for n, launch in enumerate(function.launches):
            kernel = draft.kernel(function, n)
            draft.steps.append(Launch(kernel=kernel, buffers=tuple(memory[a] for a in launch.args)))
    return range(first, len(draft.steps))


def _with_shape(draft: _Draft, buffer: int, shape: tuple[int, ...]) -> int:
    """Return the buffer itself if it has that shape, else a copy that has: host functions read shapes."""
    have = draft.buffers[buffer]
    if have.shape == shape:
        return buffer
    copy = draft.add(MemoryValue(dtype=have.dtype, shape=shape), "scratch")
    draft.steps.append(Copy(source=buffer, target=copy))
    return copy


def _place_prepared(draft: _Draft, prepare: Sequence[Preparation], alignment: int) -> int:
    written = [use.buffer for step in prepare for use in uses(draft.kernels, step) if use.writes]
    end = 0
    for b in dict.fromkeys(written):
        draft.buffers[b] = replace(draft.buffers[b], place="prepared", offset=end)
        end += align(draft.buffers[b].nbytes, alignment)
    return end


def _place_scratch(draft: _Draft, steps: Sequence[Step], alignment: int) -> int:
    spans: dict[int, list[int]] = {}
    for n, step in enumerate(steps):
        for b in (family_of(draft.buffers, use.buffer) for use in uses(draft.kernels, step)):
            if draft.buffers[b].place == "scratch":
                spans.setdefault(b, []).append(n)
    scratch = list(spans)
    lifetimes = [Lifetime(draft.buffers[b].nbytes, spans[b][0], spans[b][-1]) for b in scratch]
    offsets, arena = place(lifetimes, alignment)
    for b, offset in zip(scratch, offsets, strict=True):
        draft.buffers[b] = replace(draft.buffers[b], offset=offset)
    return arena
