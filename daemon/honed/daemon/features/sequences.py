"""Keeps the state of sequences between requests, within limits, and runs a sequence's requests one by one.

A sequence belongs to the user that began it. Its tensors are those of its last successful request; a failed
one does not change them. A request is extended by the state tensors as inputs and outputs. The engine knows
nothing of sequences, so a request that is retried in a new worker starts from the same state.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from honed.daemon.aio import expire
from honed.daemon.core.model import ServedModel, kind_of
from honed.daemon.core.queue import ModelReplaced
from honed.daemon.core.state import Registry
from honed.daemon.feature import Feature, FeatureRequest, Infer
from honed.daemon.serving.plan import ResponseInfo, in_sequence, infer_result, nbytes, no_state, timeout_us
from honed.daemon.settings.schema import setting
from honed.daemon.store import state_pairs
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.store.state_pairs import StatePair
from honed.protocol.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    SequenceLost,
    Unavailable,
)
from honed.protocol.params import InferOptions, InputTensor, OutputTensor, PrepareParams
from honed.protocol.results import InferredOutput
from honed.protocol.service import SequencesStatus
from honed.protocol.strict import Map
from honed.runtime.dtypes import dtype

_REMEMBERED = 1000  # Ended sequences whose reason is kept
_SHOWN = 80  # Letters of a sequence's name in messages
_LONGEST_NAME = 128
_MADE_UP = 1  # Assumed value of a dynamic size in a sequence's initial state


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSettings:
    """The [sequences] table: the state that is kept between requests."""

    idle_seconds: float = setting(
        "The service forgets a sequence after this time without a request", 300.0, unit="s", minimum=0.1
    )
    max_per_model: int = setting("Concurrent sequences of one user and model", 64)
    max_mib: int = setting(
        "State of all sequences of one user; of decoders it is in the worker's memory", 64, unit="MiB"
    )
    max_tokens: int = setting("Tokens of one sequence of a decoder", 4096)


class SequenceKey(NamedTuple):
    """The key of a sequence; different users may use the same name."""

    user: int
    model: str
    name: int | str

    @property
    def label(self) -> str:
        """The sequence's description in messages."""
        name = self.name if isinstance(self.name, int) else repr(self.name[:_SHOWN])
        return f"sequence {name} of model {self.model!r}"

    def lost(self, why: str) -> SequenceLost:
        """Return the error for a request of the sequence, which is gone."""
        return SequenceLost(f"{self.label} is not known: {why}; begin it with sequence_start")


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A state tensor in the encoding of requests, row-major."""

    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True, kw_only=True)
class LiveSequence:
    """A sequence; `source` is the key of the model it began with, which may be replaced under its name.

    `tensors` holds the state by input; `busy` is set while a request runs. A decoder's state
    (`decoders.py`), of `held_bytes` and `rows`, lies in a worker under `number`, which is otherwise 0.
    """

    key: SequenceKey
    source: str
    pairs: tuple[StatePair, ...]
    used: float
    tensors: dict[str, StateTensor] = field(default_factory=dict)
    busy: bool = True
    number: int = 0
    rows: int = 0
    held_bytes: int = 0
    on_device: bool = False  # The device has the decoder's state, not the CPU engine

    @property
    def nbytes(self) -> int:
        """The bytes of the sequence's state."""
        return self.held_bytes + sum(len(tensor.data) for tensor in self.tensors.values())


