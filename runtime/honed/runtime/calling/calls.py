"""Inferences as clients make them: arrays to parameters, results to arrays.

Sends and receives nothing, but creates and closes a client's own regions of shared memory. Both clients
(`client`, `aio`) build on it; docs/protocol.md is the specification.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from honed.protocol import methods, strict
from honed.protocol.errors import (
    AlreadyExists,
    AnswerTooLarge,
    HonedError,
    Internal,
    InvalidArgument,
    NotPrepared,
    ResourceExhausted,
    Unimplemented,
)
from honed.protocol.params import (
    InferOptions,
    InferParams,
    InputTensor,
    OutputTensor,
    PrepareParams,
    RegionName,
    RegionParams,
    RegionPlace,
)
from honed.protocol.strict import Map
from honed.protocol.values import Data, engine_name
from honed.runtime.dtypes import STRING, DType, decode_text, dtype, encode_text, from_datatype, is_text

from . import rpc, shared_memory
from .rpc import RpcRequest, RpcSteps, limit_of
from .shared_memory import LARGE, Region, Scratch

Outputs = Sequence[str] | Mapping[str, NDArray[Any]]
GRACE: Final = 5.0  # Seconds for the service's own DEADLINE_EXCEEDED to arrive
_SWAPPED: Final = ">" if sys.byteorder == "little" else ">="  # Byte orders that are not little-endian
_NOT_LENT: Final = contextlib.nullcontext()
_KNOWN: Final = 64  # Templates that are remembered


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """A template of requests that differ in their data alone; `number` is None until prepared."""

    params: PrepareParams
    number: int | None = None


class _Output(NamedTuple):
    """An output of a result; `place` is its array in the lent region, None if the output was sent.

    If the service wrote the output to the caller's array, `place` is a placeholder of its type and shape.
    """

    name: str
    kind: DType
    shape: tuple[int, ...]
    place: NDArray[Any] | None


@dataclass(slots=True, eq=False)
class EncodedRequest(PreparedRequest):
    """An inference without its arrays: where its inputs go, and where its outputs lie.

    Inputs are `sent`, or copied to the arrays in `copied`, or lie in a region of the caller's. The service
    itself writes `shared` outputs, and may put others in `lent`.
    """

    sent: tuple[str, ...] = ()
    copied: tuple[tuple[str, NDArray[Any]], ...] = ()
    shared: frozenset[str] = frozenset()
    lent: Region | None = None
    _read: tuple[object, Sequence[_Output]] = None, ()  # Latest result's outputs, raw and parsed

    def contents(self, arrays: Mapping[str, NDArray[Any]]) -> list[Data]:
        """Return the data to be sent, and copy the other inputs to shared memory."""
        for name, place in self.copied:
            place[...] = arrays[name]
        return [_content(arrays[name]) for name in self.sent]

    def answer(self, result: Map, into: Mapping[str, NDArray[Any]]) -> InferenceResponse:
        """Return the response for a result; write outputs among `into` to the arrays there.

        Raises Internal if the result is invalid, and InvalidArgument if an array of the caller's has another
        shape or type than its output.
        """
        try:
            told, parameters = result["outputs"], result["parameters"]
            read = self._read
            if told != read[0]:
                read = self._read = told, [*map(self._output, told)]
            contents = iter(result["raw_output_contents"])
            arrays = {
                each.name: self._array(each, contents) if each.place is None else each.place
                for each in read[1]
            }
            engine, device = str(parameters["engine"]), str(parameters.get("device", ""))
            queue_us, compute_us = int(parameters["queue_us"]), int(parameters["compute_us"])
        except (KeyError, TypeError, ValueError, StopIteration, InvalidArgument) as error:
            raise Internal(f"the service's answer makes no sense ({error!r}); compare versions") from error
        outputs = {
            # An array of frombuffer is read-only
            name: self._deliver(name, array, into[name]) if name in into else array.copy()
            for name, array in arrays.items()
        }
        return InferenceResponse(outputs, engine, queue_us, compute_us, device)

    def _output(self, output: Map) -> _Output:
        name, kind, shape = output["name"], from_datatype(output["datatype"]), tuple(output["shape"])
        place = None
        if name in self.shared:
            place = np.broadcast_to(np.empty((), kind.numpy), shape)
        elif output["parameters"] and self.lent is not None:
            place = self.lent.array(kind.name, shape, int(output["parameters"]["shared_memory_offset"]))
        return _Output(name, kind, shape, place)

    def _array(self, output: _Output, contents: Iterator[bytes]) -> NDArray[Any]:
        """Return an output that was sent, possibly a read-only view of the message."""
        _, kind, shape, _ = output
        if kind is STRING:
            return decode_text(next(contents), shape)
        return np.frombuffer(next(contents), kind.numpy).reshape(shape)

    def _deliver(self, name: str, array: NDArray[Any], target: NDArray[Any]) -> NDArray[Any]:
        """Return the output in the caller's array for it."""
        if target.shape != array.shape or target.dtype != array.dtype:
            raise InvalidArgument(
                f"output {name!r} is {array.dtype} {array.shape} and the array given for it is "
                f"{target.dtype} {target.shape}; make them equal"
            )
        if name not in self.shared:
            target[...] = array
        return target


