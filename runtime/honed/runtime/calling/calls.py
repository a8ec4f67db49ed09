"""Inferences as clients make them, one by one and in sequences: arrays to parameters, results to arrays.

Nothing is sent or received here; a client's own regions of shared memory are made and closed. Both clients
(`client`, `aio`) stand on this; docs/protocol.md is the specification.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from honed.protocol import methods
from honed.protocol.errors import (
    AlreadyExists,
    AnswerTooLarge,
    HonedError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
)
from honed.protocol.params import (
    Data,
    InferOptions,
    InferParams,
    InputTensor,
    OutputTensor,
    RegionName,
    RegionParams,
    RegionPlace,
    engine_name,
)
from honed.protocol.strict import Map
from honed.runtime.dtypes import STRING, dtype, from_datatype, is_text
from honed.runtime.encodings import decode_text, encode_text

from . import shared_memory, transport
from .shared_memory import Region, Scratch
from .steps import Ask, Steps, limit_of

Outputs = Sequence[str] | Mapping[str, NDArray[Any]]
GRACE: Final = 5.0  # seconds the service's own DEADLINE_EXCEEDED may take to arrive
_NOT_LENT: Final = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class InferCall:
    """Parameters of a ModelInfer, and the arrays its outputs must end up in."""

    params: InferParams
    into: dict[str, NDArray[Any]]  # arrays the caller wants written
    shared: frozenset[str]  # those of `into` that the service writes itself
    lent: Region | None = None  # where outputs may be answered that have no place of the caller's


@dataclass(frozen=True, slots=True)
class Lent:
    """A region for the inputs of one request, with `room` bytes behind them for its outputs."""

    region: Region
    room: int


@dataclass(frozen=True, slots=True)
class InferenceAnswer:
    """The result of a request: outputs by name, the engine that answered, and times in microseconds.

    `engine_name` is "opencl" (a compiled model on a device), "onnxruntime" (the CPU engine) or
    "opencl+onnxruntime" (partitions on both); `engine` has the words "gpu", "cpu" and "gpu+cpu" for these.
    """

    outputs: dict[str, NDArray[Any]]
    engine: str
    queue_us: int
    compute_us: int
    device: str = ""

    @property
    def engine_name(self) -> str:
        """The engine's name: "opencl", "onnxruntime" or "opencl+onnxruntime"."""
        return engine_name(self.engine)


@dataclass(frozen=True, slots=True)
class InSequence:
    """The sequence of a request, by its `id`, and whether the request begins or ends it.

    The service keeps the model's state from one request of a sequence to the next (docs/protocol.md). With
    `last_token`, a decoder answers for the last token of the request alone.
    """

    id: int | str
    start: bool = False
    end: bool = False
    last_token: bool = False