class Sequences:
    """The sequences of all models.

    A request calls `begin` or `resume`, then `keep`, `record_step` or `record_failure`.

    No I/O and no clock: times are seconds on one monotonic clock.
    """

    def __init__(self, settings: SequenceSettings) -> None:
        self.settings = settings
        self._all: dict[SequenceKey, LiveSequence] = {}
        self._gone: dict[SequenceKey, str] = {}  # Reasons why sequences ended
        self.ended: list[int] = []  # Numbers of ended sequences whose state a worker still has

    def __len__(self) -> int:
        return len(self._all)

    @property
    def nbytes(self) -> int:
        """The bytes of the state of all sequences."""
        return sum(sequence.nbytes for sequence in self._all.values())

    def begin(self, key: SequenceKey, source: str, pairs: tuple[StatePair, ...], now: float) -> LiveSequence:
        """Begin a new sequence, replacing one of the same name.

        Raises ResourceExhausted if its user has `max_per_model` sequences of the model.
        """
        self.expire(now)
        self._remove(key)
        mine = sum((other.user, other.model) == (key.user, key.model) for other in self._all)
        if mine >= self.settings.max_per_model:
            raise ResourceExhausted(
                f"{mine} sequences of model {key.model!r} are under way already; end one of them, or raise "
                "max_per_model of [sequences] in the configuration"
            )
        self._gone.pop(key, None)
        sequence = self._all[key] = LiveSequence(key=key, source=source, pairs=pairs, used=now)
        return sequence

    def _remove(self, key: SequenceKey) -> bool:
        """Remove a sequence; return whether there was one."""
        sequence = self._all.pop(key, None)
        if sequence is not None and sequence.number:
            self.ended.append(sequence.number)
        return sequence is not None

    def resume(self, key: SequenceKey, source: str, now: float) -> LiveSequence:
        """Return a sequence for its next request; raise SequenceLost if there is none."""
        sequence = self._all.get(key)
        if sequence is not None and (sequence.source != source or self._idle(sequence, now)):
            self.drop(key, "its model was replaced" if sequence.source != source else self._why_idle)
            sequence = None
        if sequence is None:
            why = self._gone.get(key, "it was never begun, has ended, or the service was started anew since")
            raise key.lost(why)
        sequence.busy, sequence.used = True, now
        return sequence

    def keep(self, sequence: LiveSequence, tensors: Mapping[str, StateTensor], now: float) -> None:
        """Keep `tensors` as the state from which the next request starts.

        Raises ResourceExhausted if they exceed the user's share; the state is then unchanged.
        """
        if self._all.get(sequence.key) is not sequence:
            return  # The sequence ended during the request
        user, more = sequence.key.user, sum(len(tensor.data) for tensor in tensors.values())
        if more > self.allowance(sequence):
            raise ResourceExhausted(
                f"the state of {sequence.key.label} is {more} bytes, with which the sequences of user {user} "
                f"hold more than {self.settings.max_mib} MiB; end some, or raise max_mib of [sequences]"
            )
        sequence.tensors, sequence.used, sequence.busy = dict(tensors), now, False

    def allowance(self, sequence: LiveSequence) -> int:
        """Return the bytes of state that a sequence may have beside the others of its user."""
        user = sequence.key.user
        others = (s for k, s in self._all.items() if k.user == user and s is not sequence)
        return (self.settings.max_mib << 20) - sum(s.nbytes for s in others)

    def record_step(self, sequence: LiveSequence, rows: int, nbytes: int, now: float) -> None:
        """Record that a worker holds the state after a request, with its rows and bytes."""
        if self._all.get(sequence.key) is sequence:
            sequence.rows, sequence.held_bytes, sequence.used, sequence.busy = rows, nbytes, now, False
        else:
            self.ended.append(sequence.number)  # The sequence ended during the request

    def record_failure(self, sequence: LiveSequence, *, first: bool) -> None:
        """Record that a request failed; the next one starts from the same state.

        A sequence whose first request failed is dropped.
        """
        sequence.busy = False
        if first and self._all.get(sequence.key) is sequence:
            self.drop(sequence.key, "its first request failed")

    def drop(self, key: SequenceKey, why: str = "it has ended") -> None:
        """Remove a sequence, if there is one, and record why."""
        if self._remove(key):
            self._gone[key] = why
            while len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]

    def expire(self, now: float) -> None:
        """Drop sequences that had no request for `idle_seconds`."""
        for key in [key for key, sequence in self._all.items() if self._idle(sequence, now)]:
            self.drop(key, self._why_idle)

    def _idle(self, sequence: LiveSequence, now: float) -> bool:
        return not sequence.busy and now - sequence.used >= self.settings.idle_seconds

    @property
    def _why_idle(self) -> str:
        return f"it had no request for {self.settings.idle_seconds:g} s (idle_seconds of [sequences])"

    def forget_model(self, model: str) -> None:
        """Drop the sequences of a model that was removed."""
        for key in [key for key in self._all if key.model == model]:
            self.drop(key, "its model was removed")


