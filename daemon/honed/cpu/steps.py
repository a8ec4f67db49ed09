"""Keeps the state of decoders' sequences in the CPU engine from one step to the next.

Each sequence has its own values, which ONNX Runtime grows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from honed.daemon.store.compiled import TensorSpec
from honed.daemon.worker.calls import RunStep, SetSequence, StateTensorSpec, state_lost
from honed.daemon.worker.host import Stepped
from honed.daemon.worker.step_inputs import StepSize, is_made, values_of
from honed.protocol.errors import Internal, SequenceLost
from honed.runtime.dtypes import dtype

from .session import BoundSession, Session, array_of, ortvalue_of

Array = NDArray[Any]
Values = Mapping[str, onnxruntime.OrtValue]
_UNBOUNDED = 1 << 62  # Rows without a limit
_SPARE = 64  # Minimum spare rows of a new cache that is appended to in place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """The preparation shared by consecutive steps of a sequence with the same run template `form`.

    They return the `wanted` outputs; those in `cut` may have unused rows. State that is not `replaced` is
    appended to in place, up to `room` rows; otherwise the shapes of `counted` have the number of rows. The
    worker generates the inputs in `made`.
    """

    form: bytes
    room: int
    wanted: Sequence[str]
    cut: Sequence[StateTensorSpec]
    replaced: Sequence[StateTensorSpec]
    counted: Sequence[StateTensorSpec]
    made: Sequence[TensorSpec]
    outputs: Mapping[str, onnxruntime.OrtValue | None]


@dataclass(frozen=True, slots=True)
class _Held:
    """The data from which the next step of a sequence starts, by input: state and constant inputs.

    Growing state may have spare rows. `nbytes` is the size of all, 0 if it was not counted.
    """

    rows: int = 0
    tensors: Sequence[StateTensorSpec] = ()
    state: Values = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)
    bound: BoundSession | None = None
    alike: _Alike | None = None
    nbytes: int = 0


class CpuSequences:
    """The sequences by number; a failed step does not change its sequence."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._changing = threading.Lock()

    def unbind(self) -> None:
        """Drop the bindings of all sequences, and so their sessions; the next steps bind again."""
        with self._changing:
            self._held = {number: replace(held, bound=None) for number, held in self._held.items()}

    def step(self, session: Session, call: RunStep, inputs: Mapping[str, Array]) -> Stepped:
        """Run a step on the client's inputs; return the requested outputs, rows and bytes of the state now.

        Raises SequenceLost if the state is not here, ResourceExhausted if it would grow too large, and the
        errors of `Session.run`.
        """
        held = self._held.get(call.sequence, _Held()) if call.rows else _Held()
        alike, rows = held.alike, call.rows + call.count
        if alike is None or alike.form != call.run.form or held.rows != call.rows or rows > alike.room:
            held, alike = _prepare(session, call, held, inputs)
        step = StepSize(call.batch, call.count, call.rows)
        # Inputs are copied: bindings live until the next step, but the message and shared memory do not.
        inputs = {name: np.array(array) for name, array in inputs.items() if name not in held.state}
        inputs |= {spec.name: np.full(*values_of(spec, step), dtype(spec.dtype).numpy) for spec in alike.made}
        constants = {**held.constants, **{name: inputs[name] for name in call.constants if name in inputs}}
        bound = session.step({**constants, **inputs}, held.state, alike.outputs, held.bound)
        found, state, nbytes = bound.fetch_outputs(lasting=bool(alike.replaced)), held.state, held.nbytes
        if alike.replaced:
            state = {**state, **{tensor.input: found[tensor.output] for tensor in alike.replaced}}
        if alike.counted:
            rows = max(state[tensor.input].shape()[tensor.axis] for tensor in alike.counted)
        if alike.replaced or not nbytes:
            nbytes = sum(value.tensor_size_in_bytes() for value in state.values())
            nbytes += sum(array.nbytes for array in constants.values())
        call.check_state(nbytes)
        with self._changing:
            self._held[call.sequence] = _Held(rows, held.tensors, state, constants, bound, alike, nbytes)
        values = {name: array_of(found[name]) for name in alike.wanted}
        values |= {tensor.output: _start(tensor, found[tensor.output], rows) for tensor in alike.cut}
        return values, rows, nbytes

    def state(self, number: int, rows: int) -> Mapping[str, Array]:
        """Return the first rows of a sequence's growing state by input; raise SequenceLost without them."""
        held = self._held.get(number)
        if held is None or held.rows < rows:
            raise state_lost()
        growing = [tensor for tensor in held.tensors if tensor.axis >= 0]
        return {tensor.input: _start(tensor, held.state[tensor.input], rows) for tensor in growing}

    def set(self, call: SetSequence, values: Mapping[str, Array]) -> None:
        """Set a sequence's state to rows computed elsewhere."""
        state = {name: ortvalue_of(np.array(value)) for name, value in values.items()}
        with self._changing:
            self._held[call.sequence] = _Held(call.rows, call.tensors, state)

    def drop(self, sequences: Sequence[int]) -> None:
        """Drop those sequences that are here."""
        with self._changing:
            for number in sequences:
                self._held.pop(number, None)


