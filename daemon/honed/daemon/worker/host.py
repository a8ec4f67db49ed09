"""Provides the base of every process that runs models for the service, and runs batches of requests."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import queue
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from honed.process import rpc
from honed.process.limits import no_memory
from honed.process.rpc import Method, RpcServer, by_name
from honed.protocol.errors import (
    Cancelled,
    HonedError,
    Internal,
    InvalidArgument,
    OutOfMemory,
    PreconditionBroken,
    ResourceExhausted,
)
from honed.protocol.peer import NotificationReceived, RequestReceived
from honed.protocol.values import ROOM_ALIGN, Data, Empty, ObservedSizes
from honed.protocol.wire import FrameLimits, close_all
from honed.runtime.calling.shared_memory import map_descriptor
from honed.runtime.dtypes import STRING, decode_text, dtype, encode_text, is_text

from .calls import (
    BatchingCheck,
    BatchResult,
    CompareRows,
    ComparisonRun,
    DropRegion,
    DropSequences,
    GreedyChoice,
    InferenceResult,
    InputSpec,
    MapRegion,
    OutputSpec,
    Ping,
    ReadSequence,
    RegionSlice,
    RunBatch,
    RunModel,
    RunStep,
    RunTemplate,
    SequenceState,
    SetSequence,
    StateTensorSpec,
    StepResult,
    WarmUp,
    answer_too_large,
    pack_layout,
)
from .turns import CallUnderWay, Turns

# ---- Batches of requests, joined along the first dimension of every tensor ----

Array = NDArray[Any]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]
Stepped = tuple[dict[str, Array], int, int]  # Outputs, and the rows and bytes of the state after a step
_ROWS = (1, 2, 1)  # Rows of the requests that are compared
# Allows for sums in other orders, as for outputs in float32 (`honed.tuner.verify.tolerance`).
_ALLOWED = 1e-3
_ALLOWED_HALF = 2e-2
_SEED = 20


def run(model: Run, sets: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Run a model on all inputs at once and return the outputs for each of them.

    Raises InvalidArgument if the inputs cannot run as one.
    """
    rows = [next(iter(inputs.values())).shape[0] for inputs in sets]
    if len(sets) == 1:
        return [model(sets[0])]
    together = {name: np.concatenate([inputs[name] for inputs in sets]) for name in sets[0]}
    computed = model(together)
    for name, value in computed.items():
        if not value.ndim or value.shape[0] != sum(rows):
            raise InvalidArgument(
                f"output {name!r} has shape {list(value.shape)} for {sum(rows)} rows of inputs"
            )
    ends = np.cumsum(rows)
    return [
        {name: np.ascontiguousarray(value[end - count : end]) for name, value in computed.items()}
        for count, end in zip(rows, ends, strict=True)
    ]