def key_of(user: int, params: PrepareParams) -> SequenceKey | None:
    """Return the key of the sequence that a request belongs to, or None. Raises InvalidArgument."""
    options = params.parameters
    if options is None or not in_sequence(options):
        return None
    name = options.sequence_id
    assert name is not None
    if isinstance(name, str) and len(name) > _LONGEST_NAME:
        raise InvalidArgument(f"sequence_id has {len(name)} letters; give at most {_LONGEST_NAME}")
    return SequenceKey(user=user, model=params.model_name, name=name)


class SequenceFeature(Feature):
    """A feature that keeps the sequences of models with state, and orders their requests."""

    def __init__(self, settings: Callable[[], SequenceSettings], registry: Registry) -> None:
        """Initialise; `settings` returns those in force."""
        self._settings = settings
        self._registry = registry
        self._sequences = Sequences(settings())
        # Waiting requests of the sequences that have a running one.
        self._turns: dict[SequenceKey, deque[asyncio.Future[None]]] = {}

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Keep the state of a model that has some, unless it grows, which `decoders.py` handles."""
        pairs = state_of(entry)
        if not pairs or any(pair.grows_on >= 0 for pair in pairs):
            return None

        return self.in_turns(infer, lambda key, call: self._run(key, call, infer))

    def in_turns(self, infer: Infer, run: Callable[[SequenceKey, FeatureRequest], Awaitable[Map]]) -> Infer:
        """Return a function that has `run` answer a sequence's requests one by one, and `infer` others."""

        async def infer_in_turn(call: FeatureRequest) -> Map:
            key = key_of(call.connection.peer.uid, call.params)
            if key is None:
                return await infer(call)
            deadline = await self.begin_turn(key, call)
            try:
                return await run(key, dataclasses.replace(call, deadline=deadline, alone=True))
            except ModelReplaced as error:  # The state belongs to the replaced model
                raise Unavailable(str(error)) from None
            finally:
                self.end_turn(key)

        return infer_in_turn

    async def _run(self, key: SequenceKey, call: FeatureRequest, infer: Infer) -> Map:
        """Run a request with its state; initial state has the shapes of the model's interface."""
        # The model may have been replaced while the request waited; `call` is the copy for its turn.
        call.entry = entry = self._registry.model(call.params.model_name)
        now = time.monotonic()
        options, sequences = call.params.parameters or InferOptions(), self.sequences
        source, first = source_of(entry), bool(options.sequence_start)
        if options.sequence_end and not call.params.inputs:
            sequences.resume(key, source, now)
            sequences.drop(key)
            return empty_result(call)
        compiled, given = self._registry.interfaces(entry)
        interface = compiled or given
        assert interface is not None
        if not first:
            sequence = sequences.resume(key, source, now)
        elif pairs := state_of(entry):
            sequence = sequences.begin(key, source, pairs, now)
        else:
            raise no_state(entry.name)
        try:
            extended, requested, guessed = _with_state(sequence, interface, call, first=first)
            result, tensors = _split(sequence, requested, await infer(extended))
            _check_guesses(guessed, tensors)
            sequences.keep(sequence, tensors, time.monotonic())
        except BaseException:
            sequences.record_failure(sequence, first=first)
            raise
        if options.sequence_end:
            sequences.drop(key)
        return result

    def forget(self, model: str) -> None:
        """Drop the sequences of a removed model."""
        self.sequences.forget_model(model)

    def status(self) -> Mapping[str, object]:
        """Return the number of sequences and the bytes of their state."""
        held = self.sequences
        held.expire(time.monotonic())
        return {"sequences": SequencesStatus(count=len(held), bytes=held.nbytes)}

    def show_fields(self, entry: ServedModel) -> Mapping[str, object]:
        """Return the model's state: input of the next request by output."""
        return {"sequence_state": {pair.output.name: pair.input.name for pair in state_of(entry)}}

    async def tidy(self) -> None:
        """Drop sequences that had no request for `idle_seconds`."""
        self.sequences.expire(time.monotonic())

    @property
    def sequences(self) -> Sequences:
        """The sequences of all models, under the settings in force."""
        self._sequences.settings = self._settings()
        return self._sequences

    async def begin_turn(self, key: SequenceKey, call: FeatureRequest) -> float:
        """Wait for a request's turn in its sequence, in order of arrival; the turn lasts until `end_turn`.

        Returns the request's deadline (monotonic seconds); raises DeadlineExceeded if that passes before.
        """
        deadline = call.deadline or time.monotonic() + timeout_us(call.params.parameters) / 1e6
        if key not in self._turns:
            self._turns[key] = deque()
            return deadline
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._turns[key].append(turn)
        where = f"before the one before it in {key.label} was answered"
        error = DeadlineExceeded(f"the request's deadline passed {where}; allow more time")
        late = loop.call_at(deadline, expire, turn, error)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # The turn has begun
                self.end_turn(key)
            raise
        finally:
            late.cancel()
        return deadline

    def end_turn(self, key: SequenceKey) -> None:
        """Give the turn to the next request of a sequence."""
        waiting = self._turns[key]
        while waiting:
            if not (turn := waiting.popleft()).done():
                turn.set_result(None)
                return
        del self._turns[key]


