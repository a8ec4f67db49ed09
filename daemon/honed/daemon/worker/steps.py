"""The state of decoders' sequences in forms: where its rows are, and moved to where they are needed.

A compiled form has room for one sequence: the rows are in the buffers of its inputs, and each run appends to
them. Other sequences wait in the host's memory, and so do all whose form is unloaded. Forms for one token and
for many, and for more rows are models of their own, between which a sequence moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument, ResourceExhausted, SequenceLost
from honed.runtime.execution.growth import Growth

from .calls import RunStep, StateTensorSpec
from .host import Stepped

Array = NDArray[Any]


class StepExecutor(Protocol):
    """What runs steps on state of fixed shapes, of which the first rows are used, as an `Executor` does."""

    def row_bytes(self, growing: tuple[Growth, ...]) -> int:
        """Return the bytes of a row of what grows."""

    def step(
        self, inputs: Mapping[str, Array], growing: tuple[Growth, ...], rows: int, count: int
    ) -> dict[str, Array]:
        """Run, and append new rows."""

    def grown(self, growing: tuple[Growth, ...], rows: int) -> dict[str, Array]:
        """Return rows."""

    def restore(self, growing: tuple[Growth, ...], values: Mapping[str, Array]) -> None:
        """Set rows."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """Its rows, and where they are: in `form`, or saved where that is None."""

    growing: tuple[Growth, ...]
    rows: int = 0
    form: StepExecutor | None = None
    saved: Mapping[str, Array] = field(default_factory=dict)


class DeviceSequences:
    """The sequences by number, and which of them are in a form."""

    def __init__(self) -> None:
        self._all: dict[int, _Sequence] = {}
        self.inside: dict[StepExecutor, _Sequence] = {}  # Whose state each form has in it

    def step(self, form: StepExecutor, call: RunStep, inputs: Mapping[str, Array]) -> Stepped:
        """Run a step; return the outputs, and the rows and bytes of the state now.

        Raises SequenceLost where the state to start from is not here, ResourceExhausted where that after the
        step would be too large, both before anything has run, and what `Executor.run` raises.
        """
        sequence = self._begun(call)
        nbytes = (call.rows + call.count) * form.row_bytes(sequence.growing)
        if nbytes > call.max_state_bytes:
            raise ResourceExhausted(
                f"the sequence's state would have {nbytes} bytes, and its user may have "
                f"{call.max_state_bytes} more; end sequences, or raise max_mib of [sequences]"
            )
        sequence.rows = call.rows  # More are there where a request failed after it had run
        self._enter(sequence, form)
        computed = form.step(inputs, sequence.growing, call.rows, call.count)
        sequence.rows = call.rows + call.count
        return computed, sequence.rows, nbytes

    def state(self, number: int, rows: int) -> Mapping[str, Array]:
        """Return the first rows of a sequence by input; raise SequenceLost where they are not here."""
        sequence = self._all.get(number)
        if sequence is None or sequence.rows < rows:
            raise SequenceLost("the process that held its state has ended")
        return _rows(sequence, rows)

    def set(self, number: int, growing: tuple[Growth, ...], rows: int, values: Mapping[str, Array]) -> None:
        """Take a sequence with so many rows, by input, in the place of what it had here."""
        self.drop((number,))
        self._all[number] = _Sequence(growing=growing, rows=rows, saved=values)

    def drop(self, sequences: Sequence[int]) -> None:
        """Let go of sequences, as far as they are here."""
        for number in sequences:
            sequence = self._all.pop(number, None)
            if sequence is not None and sequence.form is not None:
                del self.inside[sequence.form]

    def leave(self, form: StepExecutor) -> None:
        """Save what is in a form that is about to be closed, or run for something else."""
        sequence = self.inside.pop(form, None)
        if sequence is not None:
            sequence.saved, sequence.form = _rows(sequence, sequence.rows), None

    def _begun(self, call: RunStep) -> _Sequence:
        """Return the sequence of a step, made where the step begins it."""
        if not call.rows:
            self.drop((call.sequence,))
            self._all[call.sequence] = _Sequence(growing=growth(call.tensors))
        sequence = self._all.get(call.sequence)
        if sequence is None or sequence.rows < call.rows:
            raise SequenceLost("the process that held its state has ended")
        return sequence

    def _enter(self, sequence: _Sequence, form: StepExecutor) -> None:
        """Move a sequence into a form, in the place of the one that is in it."""
        if sequence.form is form:
            return
        self.leave(form)
        form.restore(sequence.growing, _rows(sequence, sequence.rows))
        if sequence.form is not None:
            del self.inside[sequence.form]
        sequence.form, sequence.saved = form, {}
        self.inside[form] = sequence


def _rows(sequence: _Sequence, rows: int) -> Mapping[str, Array]:
    if sequence.form is not None:
        return sequence.form.grown(sequence.growing, rows)
    cut = {each.input: (slice(None),) * each.axis + (slice(rows),) for each in sequence.growing}
    return {name: value[cut[name]] for name, value in sequence.saved.items()}


def growth(tensors: Sequence[StateTensorSpec]) -> tuple[Growth, ...]:
    """Return what grows; raise InvalidArgument where other state is held, too."""
    if any(tensor.axis < 0 for tensor in tensors):
        raise InvalidArgument("the model has state that does not grow, which no compiled form keeps")
    return tuple(Growth(tensor.input, tensor.output, tensor.axis) for tensor in tensors)