@dataclass(slots=True)  # Frozen takes four times as long to make
class InferenceResponse:
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
class SequenceOptions:
    """The sequence of a request, by its `id`, and whether the request begins or ends it.

    The service keeps the model's state from one request of a sequence to the next (docs/protocol.md). With
    `last_token`, a decoder returns the logits of the request's last token alone; with `greedy_tokens` it
    continues by itself, and returns so many `tokens`, fewer after one in `stop_tokens`.
    """

    id: int | str
    start: bool = False
    end: bool = False
    last_token: bool = False
    greedy_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()


class InferenceBase:
    """The base of both clients: their regions, scratch memory for other tensors, and prepared requests."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, timeout: float | None = 60.0) -> None:
        """Set up the client: `socket` is the service's path, `timeout` the seconds that a call may take.

        By default the socket is honed's own. `timeout` None, infinity, and a day or more set no limit.
        Raises InvalidArgument if `timeout` is no number of at least 0.
        """
        limit_of(timeout)
        self.socket = str(socket) if socket is not None else rpc.default_socket(os.environ)
        self.timeout = timeout
        self._regions: dict[str, Region] = {}
        self._made = 0  # Regions created so far, which numbers their names
        self._scratch = Scratch()
        # Templates of requests by all but their data: a second request of a template is prepared.
        self._known: dict[Hashable, PreparedRequest] = {}
        self._prepares = True  # False once the service does not know ModelPrepare
        self._link: Any = None

    def _request_inference(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        outputs: Outputs | None = None,
        timeout: float | None = None,
        priority: int = 2,
        finite: bool = False,
        sequence: SequenceOptions | None = None,
        compiled: bool = False,
    ) -> RpcSteps[InferenceResponse]:
        """Return the service's response to an inference.

        Large tensors go through shared memory that the client keeps for that.
        """
        seconds = limit_of(self.timeout if timeout is None else timeout)
        arrays, asked = portable(inputs), 0
        into: Mapping[str, NDArray[Any]] = outputs if isinstance(outputs, Mapping) else {}
        while True:
            regions = list(self._regions.values())
            places = {name: place_of(array, regions) for name, array in arrays.items()} if regions else {}
            sizes = [0 if is_text(a) else a.nbytes for name, a in arrays.items() if places.get(name) is None]
            given, room = self._scratch.bytes_for(model, sizes)
            if sequence is not None and not sequence.last_token:
                room = 0  # The service sends state in the message
            lent, why = None, None
            if given + room:
                try:
                    lent = yield from self._lend(given + room)
                except ResourceExhausted as error:
                    why = error
            if lent is None:
                self._scratch.check_sendable(sizes, why)
            wanted: dict[str, RegionPlace | None] | None = None
            if outputs is not None:
                wanted = {name: place_of(into[name], regions) if into else None for name in outputs}
            asking = Asking(priority, finite, sequence, compiled)
            like = (
                *(model, asking, lent, room, None if wanted is None else (*wanted.items(),)),
                *((name, array.dtype, array.shape, places.get(name)) for name, array in arrays.items()),
            )
            try:
                with _NOT_LENT if lent is None else self._scratch.lend(lent):
                    call = self._known.get(like)
                    if not isinstance(call, EncodedRequest):
                        call = infer_call(model, arrays, wanted, places, asking, lent, room)
                    reply = yield from self._send(like, call, call.contents(arrays), seconds)
                    answered = call.answer(reply, into)
            except AnswerTooLarge as error:
                if sequence is not None or error.nbytes <= asked:
                    raise
                asked = error.nbytes
                self._scratch.note_sizes(model, [asked])
                continue
            made = [a.nbytes for name, a in answered.outputs.items() if name not in call.shared]
            self._scratch.note_sizes(model, made)
            return answered

    def _send(
        self,
        like: Hashable,
        prepared: PreparedRequest,
        contents: Sequence[Data],
        seconds: float | None,
        name: str | None = None,
    ) -> RpcSteps[Map]:
        """Return the result of a request with `id` `name`; `like` identifies its template.

        The first request of a template is sent whole, as is one whose number the service does not know any
        more.
        """
        micros = methods.MAX_TIMEOUT_US if seconds is None else max(1, round(seconds * 1e6))
        limit = None if seconds is None else seconds + GRACE
        if like in self._known and self._prepares:
            try:
                if (number := prepared.number) is None:
                    answered = yield RpcRequest(methods.MODEL_PREPARE, prepared.params, limit)
                    number = prepared.number = methods.MODEL_PREPARE.result_of(answered.result).number
                run = {"number": number, "timeout": micros, "raw_input_contents": list(contents)}
                if name is not None:
                    run["id"] = name
                return (yield RpcRequest(methods.MODEL_RUN, run, limit)).result
            except NotPrepared:
                prepared.number = None
            except Unimplemented:
                self._prepares = False
        options = dataclasses.replace(prepared.params.parameters or InferOptions(), timeout=micros)
        whole = strict.copy_fields(
            InferParams, prepared.params, parameters=options, id=name, raw_input_contents=tuple(contents)
        )
        reply = yield RpcRequest(methods.MODEL_INFER, whole, limit)
        if like not in self._known:
            while len(self._known) >= _KNOWN:
                self._known.pop(next(iter(self._known)), None)
            self._known[like] = prepared
        return reply.result

    def _lend(self, nbytes: int) -> RpcSteps[Region]:
        """Return a region of at least `nbytes` bytes for one request; raise ResourceExhausted.

        Unregisters and closes dropped regions first.
        """
        for region in self._scratch.take_dropped():
            self._discard(region)
            with contextlib.suppress(HonedError):  # NotFound is fine: the service forgot the region already
                yield unregister(region)
        ready = self._scratch.take(nbytes)
        if ready is not None:
            return ready
        region = self._new_region(shared_memory.region_bytes(nbytes))
        self._regions[region.name] = region  # Registered by a reconnect meanwhile
        try:
            yield register(region)
        except AlreadyExists:
            pass
        except BaseException:
            self._discard(region)
            raise
        return region

    def _forget_scratch(self) -> None:
        """Release the client's own regions; the service forgets regions with their connection."""
        self._scratch.close()
        for region in self._scratch.take_dropped():
            self._discard(region)

    def _discard(self, region: Region) -> None:
        """Close a region for good, and forget the templates that use it."""
        self._regions.pop(region.name, None)
        for like, call in list(self._known.items()):
            if isinstance(call, EncodedRequest) and call.lent is region:
                self._known.pop(like, None)
        region.close()

    def _new_region(self, nbytes: int) -> Region:
        self._made += 1
        return Region(f"r{self._made}", nbytes)