class Inferences:
    """What both clients know of their inferences: the regions, and what is kept for tensors without one."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout: float | None = 60.0) -> None:
        """Set up the client: `socket` is the service's path, `timeout` the seconds that a call may take.

        By default the socket is honed's own. `timeout` None, infinity, and a day or more set no limit.
        Raises InvalidArgument if `timeout` is no number of at least 0.
        """
        limit_of(timeout)
        self.socket = str(socket) if socket is not None else transport.default_socket(os.environ)
        self.timeout = timeout
        self._regions: dict[str, Region] = {}
        self._made = 0  # regions so far
        self._scratch = Scratch()
        self._link: Any = None

    def _answered(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        outputs: Outputs | None,
        timeout: float | None,
        priority: int,
        finite: bool,
        sequence: InSequence | None,
        compiled: bool = False,
    ) -> Steps[InferenceAnswer]:
        """Return the service's answer to an inference.

        Large tensors are handed over in shared memory that the client keeps for that.
        """
        seconds = limit_of(self.timeout if timeout is None else timeout)
        arrays, asked = portable(inputs), 0
        while True:
            regions = list(self._regions.values())
            sizes = unplaced(arrays, regions)
            given, room = self._scratch.bytes_for(model, sizes)
            if sequence is not None and not sequence.last_token:
                room = 0  # state comes back in line
            lent, why = None, None
            if given + room:
                try:
                    lent = yield from self._lent(given, room)
                except ResourceExhausted as error:
                    why = error
            if lent is None:
                self._scratch.check_sendable(sizes, why)
            try:
                with _NOT_LENT if lent is None else self._scratch.lent(lent.region):
                    call = infer_call(
                        model,
                        arrays,
                        outputs,
                        regions,
                        timeout=seconds,
                        priority=priority,
                        finite=finite,
                        sequence=sequence,
                        lent=lent,
                        compiled=compiled,
                    )
                    limit = None if seconds is None else seconds + GRACE
                    reply = yield Ask(methods.MODEL_INFER, call.params, limit)
                    answered = answer(call, reply.result)
            except AnswerTooLarge as error:
                if sequence is not None or error.nbytes <= asked:
                    raise
                asked = error.nbytes
                self._scratch.answered(model, [asked])
                continue
            made = [a.nbytes for name, a in answered.outputs.items() if name not in call.shared]
            self._scratch.answered(model, made)
            return answered

    def _lent(self, given: int, room: int) -> Steps[Lent]:
        """Return a region for `given` bytes of inputs and `room` bytes of outputs; raise ResourceExhausted.

        First forgets regions that are no longer used.
        """
        for region in self._scratch.dropped():
            self._discard(region)
            with contextlib.suppress(HonedError):  # one that the service does not know is forgotten, too
                yield unregister(region)
        ready = self._scratch.take(given + room)
        if ready is not None:
            return Lent(ready, room)
        region = self._new_region(shared_memory.region_bytes(given + room))
        self._regions[region.name] = region  # a connection that is made meanwhile knows it
        try:
            yield register(region)
        except AlreadyExists:
            pass
        except BaseException:
            self._discard(region)
            raise
        return Lent(region, room)

    def _forget_scratch(self) -> None:
        """Release the client's own regions; the service forgets regions with their connection."""
        self._scratch.close()
        for region in self._scratch.dropped():
            self._discard(region)

    def _discard(self, region: Region) -> None:
        """Close a region, which will not be registered again."""
        self._regions.pop(region.name, None)
        region.close()

    def _new_region(self, nbytes: int) -> Region:
        self._made += 1
        return Region(f"r{self._made}", nbytes)


def register(region: Region) -> Ask:
    """Return the call that registers a region with the service."""
    params = RegionParams(name=region.name, byte_size=region.nbytes)
    return Ask(methods.SHARED_MEMORY_REGISTER, params, descriptors=[region.descriptor])


def unregister(region: Region) -> Ask:
    """Return the call that has the service forget a region."""
    return Ask(methods.SHARED_MEMORY_UNREGISTER, RegionName(name=region.name))


