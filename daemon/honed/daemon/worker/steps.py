"""Keeps the state of decoders' sequences on a device, and moves it to the compiled shape that runs next.

A compiled shape has room for one sequence: its rows are in the buffers of the inputs, and each run appends to
them. The rows of other sequences are in host memory. Shapes for one token, for a chunk, and for other
capacities are separate models, between which a sequence moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument
from honed.runtime.compiled.model import Growth
from honed.runtime.execution.executor import Executor

from .calls import RunStep, SetSequence, StateTensorSpec, state_lost
from .host import Stepped

Array = NDArray[Any]


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """A sequence's state: in the buffers of `form`, or in `saved` if that is None."""

    growing: tuple[Growth, ...]
    rows: int = 0
    form: Executor | None = None
    saved: Mapping[str, Array] = field(default_factory=dict)


class DeviceSequences:
    """The sequences of a device by number, with those whose state is in a compiled shape."""

    def __init__(self) -> None:
        self._all: dict[int, _Sequence] = {}
        self.inside: dict[Executor, _Sequence] = {}  # Sequences whose state is in a compiled shape

    def step(self, form: Executor, call: RunStep, inputs: Mapping[str, Array]) -> Stepped:
        """Run a step; return the outputs, and the rows and bytes of the state now.

        Raises SequenceLost if the state is not here, ResourceExhausted if it would grow too large, both
        before anything runs, and the errors of `Executor.run`.
        """
        sequence = self._sequence_of(call)
        nbytes = (call.rows + call.count) * form.row_bytes(sequence.growing)
        call.check_state(nbytes)
        sequence.rows = call.rows  # Drops rows of a request that failed after its run
        self._enter(sequence, form)
        computed = form.step(inputs, sequence.growing, call.rows, call.count, call.last_token)
        sequence.rows = call.rows + call.count
        return computed, sequence.rows, nbytes

    def state(self, number: int, rows: int) -> Mapping[str, Array]:
        """Return the first rows of a sequence by input; raise SequenceLost if they are not here."""
        sequence = self._all.get(number)
        if sequence is None or sequence.rows < rows:
            raise state_lost()
        return _rows(sequence, rows)

    def set(self, call: SetSequence, values: Mapping[str, Array]) -> None:
        """Set a sequence's state to rows by input, which a compiled shape takes with its next step."""
        growing = growth(call.tensors)
        self.drop((call.sequence,))
        self._all[call.sequence] = _Sequence(growing=growing, rows=call.rows, saved=values)

    def drop(self, sequences: Sequence[int]) -> None:
        """Drop those sequences that are here."""
        for number in sequences:
            sequence = self._all.pop(number, None)
            if sequence is not None and sequence.form is not None:
                del self.inside[sequence.form]

    def leave(self, form: Executor) -> None:
        """Save the state in a compiled shape that is about to be closed, or to run for something else."""
        sequence = self.inside.pop(form, None)
        if sequence is not None:
            sequence.saved, sequence.form = _rows(sequence, sequence.rows), None

    def _sequence_of(self, call: RunStep) -> _Sequence:
        """Return the sequence of a step; a step after 0 rows begins a new one."""
        if not call.rows:
            self.drop((call.sequence,))
            self._all[call.sequence] = _Sequence(growing=growth(call.tensors))
        sequence = self._all.get(call.sequence)
        if sequence is None or sequence.rows < call.rows:
            raise state_lost()
        return sequence

    def _enter(self, sequence: _Sequence, form: Executor) -> None:
        """Move a sequence into a compiled shape, and save the one that was there."""
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
        return sequence.form.read_rows(sequence.growing, rows)
    cut = {each.input: (slice(None),) * each.axis + (slice(rows),) for each in sequence.growing}
    return {name: value[cut[name]] for name, value in sequence.saved.items()}


def growth(tensors: Sequence[StateTensorSpec]) -> tuple[Growth, ...]:
    """Return the growing tensors; raise InvalidArgument if there is other state, too."""
    if any(tensor.axis < 0 for tensor in tensors):
        raise InvalidArgument("the model has state that does not grow, which no compiled form keeps")
    return tuple(Growth(tensor.input, tensor.output, tensor.axis) for tensor in tensors)