def empty_result(call: FeatureRequest) -> Map:
    """Return the result of a request that only ends its sequence."""
    answered = ResponseInfo(0, 0, kind_of(call.entry.engine))
    return infer_result(call.params.model_name, call.id, answered, (), ())


def tokens_result(call: FeatureRequest, tokens: Sequence[int], answered: ResponseInfo) -> Map:
    """Return the result of a request for greedy tokens: output `tokens`, int64 [1, n]."""
    output = InferredOutput(
        name="tokens", datatype=dtype("int64").datatype, shape=(1, len(tokens)), parameters={}
    )
    raw = struct.pack(f"<{len(tokens)}q", *tokens)
    return infer_result(call.params.model_name, call.id, answered, (output,), (raw,))


def state_of(entry: ServedModel) -> tuple[StatePair, ...]:
    """Return the state pairs: outputs, and the inputs of the next request that receive them.

    State that the model's file declares is known only from the interface of the ONNX file.
    """
    interface, compiled = entry.manifest.interface, entry.compiled
    if interface is None and compiled is not None:
        interface = compiled.interface
    return state_pairs.pairs(interface, entry.manifest.state) if interface is not None else ()


def source_of(entry: ServedModel) -> str:
    """Return the key of a model's source, which all tuned versions share; the file's key without a source."""
    return entry.manifest.source_key if entry.manifest.sources else entry.key


def without_sequence(options: InferOptions) -> InferOptions:
    """Return a request's options for its run: without a sequence.

    State and chunks of outputs must be inline, so shared memory is kept only for the last token's outputs.
    """
    room = options.shared_memory_region if options.last_token else None
    return dataclasses.replace(
        options, sequence_id=None, sequence_start=None, sequence_end=None, shared_memory_region=room
    )


