"""The state of decoders' sequences, which stays in this process from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from honed.daemon.worker.calls import HeldTensor, RunStep
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import Internal, ResourceExhausted, SequenceLost
from honed.runtime.dtypes import dtype

from .session import Bound, Session, given_value, taken_value

Array = NDArray[Any]
Values = Mapping[str, onnxruntime.OrtValue]
_SPARE = 64  # rows at least that a cache has room for when it is made, where it is appended to


@dataclass(frozen=True, slots=True)
class _Held:
    """What the next step of a sequence starts from, by input: state, and inputs that stay as they were.

    There may be room for more rows in what grows.
    """

    rows: int = 0
    tensors: Sequence[HeldTensor] = ()
    state: Values = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)
    bound: Bound | None = None

    @property
    def nbytes(self) -> int:
        state: int = sum(value.tensor_size_in_bytes() for value in self.state.values())
        return state + sum(array.nbytes for array in self.constants.values())


class HeldSequences:
    """The sequences by number. A step that fails leaves its sequence as it was."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def step(
        self, session: Session, call: RunStep, inputs: Mapping[str, Array]
    ) -> tuple[dict[str, Array], int, int]:
        """Run a step on the client's inputs; return the outputs wanted, rows and bytes of the state now.

        Raises SequenceLost where the state to start from is not here, ResourceExhausted where that after the
        step would be too large, and what `Session.run` raises.
        """
        held = self._held.get(call.sequence, _Held()) if call.rows else _Held()
        tensors = call.tensors or held.tensors
        missing = not tensors or any(t.input not in inputs and t.input not in held.state for t in tensors)
        if call.rows and missing:
            raise SequenceLost("the process that held its state has ended")
        replaced = [tensor for tensor in tensors if tensor.axis < 0 and not tensor.once]
        if held.state and replaced and held.rows != call.rows:
            raise SequenceLost("a request of it failed after it had run")
        taken = [tensor for tensor in tensors if not (call.rows and tensor.once)]
        wanted = [output.name for output in call.run.asked.outputs]
        # What is bound is held until the next step; the message, and shared memory, are not.
        inputs = {name: np.array(array) for name, array in inputs.items()}
        constants = {
            **held.constants,
            **{name: array for name, array in inputs.items() if name in call.constants},
        }
        grown = {t.input for t in tensors if t.axis >= 0 and t.input not in inputs} & session.in_place
        before = {
            t.input: _with_room(t, held, call) if t.input in grown else _before(t, held, call.rows)
            for t in tensors
            if t.input not in inputs
        }
        outputs = {
            **dict.fromkeys(wanted),
            **{t.output: before[t.input] if t.input in grown else None for t in taken},
        }
        bound = session.step({**constants, **inputs}, before, outputs, held.bound)
        found = bound.found(lasting=any(tensor.input not in grown for tensor in taken))
        given = {t.input: given_value(inputs[t.input]) for t in tensors if t.input in inputs}
        state = {**held.state, **given, **{t.input: found[t.output] for t in taken}}
        sizes = [state[t.input].shape()[t.axis] for t in tensors if t.axis >= 0 and t.input not in grown]
        rows = call.rows + call.count if grown else max(sizes, default=0)
        after = _Held(rows, tensors, state, constants, bound)
        if after.nbytes > call.max_state_bytes:
            raise ResourceExhausted(
                f"the sequence's state would have {after.nbytes} bytes, and its user may have "
                f"{call.max_state_bytes} more; end sequences, or raise max_mib of [sequences]"
            )
        self._held[call.sequence] = after
        values = {name: taken_value(found[name]) for name in wanted}
        given_rows = [t for t in taken if t.input in grown and t.output in values]
        values |= {t.output: _start(t, found[t.output], rows) for t in given_rows}
        return values, rows, after.nbytes

    def drop(self, sequences: Sequence[int]) -> None:
        """Let go of sequences, as far as they are here."""
        for number in sequences:
            self._held.pop(number, None)


def _before(tensor: HeldTensor, held: _Held, rows: int) -> onnxruntime.OrtValue:
    """Return what a state input is given: zeros at first; of what grew in a step that failed, its start."""
    value = held.state.get(tensor.input)
    if value is None:
        return given_value(np.zeros(tensor.begins, dtype(tensor.dtype).numpy))
    if tensor.axis < 0 or value.shape()[tensor.axis] == rows:
        return value
    return given_value(np.ascontiguousarray(_start(tensor, value, rows)))


def _with_room(tensor: HeldTensor, held: _Held, call: RunStep) -> onnxruntime.OrtValue:
    """Return what a state input is given that the step appends to: what it has, or a larger copy."""
    value, rows = held.state.get(tensor.input), call.rows + call.count
    if value is not None and value.shape()[tensor.axis] >= rows:
        return value
    shape = list(tensor.begins)
    shape[tensor.axis] = 1 << (rows + _SPARE - 1).bit_length()
    larger = np.zeros(shape, dtype(tensor.dtype).numpy)
    if value is not None:
        start = _start(tensor, value, call.rows)
        larger[(slice(None),) * tensor.axis + (slice(call.rows),)] = start
    return given_value(larger)


def _start(tensor: HeldTensor, value: onnxruntime.OrtValue, rows: int) -> Array:
    if value.shape()[tensor.axis] < rows:
        raise Internal(f"the state {tensor.input!r} has fewer rows than its sequence")
    return taken_value(value)[(slice(None),) * tensor.axis + (slice(rows),)]