def portable(inputs: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    """Return the arrays in the layout in which they travel: dense, row-major, little-endian."""
    dense = {name: np.asarray(value, order="C") for name, value in inputs.items()}
    return {name: a.astype(a.dtype.newbyteorder("<"), copy=False) for name, a in dense.items()}


def unplaced(arrays: Mapping[str, NDArray[Any]], regions: Sequence[Region]) -> list[int]:
    """Return the bytes of each array that lies in none of the regions; 0 for an array of text."""
    left = (a for a in arrays.values() if not regions or _place(a, regions) is None)
    return [0 if is_text(a) else a.nbytes for a in left]


def infer_call(
    model: str,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Outputs | None,
    regions: Iterable[Region],
    *,
    timeout: float | None,
    priority: int,
    finite: bool,
    sequence: InSequence | None = None,
    lent: Lent | None = None,
    compiled: bool = False,
) -> InferCall:
    """Return the ModelInfer for arrays from `portable`; those that lie in one of `regions` are not copied.

    The others are copied into `lent`, or sent along. `timeout` is in seconds; None: no limit.

    Raises InvalidArgument for element types honed does not carry.
    """
    known = list(regions)
    described, contents = _inputs(inputs, known, lent)
    into = dict(outputs) if isinstance(outputs, Mapping) else {}
    places = {name: _place(array, known) for name, array in into.items()}
    wanted = None
    if outputs is not None:
        wanted = tuple(OutputTensor(name=name, parameters=places.get(name)) for name in outputs)
    params = InferParams(
        model_name=model,
        inputs=tuple(described),
        outputs=wanted,
        raw_input_contents=tuple(contents),
        parameters=_options(timeout, priority, finite, sequence, lent, compiled),
    )
    shared = frozenset(name for name, place in places.items() if place)
    return InferCall(params, into, shared, lent.region if lent is not None else None)


def _inputs(
    inputs: Mapping[str, NDArray[Any]], regions: Sequence[Region], lent: Lent | None
) -> tuple[list[InputTensor], list[Data]]:
    """Return the description of each array with its place in memory, and the bytes of the others."""
    described: list[InputTensor] = []
    contents: list[Data] = []
    for name, array in inputs.items():
        datatype = STRING.datatype if is_text(array) else _datatype(array.dtype)
        place = _place(array, regions)
        if place is None and lent is not None and array.nbytes and not is_text(array):
            copy = lent.region.array(array.dtype.name, array.shape)
            copy[...] = array
            place = _place(copy, (lent.region,))
        described.append(InputTensor(name=name, datatype=datatype, shape=array.shape, parameters=place))
        if place is None:
            contents.append(_content(array))
    return described, contents


def _options(
    timeout: float | None,
    priority: int,
    finite: bool,
    sequence: InSequence | None,
    lent: Lent | None,
    compiled: bool,
) -> InferOptions:
    micros = methods.MAX_TIMEOUT_US if timeout is None else max(1, round(timeout * 1e6))
    options = InferOptions(timeout=micros, priority=priority, finite=finite, compiled=compiled or None)
    if sequence is not None:
        options.sequence_id = sequence.id
        options.sequence_start, options.sequence_end = sequence.start or None, sequence.end or None
        options.last_token = sequence.last_token or None
    if lent is not None and lent.room:
        options.shared_memory_region = lent.region.name
        options.shared_memory_offset = lent.region.room(lent.room)
        options.shared_memory_byte_size = lent.room
    return options


def infer_result(call: InferCall, result: Map) -> dict[str, NDArray[Any]]:
    """Return the output arrays of a ModelInfer's result.

    Raises Internal where the result is invalid, InvalidArgument where an array that the caller gave for an
    output is of another shape or type.
    """
    try:
        contents = iter(result["raw_output_contents"])
        arrays = {output["name"]: _output(call, output, contents) for output in result["outputs"]}
    except (KeyError, TypeError, ValueError, StopIteration, InvalidArgument) as error:
        raise Internal(f"the service's answer makes no sense ({error!r}); compare versions") from error
    return {name: _delivered(call, name, array) for name, array in arrays.items()}


def answer(call: InferCall, result: Map) -> InferenceAnswer:
    """Return the result of a ModelInfer with its engine and times; raise as `infer_result` does."""
    outputs = infer_result(call, result)
    try:
        parameters = result["parameters"]
        engine, device = str(parameters["engine"]), str(parameters.get("device", ""))
        return InferenceAnswer(
            outputs, engine, int(parameters["queue_us"]), int(parameters["compute_us"]), device
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Internal(f"the service's answer makes no sense ({error!r}); compare versions") from error


def _output(call: InferCall, output: Map, contents: Iterator[bytes]) -> NDArray[Any]:
    """Return the output as it arrived.

    For an output in the caller's shared memory, returns a stand-in of its type and shape.
    """
    kind = from_datatype(output["datatype"])
    if output["name"] in call.shared:
        return np.broadcast_to(np.empty((), kind.numpy), output["shape"])
    place = output["parameters"]
    if place and call.lent is not None:
        return call.lent.array(kind.name, output["shape"], int(place["shared_memory_offset"]))
    if kind is STRING:
        return decode_text(next(contents), output["shape"])
    return np.frombuffer(next(contents), kind.numpy).reshape(output["shape"])


def _delivered(call: InferCall, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return the output in the array that the caller gave for it, or else in a new array of its own."""
    target = call.into.get(name)
    if target is None:
        return array.copy()  # frombuffer's own is read-only
    if target.shape != array.shape or target.dtype != array.dtype:
        raise InvalidArgument(
            f"output {name!r} is {array.dtype} {array.shape} and the array given for it is "
            f"{target.dtype} {target.shape}; make them equal"
        )
    if name not in call.shared:
        target[...] = array
    return target


def _content(array: NDArray[Any]) -> Data:
    if is_text(array):
        return encode_text(array)
    return array.reshape(-1).view(np.uint8).data


@functools.cache  # NumPy makes a type's name anew each time
def _datatype(kind: np.dtype[Any]) -> str:
    return dtype(kind.name).datatype


def _place(array: NDArray[Any], regions: Sequence[Region]) -> RegionPlace | None:
    for region in regions:
        offset = region.offset_of(array)
        if offset is not None:
            return RegionPlace(
                shared_memory_region=region.name,
                shared_memory_offset=offset,
                shared_memory_byte_size=array.nbytes,
            )
    return None


class _Course:
    """A sequence of requests to one model, whose state the service keeps between them.

        with client.sequence("vad") as vad:
            for frame in frames:
                speech = vad.infer({"input": frame, "sr": 16000})["output"]

    The first request begins the sequence, with zeros for the state that it does not send; the end of the
    block ends it. If the service has lost it, requests raise SequenceLost until `restart` is called.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.id = uuid.uuid4().hex
        self.begun = False

    def restart(self) -> None:
        """Begin again with the next request, whose state is zeros, or what the request sends."""
        self.begun = False

    @contextlib.contextmanager
    def _next(self, last_token: bool) -> Iterator[InSequence]:
        """Yield what one request says of the sequence; a first request that fails has begun nothing."""
        first, self.begun = not self.begun, True
        try:
            yield InSequence(self.id, start=first, last_token=last_token)
        except BaseException:
            if first:
                self.begun = False
            raise

    @property
    def _last(self) -> InSequence:
        return InSequence(self.id, end=True)


class RequestSequence(_Course):
    """A sequence of a `Client`; its requests run one after the other, in the order in which they are sent."""

    def __init__(self, infer: Callable[..., dict[str, NDArray[Any]]], model: str) -> None:
        """Set up the sequence; `infer` is `Client.infer`."""
        super().__init__(model)
        self._infer = infer

    def infer(
        self, inputs: Mapping[str, ArrayLike], *, last_token: bool = False, **options: Any
    ) -> dict[str, NDArray[Any]]:
        """Run the model as `Client.infer` does; inputs that are state may be left out.

        With `last_token`, a model that generates answers for the last of its tokens alone.
        """
        with self._next(last_token) as sequence:
            return self._infer(self.model, inputs, sequence=sequence, **options)

    def close(self) -> None:
        """End the sequence, if the service still knows it; a later request begins another."""
        if self.begun:
            self.begun = False
            with contextlib.suppress(HonedError):
                self._infer(self.model, {}, sequence=self._last)

    def __enter__(self) -> RequestSequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncRequestSequence(_Course):
    """A sequence of an `AsyncClient`, whose methods are awaited."""

    def __init__(self, infer: Callable[..., Awaitable[dict[str, NDArray[Any]]]], model: str) -> None:
        """Set up the sequence; `infer` is `AsyncClient.infer`."""
        super().__init__(model)
        self._infer = infer

    async def infer(
        self, inputs: Mapping[str, ArrayLike], *, last_token: bool = False, **options: Any
    ) -> dict[str, NDArray[Any]]:
        """Run the model as `AsyncClient.infer` does; inputs that are state may be left out.

        With `last_token`, a model that generates answers for the last of its tokens alone.
        """
        with self._next(last_token) as sequence:
            return await self._infer(self.model, inputs, sequence=sequence, **options)

    async def close(self) -> None:
        """End the sequence, if the service still knows it; a later request begins another."""
        if self.begun:
            self.begun = False
            with contextlib.suppress(HonedError):
                await self._infer(self.model, {}, sequence=self._last)

    async def __aenter__(self) -> AsyncRequestSequence:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