def _with_state(
    sequence: LiveSequence, interface: Interface, call: FeatureRequest, *, first: bool
) -> tuple[FeatureRequest, frozenset[str], dict[str, tuple[int, ...]]]:
    """Return a request extended by its state, the outputs that the client requested, and guessed shapes.

    These are the shapes of zeros for inputs with dynamic sizes.
    """
    params, given = call.params, {tensor.name for tensor in call.params.inputs}
    guessed: dict[str, tuple[int, ...]] = {}
    inputs: list[InputTensor] = []
    contents: list[bytes] = []
    begins = {tensor.name: tensor for tensor in interface.inputs}
    for pair in sequence.pairs:
        name = pair.input.name
        if name in given:
            continue
        if first:
            tensor, open_sizes = _zeros(begins[name])
            if open_sizes:
                guessed[name] = tensor.shape
        else:
            tensor = sequence.tensors[name]
        inputs.append(InputTensor(name=name, datatype=dtype(pair.input.dtype).datatype, shape=tensor.shape))
        contents.append(tensor.data)
    asked, outputs = _outputs(sequence, interface, params)
    extended = dataclasses.replace(
        params,
        parameters=without_sequence(params.parameters or InferOptions()),
        # State precedes the client's inputs, so that errors in these are reported as without state.
        inputs=(*inputs, *params.inputs),
        outputs=outputs,
    )
    request = dataclasses.replace(call, params=extended, data=(*contents, *call.data), cache={})
    return request, asked, guessed


def _split(sequence: LiveSequence, asked: frozenset[str], result: Map) -> tuple[Map, dict[str, StateTensor]]:
    """Return the part of a result that the client requested, and the state by input."""
    tensors: dict[str, StateTensor] = {}
    given = {pair.output.name: pair.input.name for pair in sequence.pairs}
    contents = iter(result["raw_output_contents"])
    outputs, raw = [], []
    for output in result["outputs"]:
        name = output["name"]
        data = None if output["parameters"] else next(contents)  # Parameters: it is in shared memory
        if name in given and data is not None:
            tensors[given[name]] = StateTensor(tuple(output["shape"]), bytes(data))
        if name in asked:
            outputs.append(output)
            if data is not None:
                raw.append(data)
    return {**result, "outputs": outputs, "raw_output_contents": raw}, tensors


def _check_guesses(guessed: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StateTensor]) -> None:
    for name, shape in guessed.items():
        if tensors[name].shape != shape:
            raise InvalidArgument(
                f"the state {name!r} begins with an open size, and zeros of shape {list(shape)} became "
                f"{list(tensors[name].shape)}; give {name!r} with the first request of the sequence"
            )


def _outputs(
    sequence: LiveSequence, interface: Interface, params: PrepareParams
) -> tuple[frozenset[str], tuple[OutputTensor, ...]]:
    """Return the outputs that the client requested, and those requested of the model, with the state."""
    state = {pair.output.name for pair in sequence.pairs}
    if not params.outputs:
        asked = frozenset(tensor.name for tensor in interface.outputs) - state
        return asked, tuple(OutputTensor(name=tensor.name) for tensor in interface.outputs)
    asked = frozenset(output.name for output in params.outputs)
    for output in params.outputs:
        if output.name in state and output.parameters is not None:
            raise InvalidArgument(f"output {output.name!r} is state, which the service keeps; take it inline")
    return asked, (*params.outputs, *(OutputTensor(name=name) for name in sorted(state - asked)))


def _zeros(tensor: TensorSpec) -> tuple[StateTensor, bool]:
    """Return zeros as a sequence's initial state, and whether a dynamic size was assumed."""
    if tensor.shape is None:
        raise InvalidArgument(
            f"the model leaves open how many dimensions the state {tensor.name!r} has; give it with the "
            "first request of the sequence"
        )
    shape = tuple(_MADE_UP if size < 0 else size for size in tensor.shape)
    made = TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=shape)
    return StateTensor(shape, bytes(nbytes(made))), tensor.is_open
