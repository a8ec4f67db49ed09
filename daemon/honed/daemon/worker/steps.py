"""The state of decoders' sequences on a device: where its rows are, and moved to where they are needed.

A compiled form has room for one sequence: the rows are in the buffers of its inputs, and each run appends to
them. Other sequences wait in the host's memory, and so do all whose form is unloaded. A form for one token
and one for many, or for more rows, are models of their own, between which a sequence moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.dataclass import dataclass
from honed.protocol.errors import InvalidArgument, ResourceExhausted, SequenceLost
from honed.runtime.execution.executor import Executor, Growth

from .calls import HeldTensor, RunStep

Array = NDArray[Any]


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """Its rows, and where they are: in `form`, or saved where that is None."""

    growing: tuple[Growth, ...]
    rows: int = 0
    form: Executor | None = None
    saved: Mapping[str, Array] = field(default_factory=dict)


class DeviceSequences:
    """The sequences by number, and which of them is in a form."""

    def __init__(self) -> None:
        self._all: dict[int, _Sequence] = {}
        self._inside: dict[Executor, _Sequence] = {}

    def step(
        self, form: Executor, call: RunStep, inputs: Mapping[str, Array]
    ) -> tuple[dict[str, Array], int, int]:
        """Run a step; return the other outputs, and the rows and bytes of the state now.

        Raises SequenceLost where the state to start from is not here, ResourceExhausted where it would become
        too large, and what `Executor.run` raises.
        """
        if form.model.split is not None:
            raise InvalidArgument("parts of the form are run by the CPU engine, which cannot keep its state")
        if not call.rows:
            self.drop((call.sequence,))
            self._all[call.sequence] = _Sequence(growing=growth(call.tensors))
        sequence = self._all.get(call.sequence)
        if sequence is None or sequence.rows < call.rows:
            raise SequenceLost("the process that held its state has ended")
        rows = call.rows + call.count
        nbytes = rows * _row_bytes(form, sequence.growing)
        if nbytes > call.max_state_bytes:
            raise ResourceExhausted(
                f"the sequence's state would have {nbytes} bytes, and its user may have "
                f"{call.max_state_bytes} more; end sequences, or raise max_mib of [sequences]"
            )
        sequence.rows = call.rows  # more are there where a request failed after it had run
        self._enter(sequence, form)
        computed = form.step(inputs, sequence.growing, call.rows, call.count)
        sequence.rows = rows
        return computed, rows, nbytes

    def state(self, number: int) -> dict[str, Array]:
        """Return the rows of a sequence by input; raise SequenceLost where it is not here."""
        sequence = self._all.get(number)
        if sequence is None:
            raise SequenceLost("the process that held its state has ended")
        return dict(self._rows(sequence))

    def drop(self, sequences: Sequence[int]) -> None:
        """Let go of sequences, as far as they are here."""
        for number in sequences:
            sequence = self._all.pop(number, None)
            if sequence is not None and sequence.form is not None:
                del self._inside[sequence.form]

    def leave(self, form: Executor) -> None:
        """Save what is in a form that is about to be closed."""
        sequence = self._inside.pop(form, None)
        if sequence is not None:
            sequence.saved, sequence.form = self._rows(sequence), None

    def _enter(self, sequence: _Sequence, form: Executor) -> None:
        if sequence.form is form:
            return
        self.leave(form)
        form.restore(sequence.growing, self._rows(sequence))
        if sequence.form is not None:
            del self._inside[sequence.form]
        sequence.form, sequence.saved = form, {}
        self._inside[form] = sequence

    def _rows(self, sequence: _Sequence) -> Mapping[str, Array]:
        if sequence.form is not None:
            return sequence.form.grown(sequence.growing, sequence.rows)
        cut = {each.input: (slice(None),) * each.axis + (slice(sequence.rows),) for each in sequence.growing}
        return {name: value[cut[name]] for name, value in sequence.saved.items()}


def growth(tensors: Sequence[HeldTensor]) -> tuple[Growth, ...]:
    """Return what grows; raise InvalidArgument where other state is held, too."""
    if any(tensor.axis < 0 for tensor in tensors):
        raise InvalidArgument("the model has state that does not grow, which no compiled form keeps")
    return tuple(Growth(tensor.input, tensor.output, tensor.axis) for tensor in tensors)


def _row_bytes(form: Executor, growing: Sequence[Growth]) -> int:
    tensors = {tensor.name: tensor for tensor in form.model.inputs}
    found = 0
    for each in growing:
        shape = tensors[each.input].shape
        size = np.dtype(tensors[each.input].dtype).itemsize
        found += size * int(np.prod([*shape[: each.axis], *shape[each.axis + 1 :]]))
    return found
