"""The state of decoders' sequences in forms: where its rows are, and moved to where they are needed.

A compiled form has room for one sequence, or for a few, one in each slot along the first axis: the rows are
in the buffers of its inputs, and each run appends to them. Other sequences wait in the host's memory, and so
do all whose form is unloaded. Forms for one token and for many, for more rows or more sequences are models of
their own, between which a sequence moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from honed.protocol.dataclass import dataclass
from honed.protocol.errors import InvalidArgument, ResourceExhausted, SequenceLost
from honed.runtime.execution.growth import Growth, Slot

from .calls import HeldTensor, RunStep
from .host import Stepped

Array = NDArray[Any]


class Form(Protocol):
    """What runs steps on state of fixed shapes, of which the first rows are used, as an `Executor` does."""

    def row_bytes(self, growing: Sequence[Growth]) -> int:
        """Return the bytes of a row of what grows, of all sequences."""

    def step(
        self, inputs: Mapping[str, Array], growing: Sequence[Growth], rows: Sequence[int | None], count: int
    ) -> dict[str, Array]:
        """Run, and append new rows."""

    def grown(self, growing: Sequence[Growth], rows: int, slot: Slot) -> dict[str, Array]:
        """Return rows."""

    def restore(self, growing: Sequence[Growth], values: Mapping[str, Array], slot: Slot) -> None:
        """Set rows."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """Its rows, and where they are: in a slot of `form`, or saved where that is None.

    `used` counts up with each step of any sequence.
    """

    growing: tuple[Growth, ...]
    rows: int = 0
    form: Form | None = None
    slot: Slot = Slot(0, 1)
    used: int = 0
    saved: Mapping[str, Array] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Inside:
    """The sequences in the slots of a form, and the inputs of its last run."""

    sequences: list[_Sequence | None]
    inputs: dict[str, Array] = field(default_factory=dict)


class FormSequences:
    """The sequences by number, and which of them are in a form."""

    def __init__(self) -> None:
        self._all: dict[int, _Sequence] = {}
        self.inside: dict[Form, _Inside] = {}  # what has a sequence's state in it
        self._steps = itertools.count(1)

    def step(
        self, form: Form, of: int, calls: Sequence[RunStep], inputs: Sequence[Mapping[str, Array]]
    ) -> list[Stepped]:
        """Run a step of each of some sequences as one, all of as many tokens; return what each gives.

        The form has room for `of` sequences.

        Raises SequenceLost where the state that one starts from is not here, ResourceExhausted where one
        would become too large, both before anything has run, and what `Executor.run` raises.
        """
        sequences = [self._begun(call) for call in calls]
        row_bytes = form.row_bytes(sequences[0].growing) // of
        nbytes = [(call.rows + call.count) * row_bytes for call in calls]
        for call, size in zip(calls, nbytes, strict=True):
            if size > call.max_state_bytes:
                raise ResourceExhausted(
                    f"the sequence's state would have {size} bytes, and its user may have "
                    f"{call.max_state_bytes} more; end sequences, or raise max_mib of [sequences]"
                )
        rows: list[int | None] = [None] * of
        for sequence, call in zip(sequences, calls, strict=True):
            sequence.rows = call.rows  # more are there where a request failed after it had run
            sequence.used = next(self._steps)
        for sequence, call in zip(sequences, calls, strict=True):
            self._enter(sequence, form, of)
            rows[sequence.slot.at] = call.rows
        given = inputs[0] if of == 1 else self._together(form, sequences, inputs)
        computed = form.step(given, sequences[0].growing, rows, calls[0].count)
        found: list[Stepped] = []
        for sequence, call, size in zip(sequences, calls, nbytes, strict=True):
            sequence.rows = call.rows + call.count
            own = {name: value[sequence.slot.within(len(value))] for name, value in computed.items()}
            found.append((own, sequence.rows, size))
        return found

    def state(self, number: int) -> dict[str, Array]:
        """Return the rows of a sequence by input; raise SequenceLost where it is not here."""
        sequence = self._all.get(number)
        if sequence is None:
            raise SequenceLost("the process that held its state has ended")
        return dict(self._rows(sequence))

    def holds(self, number: int) -> bool:
        """Return whether a sequence is here."""
        return number in self._all

    def adopt(self, number: int, growing: tuple[Growth, ...], rows: int, values: Mapping[str, Array]) -> None:
        """Take a sequence with so many rows, by input."""
        self._all[number] = _Sequence(growing=growing, rows=rows, saved=values)

    def is_used(self, form: Form) -> bool:
        """Return whether a sequence is in a form."""
        inside = self.inside.get(form)
        return inside is not None and any(inside.sequences)

    def drop(self, sequences: Sequence[int]) -> None:
        """Let go of sequences, as far as they are here."""
        for number in sequences:
            sequence = self._all.pop(number, None)
            if sequence is not None:
                self._vacate(sequence)

    def leave(self, form: Form) -> None:
        """Save what is in a form that is about to be closed, or run for something else."""
        inside = self.inside.pop(form, None)
        for sequence in inside.sequences if inside is not None else ():
            if sequence is not None:
                self._save(sequence)

    def _begun(self, call: RunStep) -> _Sequence:
        """Return the sequence of a step, made where the step begins it."""
        if not call.rows:
            self.drop((call.sequence,))
            self._all[call.sequence] = _Sequence(growing=growth(call.tensors))
        sequence = self._all.get(call.sequence)
        if sequence is None or sequence.rows < call.rows:
            raise SequenceLost("the process that held its state has ended")
        return sequence

    def _enter(self, sequence: _Sequence, form: Form, of: int) -> None:
        """Move a sequence into a slot of a form: a free one, or that of what was stepped the longest ago."""
        if sequence.form is form:
            return
        inside = self.inside.setdefault(form, _Inside(sequences=[None] * of))
        at = min(range(of), key=lambda n: each.used if (each := inside.sequences[n]) is not None else 0)
        slot, left = Slot(at, of), inside.sequences[at]
        if left is not None:
            self._save(left)
        form.restore(sequence.growing, self._rows(sequence), slot)
        self._vacate(sequence)
        sequence.form, sequence.slot, sequence.saved = form, slot, {}
        inside.sequences[at] = sequence

    def _vacate(self, sequence: _Sequence) -> None:
        if sequence.form is None:
            return
        inside = self.inside[sequence.form]
        inside.sequences[sequence.slot.at] = None
        if not any(inside.sequences):
            del self.inside[sequence.form]

    def _save(self, sequence: _Sequence) -> None:
        sequence.saved, sequence.form = self._rows(sequence), None

    def _together(
        self, form: Form, sequences: Sequence[_Sequence], inputs: Sequence[Mapping[str, Array]]
    ) -> dict[str, Array]:
        """Return the inputs of a run for several sequences.

        In slots of others they are those of the last run, which writes again what it has written; in those
        of nobody those of one that runs.
        """
        inside = self.inside[form]
        given = dict(zip(sequences, inputs, strict=True))
        for name, value in inputs[0].items():
            whole = inside.inputs.setdefault(name, np.concatenate([value] * len(inside.sequences)))
            for at, sequence in enumerate(inside.sequences):
                if sequence is None or sequence in given:
                    part = Slot(at, len(inside.sequences)).within(len(whole))
                    whole[part] = value if sequence is None else given[sequence][name]
        return inside.inputs

    def _rows(self, sequence: _Sequence) -> Mapping[str, Array]:
        if sequence.form is not None:
            return sequence.form.grown(sequence.growing, sequence.rows, sequence.slot)
        cut = {each.input: (slice(None),) * each.axis + (slice(sequence.rows),) for each in sequence.growing}
        return {name: value[cut[name]] for name, value in sequence.saved.items()}


def growth(tensors: Sequence[HeldTensor]) -> tuple[Growth, ...]:
    """Return what grows; raise InvalidArgument where other state is held, too."""
    if any(tensor.axis < 0 for tensor in tensors):
        raise InvalidArgument("the model has state that does not grow, which no compiled form keeps")
    return tuple(Growth(tensor.input, tensor.output, tensor.axis) for tensor in tensors)