def objection(model: Run, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    """Return why rows of a model depend on each other, found by running several; "" if they do not.

    `shapes` are those of one row, with NumPy's names of types.
    """
    rng = np.random.default_rng(_SEED)
    sets = [
        {name: _random_values((rows, *shape[1:]), kind, rng) for name, (shape, kind) in shapes.items()}
        for rows in _ROWS
    ]
    try:
        apart = [model(inputs) for inputs in sets]
        together = run(model, sets)
    except HonedError as error:
        return f"it cannot be run on several requests at once ({error})"
    for one, other in zip(apart, together, strict=True):
        for name, expected in one.items():
            found = other[name]
            if expected.shape != found.shape:
                return f"output {name!r} has another shape beside others: {list(found.shape)}"
            if not _close(expected, found):
                return f"output {name!r} is another when a request is run beside others"
    return ""


def zero_inputs(shape: tuple[int, ...], kind: str) -> Array:
    """Return an input of zeros, or of empty strings."""
    if kind == STRING.name:
        return np.full(shape, "", object)
    return np.zeros(shape, dtype(kind).numpy)


def _random_values(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> Array:
    """Return normally distributed values; for integers 0 and 1, which are valid for most indices."""
    if kind == STRING.name:
        return np.array([f"text {n}" for n in rng.integers(0, 9, int(np.prod(shape)))], object).reshape(shape)
    made: Array = zero_inputs(shape, kind)
    if made.dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(made.dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(made.dtype)


def _close(expected: Array, actual: Array) -> bool:
    if expected.dtype.kind in "iubO":
        return bool(np.array_equal(expected, actual))
    allowed = _ALLOWED if expected.dtype.itemsize > 2 else _ALLOWED_HALF
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    largest = float(np.max(np.abs(left), initial=0.0, where=np.isfinite(left)))
    return bool(np.allclose(left, right, rtol=0.0, atol=allowed * (largest or 1.0), equal_nan=True))


# ---- The base of every process that runs models for the service: its calls, and its tensors ----
#
# The service talks MessagePack-RPC to it on a socket pair. A kind of engine is a subclass of `Host` with
# methods of its own: `worker` owns an OpenCL device, `honed.cpu.worker` has ONNX Runtime. A separate thread
# loads models, so that inferences continue. A crash here ends this process and not the service.

# The service is trusted, and limits what it sends.
_FRAMES = FrameLimits(max_bytes=1 << 30, max_depth=512)
_MOST_SPANS = 8192  # Maximum spans of a timeline, so that it fits a message
_NO_ROOM = np.empty(0, np.uint8)
_log = logging.getLogger(__name__)


class Runs(Protocol):
    """A loaded model that can run."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name; raise a HonedError if the run fails."""


class SequenceStates(Protocol):
    """The states of sequences by number."""

    def state(self, number: int, rows: int) -> Mapping[str, Array]:
        """Return the first rows of a sequence's state by input; raise SequenceLost if they are not here."""

    def set(self, call: SetSequence, values: Mapping[str, Array]) -> None:
        """Set a sequence's state to these rows, by input."""

    def drop(self, sequences: Sequence[int]) -> None:
        """Drop the state of those sequences that are here."""


class Host(RpcServer, ABC):
    """A server of the service's calls: `LOADING` ones run in the loader thread, `METHODS` in their turn."""

    LOADING: ClassVar[Mapping[str, Method]]
    _sequences: SequenceStates

    def __init__(self, connected: socket.socket, bound: str = "") -> None:
        """Initialise; `bound` is the limit of memory and its setting, as `WorkerProgram.bound`."""
        super().__init__(connected, _FRAMES)
        self._bound = bound
        self._regions: dict[int, Array] = {}
        self._loads: queue.SimpleQueue[RequestReceived] = queue.SimpleQueue()
        self._loading = 0  # Number of the request that loads now
        self._turns = Turns(self._next, self._answer_call, self._refuse_call, self.beside)

    @abstractmethod
    def require_loaded(self, key: str) -> Runs:
        """Return a loaded model; raise NotLoaded if it is not."""

    @abstractmethod
    def finish_run(self, key: str, inputs: dict[str, Array], keep: bool) -> tuple[ObservedSizes, ...]:
        """Handle the end of a run, and return the sizes that its partitions observed.

        With `keep` the inputs may be recorded.
        """

    def take_lowering(self, key: str) -> str:
        """Return why a model now runs without optimisation, once after that began; otherwise ""."""
        return ""

    def serve(self) -> None:
        """Answer calls until the service closes the socket."""
        threading.Thread(target=self._load_all, name="loader", daemon=True).start()
        self._turns.serve()

    def _next(self) -> RequestReceived | None:
        """Wait for the next request that does not load; None once the service has closed the socket."""
        while (event := self.next_message()) is not None:
            if isinstance(event, NotificationReceived):
                if event.method == "Cancel":
                    self._turns.end(event.params.get("msgid"))
            elif event.method in self.LOADING:
                self._loads.put(event)
            else:
                return event
        return None

    def _answer_call(self, call: CallUnderWay) -> None:
        self.begin_call(call)
        self.handle(call.request)

    def _refuse_call(self, request: RequestReceived) -> None:
        self.refuse(request, _cancellation())
        close_all(request.descriptors)

    def begin_call(self, call: CallUnderWay) -> None:
        """Prepare to end the run of a call if its client gives up."""

    def beside(self, call: RequestReceived, other: RequestReceived) -> bool:
        """Return whether a call may begin while another one that takes long runs."""
        return False

    def _load_all(self) -> None:
        try:
            while True:
                request = self._loads.get()
                self._loading = request.msgid
                self.answer(request, self.LOADING[request.method])
        except Exception:  # noqa: BLE001 - without this thread loads would never end
            try:
                _log.exception("the worker cannot answer")
            finally:
                os._exit(1)  # The service starts another

    def report_build(self, done: int, of: int) -> None:
        """Report how many kernels of the model being loaded are built."""
        self.progress(msgid=self._loading, done=done, of=of)

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Return the error to answer for an exception; a bug in a request must not end the others."""
        if (call := self._turns.present) is not None and call.ended:
            return _cancellation()
        if isinstance(raised, HonedError):
            return raised
        if isinstance(raised, MemoryError):
            return OutOfMemory(no_memory("the worker ran out of memory", str(raised), self._bound))
        _log.error("%s failed", method, exc_info=raised)
        return Internal(f"the worker failed in {method} ({raised!r}); its log says more")

    def _map(self, call: MapRegion) -> Empty:
        descriptor = self.descriptors.pop(0)
        try:
            self._regions[call.region] = map_descriptor(descriptor, call.offset, call.byte_size)
        except (OSError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"the shared memory cannot be mapped any more ({error}); register a region anew"
            ) from error
        finally:
            os.close(descriptor)
        return Empty()

    def _ping(self, call: Ping) -> Empty:
        return Empty()

    def _drop(self, call: DropRegion) -> Empty:
        self._regions.pop(call.region, None)
        return Empty()

    def _infer(self, call: RunModel) -> InferenceResult:
        start = time.monotonic_ns()
        model = self.require_loaded(call.key)
        given = self._read_inputs(call)
        begun = time.monotonic_ns()
        computed = model.run(given)
        ended = time.monotonic_ns()
        observed = self.finish_run(call.key, given, call.template.keep)
        return self._answer_of(call, computed, start, begun, ended, observed)

    @abstractmethod
    def run_step(self, call: RunStep, inputs: dict[str, Array]) -> Stepped:
        """Run a step of a sequence; return the requested outputs, and the rows and bytes of its state now.

        Raises SequenceLost if its state is not here, ResourceExhausted if the state would grow too large, and
        the errors of runs.
        """

    def _drop_sequences(self, call: DropSequences) -> Empty:
        self._sequences.drop(call.sequences)
        return Empty()

    def _read_sequence(self, call: ReadSequence) -> SequenceState:
        state = self._sequences.state(call.sequence, call.rows)
        found = {name: np.ascontiguousarray(value) for name, value in state.items()}
        return SequenceState(
            tensors=tuple(
                InputSpec(name=name, dtype=array.dtype.name, shape=array.shape, place=None)
                for name, array in found.items()
            ),
            raw=tuple(array.reshape(-1).view(np.uint8).data for array in found.values()),
        )

    def _set_sequence(self, call: SetSequence) -> Empty:
        rng, values = np.random.default_rng(_SEED), dict[str, Array]()
        for at, tensor in enumerate(call.tensors):
            shape = tuple(
                call.rows if axis == tensor.axis else n for axis, n in enumerate(tensor.initial_shape)
            )
            if call.raw:
                values[tensor.input] = np.frombuffer(call.raw[at], dtype(tensor.dtype).numpy).reshape(shape)
            else:
                values[tensor.input] = _rows_made_up(tensor, shape, rng)
        self._sequences.set(call, values)
        return Empty()

    def _step(self, call: RunStep) -> StepResult:
        start = time.monotonic_ns()
        inputs = self._read_inputs(call.run)
        begun = time.monotonic_ns()
        computed, rows, nbytes = self.run_step(call, inputs)
        if call.greedy is not None:
            return self._continue(call, call.greedy, (computed, rows, nbytes), start, begun)
        ended = time.monotonic_ns()
        computed |= {name: _row(computed[name], call.count) for name in call.last_token if name in computed}
        result = self._answer_of(call.run, computed, start, begun, ended, ())
        return StepResult(result=result, rows=rows, nbytes=nbytes)

    def _continue(
        self, call: RunStep, greedy: GreedyChoice, stepped: Stepped, start: int, begun: int
    ) -> StepResult:
        """Choose the token after a step, and run the later steps, until one meets a limit."""
        computed, rows, nbytes = stepped
        chosen, count = list[int](), call.count
        while True:
            chosen.append(likeliest(_row(computed[greedy.logits], count)[0, -1]))
            if len(chosen) > len(greedy.later) or chosen[-1] in greedy.stop:
                break
            if (turn := self._turns.present) is not None and turn.ended:
                raise _cancellation()
            run = dataclasses.replace(call.run, raw=greedy.later[len(chosen) - 1])
            inputs = self._read_inputs(run)
            inputs[greedy.tokens] = np.full_like(inputs[greedy.tokens], chosen[-1])
            count = 1
            try:
                computed, rows, nbytes = self.run_step(
                    dataclasses.replace(call, run=run, rows=rows, count=count, tensors=()), inputs
                )
            except (ResourceExhausted, PreconditionBroken):  # The state is as before; the next step meets it
                break
        ended = time.monotonic_ns()
        result = InferenceResult(
            raw=(),
            layout=pack_layout((), ()),
            lowered=self.take_lowering(call.run.key),
            input_ns=begun - start,
            infer_ns=ended - begun,
            output_ns=0,
        )
        return StepResult(result=result, rows=rows, nbytes=nbytes, tokens=tuple(chosen))

    def _infer_batch(self, call: RunBatch) -> BatchResult:
        start = time.monotonic_ns()
        model = self.require_loaded(call.key)
        given = [self._read_inputs(member) for member in call.members]
        begun = time.monotonic_ns()
        computed = run(model.run, given)
        ended = time.monotonic_ns()
        return BatchResult(
            members=tuple(
                self._answer_of(member, rows, start, begun, ended, ())
                for member, rows in zip(call.members, computed, strict=True)
            )
        )

    def _compare_rows(self, call: CompareRows) -> BatchingCheck:
        shapes = {tensor.name: (tensor.shape, tensor.dtype) for tensor in call.inputs}
        return BatchingCheck(objection=objection(self.require_loaded(call.key).run, shapes))

    def _warm_up(self, call: WarmUp) -> ComparisonRun:
        zeros = {t.name: zero_inputs(t.shape, t.dtype) for t in call.inputs}
        begun = time.monotonic_ns()
        self.require_loaded(call.key).run(zeros)
        return ComparisonRun(ns=time.monotonic_ns() - begun)

    def _read_inputs(self, call: RunModel) -> dict[str, Array]:
        """Return the inputs as arrays; raise InvalidArgument if they are malformed."""
        contents, asked = iter(call.raw), call.template
        given = {tensor.name: self._tensor(tensor, contents) for tensor in asked.inputs}
        if asked.finite:
            _check_finite(given)
        return given

    def _answer_of(
        self,
        call: RunModel,
        computed: dict[str, Array],
        start: int,
        begun: int,
        ended: int,
        observed: tuple[ObservedSizes, ...],
    ) -> InferenceResult:
        """Write the outputs, and return the answer; the arguments are times in nanoseconds."""
        asked = call.template
        inline, offsets = self._deliver(computed, asked)
        done = time.monotonic_ns()
        return InferenceResult(
            raw=tuple(inline),
            layout=pack_layout([computed[output.name].shape for output in asked.outputs], offsets),
            observed=observed,
            lowered=self.take_lowering(call.key),
            input_ns=begun - start,
            infer_ns=ended - begun,
            output_ns=done - ended,
        )

    def _deliver(
        self, computed: dict[str, Array], template: RunTemplate
    ) -> tuple[list[memoryview], list[int]]:
        """Write outputs to their places, or to the request's shared memory, and return the others.

        Also returns each output's offset in that shared memory, -1 if it is not there. Raises AnswerTooLarge
        if the returned outputs exceed `max_bytes` together.
        """
        inline: list[memoryview] = []
        offsets: list[int] = []
        room = self._place(template.room) if template.room is not None else _NO_ROOM
        used = unplaced = 0
        for output in template.outputs:
            value, offset = computed[output.name], -1
            if is_text(value):
                inline.append(memoryview(encode_text(value)))
                offsets.append(offset)
                continue
            data = value.reshape(-1).view(np.uint8)
            if output.place is not None:
                self._write_place(output, output.place, value.shape, data)
            elif data.size and used + data.size <= room.size:
                room[used : used + data.size] = data
                offset, used = used, -(-(used + data.size) // ROOM_ALIGN) * ROOM_ALIGN
            else:
                inline.append(data.data)
                unplaced += -(-data.size // ROOM_ALIGN) * ROOM_ALIGN
            offsets.append(offset)
        whole = sum(map(len, inline))
        if whole > template.max_bytes:
            # Text cannot be in shared memory
            raise answer_too_large(whole, template.max_bytes, used + unplaced if unplaced else 0)
        return inline, offsets

    def _write_place(self, output: OutputSpec, place: RegionSlice, shape: Sequence[int], data: Array) -> None:
        target = self._place(place)
        if target.size != data.size:
            raise InvalidArgument(
                f"output {output.name!r} has {data.size} bytes for these inputs (shape {list(shape)}) and "
                f"{target.size} are given for it in shared memory; give as many, or take it inline"
            )
        target[:] = data

    def _tensor(self, spec: InputSpec, contents: Iterator[Data]) -> Array:
        data = next(contents) if spec.place is None else self._place(spec.place)
        if spec.dtype == STRING.name:
            return decode_text(bytes(data), spec.shape)
        array = np.frombuffer(data, dtype(spec.dtype).numpy).reshape(spec.shape)
        if spec.dtype == "bool":
            values = array.view(np.uint8)
            if spec.place is not None:
                return np.not_equal(values, 0)  # The client can write any byte at any time
            if np.any(values > 1):
                raise InvalidArgument(
                    f"the data of input {spec.name!r} must hold the bytes 0 and 1 only; it is BOOL"
                )
        return array

    def _place(self, place: RegionSlice) -> Array:
        return self._regions[place.region][place.offset : place.offset + place.nbytes]

    METHODS: ClassVar[dict[str, Method]] = by_name(
        {
            MapRegion: _map,
            DropRegion: _drop,
            Ping: _ping,
            RunModel: _infer,
            RunStep: _step,
            ReadSequence: _read_sequence,
            SetSequence: _set_sequence,
            DropSequences: _drop_sequences,
            RunBatch: _infer_batch,
            CompareRows: _compare_rows,
            WarmUp: _warm_up,
        }
    )


def _cancellation() -> Cancelled:
    return Cancelled("the run was ended, as nobody waits for it any more")


def _rows_made_up(tensor: StateTensorSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return random rows of state, normally distributed; small integers for integer types."""
    made = rng.standard_normal(shape, np.float32) * (
        32 if tensor.dtype.lstrip("u").startswith("int") else 0.5
    )
    made = np.abs(made) if tensor.dtype.startswith("uint") else made
    return made.astype(dtype(tensor.dtype).numpy)


def _row(value: Array, count: int) -> Array:
    """Return the row of the last of `count` tokens, [batch, 1, ...]; some models return only that."""
    return np.ascontiguousarray(value[:, count - 1 : count]) if value.shape[1] >= count else value


def likeliest(logits: Array) -> int:
    """Return the place of the largest element."""
    if logits.dtype != np.float16:
        return int(logits.argmax())
    # NumPy takes a hundred times as long to compare halves as integers. As these they have the same order, or
    # if all are negative the opposite one.
    bits = logits.view(np.int16)
    return int(bits.argmax() if bits.max(initial=-1) >= 0 else bits.argmin())


def _check_finite(inputs: dict[str, Array]) -> None:
    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidArgument(
                f"input {name!r} holds NaN or infinity; correct it, or do not ask for finite"
            )


def check_timeline(what: str, spans: int) -> None:
    """Raise InvalidArgument if an inference has too many spans for a timeline."""
    if spans > _MOST_SPANS:
        raise InvalidArgument(
            f"an inference {what} and a timeline holds {_MOST_SPANS}; profile the model without one"
        )


def connect(arguments: Sequence[str]) -> socket.socket:
    """Return the socket to the service, as in `rpc`, after preparing this process to run models."""
    connected = rpc.connect(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="worker: %(message)s")
    return connected