def _prepare(
    session: Session, call: RunStep, held: _Held, inputs: Mapping[str, Array]
) -> tuple[_Held, _Alike]:
    """Return the data that a step starts from, with room for its rows, and its preparation.

    Raises SequenceLost if state is missing.
    """
    tensors = call.tensors or held.tensors
    missing = not tensors or any(t.input not in inputs and t.input not in held.state for t in tensors)
    if call.rows and missing:
        raise state_lost()
    if held.rows != call.rows and held.state and any(t.axis < 0 and not t.set_once for t in tensors):
        raise SequenceLost("a request of it failed after it had run")
    given = {t.input: ortvalue_of(np.array(inputs[t.input])) for t in tensors if t.input in inputs}
    grown = {t.input for t in tensors if t.axis >= 0 and t.input not in given} & session.in_place
    state = given | {
        t.input: _with_room(t, held, call) if t.input in grown else _before(t, held, call.rows)
        for t in tensors
        if t.input not in given
    }
    taken = [tensor for tensor in tensors if not (call.rows and tensor.set_once)]
    replaced = [tensor for tensor in taken if tensor.input not in grown]
    wanted = [output.name for output in call.run.template.outputs]
    places = {tensor.output: state[tensor.input] for tensor in taken if tensor.input in grown}
    rooms = [state[tensor.input].shape()[tensor.axis] for tensor in tensors if tensor.input in grown]
    alike = _Alike(
        # A first step, and one that sends state, differ from the next, which must prepare again.
        form=call.run.form if call.rows and not given else b"",
        room=min(rooms, default=_UNBOUNDED),
        wanted=wanted,
        cut=[tensor for tensor in taken if tensor.input in grown and tensor.output in wanted],
        replaced=replaced,
        counted=() if grown else [tensor for tensor in replaced if tensor.axis >= 0],
        made=[spec for spec in session.interface.inputs if is_made(spec) and spec.name not in inputs],
        outputs=dict.fromkeys([*wanted, *(tensor.output for tensor in replaced)]) | places,
    )
    return _Held(call.rows, tensors, state, held.constants, held.bound), alike


def _before(tensor: StateTensorSpec, held: _Held, rows: int) -> onnxruntime.OrtValue:
    """Return the value of a state input: zeros at first; without the rows of a failed step."""
    value = held.state.get(tensor.input)
    if value is None:
        return ortvalue_of(np.zeros(tensor.initial_shape, dtype(tensor.dtype).numpy))
    if tensor.axis < 0 or value.shape()[tensor.axis] == rows:
        return value
    return ortvalue_of(np.ascontiguousarray(_start(tensor, value, rows)))


def _with_room(tensor: StateTensorSpec, held: _Held, call: RunStep) -> onnxruntime.OrtValue:
    """Return the value of a state input that the step appends to: the present one, or a larger copy."""
    value, rows = held.state.get(tensor.input), call.rows + call.count
    if value is not None and value.shape()[tensor.axis] >= rows:
        return value
    shape = list(tensor.initial_shape)
    shape[tensor.axis] = 1 << (rows + _SPARE - 1).bit_length()
    larger = np.zeros(shape, dtype(tensor.dtype).numpy)
    if value is not None:
        start = _start(tensor, value, call.rows)
        larger[(slice(None),) * tensor.axis + (slice(call.rows),)] = start
    return ortvalue_of(larger)


def _start(tensor: StateTensorSpec, value: onnxruntime.OrtValue, rows: int) -> Array:
    if value.shape()[tensor.axis] < rows:
        raise Internal(f"the state {tensor.input!r} has fewer rows than its sequence")
    return array_of(value)[(slice(None),) * tensor.axis + (slice(rows),)]