def register(region: Region) -> RpcRequest:
    """Return the call that registers a region with the service."""
    params = RegionParams(name=region.name, byte_size=region.nbytes)
    return RpcRequest(methods.SHARED_MEMORY_REGISTER, params, descriptors=[region.descriptor])


def unregister(region: Region) -> RpcRequest:
    """Return the call that makes the service forget a region."""
    return RpcRequest(methods.SHARED_MEMORY_UNREGISTER, RegionName(name=region.name))


def portable(inputs: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    """Return the arrays in the layout of messages: dense, row-major, little-endian."""
    dense = {name: np.asarray(value, order="C") for name, value in inputs.items()}
    for name, array in dense.items():
        if array.dtype.byteorder in _SWAPPED:
            dense[name] = array.astype(array.dtype.newbyteorder("<"))
    return dense


class Asking(NamedTuple):
    """Options of a request, other than its tensors and its timeout."""

    priority: int = 2
    finite: bool = False
    sequence: SequenceOptions | None = None
    compiled: bool = False


def infer_call(
    model: str,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Iterable[str] | Mapping[str, RegionPlace | None] | None,
    places: Mapping[str, RegionPlace | None],
    asking: Asking,
    lent: Region | None = None,
    room: int = 0,
) -> EncodedRequest:
    """Return the encoded inference for arrays from `portable`; inputs with one of `places` are not copied.

    The others are copied into `lent`, followed by `room` bytes for outputs, or sent. `outputs` may have
    places, too.

    Raises InvalidArgument for element types that honed does not carry.
    """
    described: list[InputTensor] = []
    sent: list[str] = []
    copied: list[tuple[str, NDArray[Any]]] = []
    for name, array in inputs.items():
        datatype = STRING.datatype if is_text(array) else _datatype(array.dtype)
        place = places.get(name)
        if place is None and lent is not None and array.nbytes and not is_text(array):
            copy = lent.array(array.dtype.name, array.shape)
            copied.append((name, copy))
            place = place_of(copy, (lent,))
        elif place is None:
            sent.append(name)
        described.append(InputTensor(name=name, datatype=datatype, shape=array.shape, parameters=place))
    wanted = None
    if outputs is not None:
        given = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
        wanted = tuple(OutputTensor(name=name, parameters=place) for name, place in given.items())
    params = PrepareParams(
        model_name=model, inputs=tuple(described), outputs=wanted, parameters=_options(asking, lent, room)
    )
    shared = frozenset(output.name for output in wanted or () if output.parameters is not None)
    return EncodedRequest(params, None, tuple(sent), tuple(copied), shared, lent)


def _options(asking: Asking, lent: Region | None, room: int) -> InferOptions:
    sequence = asking.sequence
    said: Map = {"priority": asking.priority, "finite": asking.finite}
    if sequence is not None:
        said |= {"sequence_id": sequence.id, "last_token": sequence.last_token or None}
        said |= {"greedy_tokens": sequence.greedy_tokens or None}
        said |= {"stop_tokens": sequence.stop_tokens or None}
        said |= {"sequence_start": sequence.start or None, "sequence_end": sequence.end or None}
    if lent is not None and room:
        said |= {
            "shared_memory_region": lent.name,
            "shared_memory_offset": lent.room(room),
            "shared_memory_byte_size": room,
        }
    return InferOptions(**said, compiled=asking.compiled or None)


def _content(array: NDArray[Any]) -> Data:
    if is_text(array):
        return encode_text(array)
    return array.tobytes() if array.nbytes < LARGE else array.reshape(-1).view(np.uint8).data


@functools.cache  # Computing a NumPy type's name is slow
def _datatype(kind: np.dtype[Any]) -> str:
    return dtype(kind.name).datatype


def place_of(array: NDArray[Any], regions: Sequence[Region]) -> RegionPlace | None:
    """Return the place of an array in one of the regions; None if it lies elsewhere."""
    for region in regions:
        offset = region.offset_of(array)
        if offset is not None:
            return RegionPlace(
                shared_memory_region=region.name,
                shared_memory_offset=offset,
                shared_memory_byte_size=array.nbytes,
            )
    return None


# Names of these classes in honed 0.1.
InferenceAnswer = InferenceResponse
InSequence = SequenceOptions
