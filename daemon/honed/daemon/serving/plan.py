"""Checks requests against a model before the worker receives them. No I/O."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.queue import PRIORITIES, EmptyAxes
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.store.names import Shapes
from honed.daemon.worker.calls import (
    InferenceResult,
    InputSpec,
    OutputSpec,
    RegionSlice,
    RunModel,
    RunTemplate,
    answer_too_large,
    unpack_layout,
)
from honed.daemon.worker.shared_memory import HeldRegion, RegionTable
from honed.protocol import strict
from honed.protocol.errors import HonedError, InvalidArgument, NotCompiled, SequenceLost
from honed.protocol.methods import DEFAULT_TIMEOUT_US, MAX_TIMEOUT_US, VERSION
from honed.protocol.params import InferOptions, InputTensor, PrepareParams, RegionPlace
from honed.protocol.results import InferredOutput, InferResult, InferTimes
from honed.protocol.strict import Map
from honed.protocol.values import ENGINE_NAMES, ROOM_ALIGN, Data, TensorMetadata
from honed.runtime.compiled.model import PartitionTensor, Tensor
from honed.runtime.dtypes import STRING, dtype

_LEAST_TEXT = 4  # Minimum bytes of a string: its length


@dataclass(frozen=True, slots=True)
class RegionRange:
    """A range of bytes in a region."""

    region: HeldRegion
    offset: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> RegionRange:
        """Return a range of `nbytes` within this one, from its byte `offset` on."""
        return RegionRange(self.region, self.offset + offset, nbytes)


@dataclass(slots=True)  # Constructing a frozen one takes four times as long
class ResponseInfo:
    """The microseconds that a request waited and ran, and its engine: "gpu", "cpu" or "gpu+cpu"."""

    queue_us: int
    compute_us: int
    engine: str
    device: str = ""


@dataclass(kw_only=True, eq=False)  # Cached properties need a __dict__, so there are no slots
class InferencePlan:
    """A checked request without its data and `id`: the inputs and outputs of the worker's call.

    With `needs_cpu_engine` only the CPU engine accepts the shapes. Inputs have the shapes of the request.
    """

    model: str
    timeout: float  # Seconds
    priority: int
    finite: bool
    keep: bool  # The worker may keep the inputs to compare a later version on
    inputs: tuple[tuple[TensorSpec, RegionRange | None], ...]
    outputs: tuple[tuple[TensorSpec, RegionRange | None], ...]
    room: RegionRange | None  # Shared memory for outputs without a place of their own
    max_bytes: int  # Limit of the outputs inside the response
    needs_cpu_engine: bool
    _answer: tuple[object, Map] = field(init=False, default=(None, {}))

    @functools.cached_property
    def empty(self) -> EmptyAxes:
        """The inputs with sizes of 0, each with the axes of these sizes."""
        return tuple(
            (t.name, tuple(axis for axis, size in enumerate(t.shape) if not size))
            for t, _ in self.inputs
            if t.shape and 0 in t.shape
        )

    @functools.cached_property
    def regions(self) -> list[HeldRegion]:
        """The regions that the request uses, each once."""
        named = (*self.inputs, *self.outputs, (None, self.room))
        return list({place.region.number: place.region for _, place in named if place}.values())

    @functools.cached_property
    def _sizes(self) -> list[int | None]:
        """The bytes of each input sent with a request; None for text, which contains its length."""
        sent = [tensor for tensor, place in self.inputs if place is None]
        return [None if _is_text(tensor) else nbytes(tensor) for tensor in sent]

    def check_data(self, data: Sequence[Data]) -> None:
        """Raise InvalidArgument if the data of a request do not have the sizes of its inputs."""
        if [len(each) for each in data] == self._sizes:
            return
        sent = [tensor for tensor, place in self.inputs if place is None]
        for tensor, content in itertools.zip_longest(sent, data[: len(sent)]):
            _check_content(tensor, content)
        if len(data) > len(sent):
            raise InvalidArgument(
                f"raw_input_contents holds {len(data) - len(sent)} more than the inputs that are not in "
                "shared memory; give one for each of those"
            )

    def call(self, data: Sequence[Data], key: str) -> RunModel:
        """Return the worker's call for the model loaded under `key`."""
        return RunModel(key=key, form=self._template, raw=tuple(data))

    @functools.cached_property
    def _template(self) -> bytes:
        return self.form().pack()

    def form(self) -> RunTemplate:
        """Return the worker's run template: the call without the data."""
        return RunTemplate(
            inputs=tuple(
                InputSpec(name=t.name, dtype=t.dtype, shape=t.shape or (), place=_slice(place))
                for t, place in self.inputs
            ),
            outputs=tuple(OutputSpec(name=t.name, place=_slice(place)) for t, place in self.outputs),
            room=_slice(self.room),
            finite=self.finite,
            keep=self.keep,
            max_bytes=self.max_bytes,
        )

    def answer(self, ran: InferenceResult, name: str, answered: ResponseInfo) -> Map:
        """Return the result of ModelInfer, as a map to send, for a request with the `id` `name`."""
        like = (ran.layout, answered.engine, answered.device)
        if like != self._answer[0]:
            outputs = self._inferred(*unpack_layout(ran.layout))
            self._answer = like, infer_result(self.model, "", answered, outputs, ())
        usual = self._answer[1]
        times = usual["parameters"] | {"queue_us": answered.queue_us, "compute_us": answered.compute_us}
        return {**usual, "id": name, "parameters": times, "raw_output_contents": list(ran.raw)}

    def _inferred(
        self, shapes: Sequence[tuple[int, ...]], offsets: Sequence[int]
    ) -> tuple[InferredOutput, ...]:
        """Return the outputs of the worker's response, which describes them by shapes and offsets."""
        found = []
        for (tensor, place), shape, offset in zip(self.outputs, shapes, offsets, strict=True):
            if self.room is not None and offset >= 0:
                place = self.room.part(offset, nbytes_of(tensor, shape))
            kind, where = dtype(tensor.dtype).datatype, _place_map(place)
            found.append(InferredOutput(name=tensor.name, datatype=kind, shape=shape, parameters=where))
        return tuple(found)


def infer_result(
    model: str, name: str, answered: ResponseInfo, outputs: tuple[InferredOutput, ...], raw: tuple[bytes, ...]
) -> Map:
    """Return the result of ModelInfer for the request with the `id` `name`, as a map to send."""
    result = InferResult(
        model_name=model,
        model_version=VERSION,
        id=name,
        parameters=InferTimes(
            queue_us=answered.queue_us,
            compute_us=answered.compute_us,
            engine=answered.engine,
            engine_name=ENGINE_NAMES[answered.engine],
            device=answered.device,
        ),
        outputs=outputs,
        raw_output_contents=raw,
    )
    plain: Map = strict.to_plain(result)
    return plain


def describe(tensor: Tensor | PartitionTensor | TensorSpec) -> TensorMetadata:
    """Return a tensor's metadata; an unknown rank is shown as a single dynamic dimension."""
    shape = (-1,) if tensor.shape is None else tensor.shape
    return TensorMetadata(name=tensor.name, datatype=dtype(tensor.dtype).datatype, shape=shape)


def check(
    params: PrepareParams,
    compiled: Interface | None,
    source_interface: Interface | None,
    regions: RegionTable,
    *,
    max_bytes: int,
    keep: bool,
) -> InferencePlan:
    """Check a request without its data, and return its plan; raise InvalidArgument or NotFound.

    `compiled` is the interface of the compiled file, `source_interface` that of the ONNX file if the CPU
    engine can run it; at least one is not None. Raises AnswerTooLarge if the response would hold more than
    `max_bytes`. With `keep` the worker may keep the inputs for comparisons.
    """
    if in_sequence(params.parameters):
        raise _without_state(params)
    only_open = compiled is None or (source_interface is not None and not _fits(params, compiled))
    interface = source_interface if only_open else compiled
    assert interface is not None
    inputs, outputs = interface.inputs, interface.outputs
    options = params.parameters
    for option in ("last_token", "greedy_tokens", "stop_tokens"):
        if options is not None and getattr(options, option):
            raise InvalidArgument(f"{option} is for sequences of models that generate; leave it out")
    asked = _outputs(params, outputs, regions)
    room = _room(options, regions)
    answer = sum(nbytes(tensor) for tensor, place in asked if place is None and not tensor.is_open)
    if answer > max_bytes + (room.nbytes if room is not None else 0):
        raise answer_too_large(answer, max_bytes, answer + ROOM_ALIGN * len(asked))
    return InferencePlan(
        model=params.model_name,
        timeout=timeout_us(options) / 1e6,
        priority=_priority(options),
        finite=bool(options and options.finite),
        keep=keep,
        inputs=_inputs(params, inputs, regions),
        outputs=asked,
        room=room,
        max_bytes=max_bytes,
        needs_cpu_engine=only_open,
    )


def no_state(model: str) -> InvalidArgument:
    """Return the error for a request in a sequence for a model that keeps no state."""
    return InvalidArgument(
        f"model {model!r} has no outputs that are known to be its state; add it again with "
        "--state OUT=IN, or carry the state in the app"
    )


def in_sequence(options: InferOptions | None) -> bool:
    """Return whether a request has a sequence_id; raise InvalidArgument if it starts or ends none."""
    if options is None:
        return False
    if options.sequence_id not in (None, 0, ""):
        return True
    if options.sequence_start or options.sequence_end:
        raise InvalidArgument("sequence_start and sequence_end need a sequence_id; give one")
    return False


def _without_state(params: PrepareParams) -> HonedError:
    """Return the error for a request in a sequence of a model that keeps no state.

    A sequence may have started before its model was replaced by one without state.
    """
    if params.parameters is None or params.parameters.sequence_start:
        return no_state(params.model_name)
    return SequenceLost(
        f"the sequence is not known: model {params.model_name!r} keeps no state, or was replaced by one that "
        "keeps none; carry the state in the app"
    )


def timeout_us(options: InferOptions | None) -> int:
    """Return a request's timeout in microseconds; raise InvalidArgument if out of range."""
    return check_timeout(
        DEFAULT_TIMEOUT_US if options is None or options.timeout is None else options.timeout
    )


def check_timeout(timeout: int) -> int:
    """Return a timeout in microseconds unchanged; raise InvalidArgument if out of range."""
    if not 1 <= timeout <= MAX_TIMEOUT_US:
        raise InvalidArgument(f"timeout is {timeout}; give 1 to {MAX_TIMEOUT_US} microseconds")
    return timeout


def _priority(options: InferOptions | None) -> int:
    priority = 2 if options is None or options.priority is None else options.priority
    if priority not in PRIORITIES:
        raise InvalidArgument(f"priority is {priority}; give 1 (first), 2 or 3 (last)")
    return priority


def _fits(params: PrepareParams, compiled: Interface) -> bool:
    """Return whether all inputs have the shapes that the model was compiled for."""
    shapes = {tensor.name: tensor.shape for tensor in compiled.inputs}
    return all(shapes.get(entry.name, entry.shape) == entry.shape for entry in params.inputs)


def _inputs(
    params: PrepareParams, tensors: Sequence[TensorSpec], regions: RegionTable
) -> tuple[tuple[TensorSpec, RegionRange | None], ...]:
    known = {tensor.name: tensor for tensor in tensors}
    names = [entry.name for entry in params.inputs]
    if len(names) != len(known) or known.keys() != set(names):
        _check_names(known, names)
    placed = []
    for entry in params.inputs:
        tensor = known[entry.name]
        _check_input(entry, tensor)
        if entry.shape != tensor.shape:
            tensor = dataclasses.replace(tensor, shape=entry.shape)
        placed.append((tensor, _place(entry.parameters, tensor, regions)))
    return tuple(placed)


def _check_names(tensors: dict[str, TensorSpec], names: list[str]) -> None:
    """Raise InvalidArgument unless `names` are the model's inputs, each once."""
    for name in names:
        _find_tensor(tensors, name, "input")
    _check_once(names, "input")
    missing = sorted(tensors.keys() - set(names))
    if missing:
        raise InvalidArgument(f"input {missing[0]!r} is missing; the model takes {', '.join(tensors)}")


def _outputs(
    params: PrepareParams, tensors: Sequence[TensorSpec], regions: RegionTable
) -> tuple[tuple[TensorSpec, RegionRange | None], ...]:
    if not params.outputs:
        return tuple((tensor, None) for tensor in tensors)
    known = {tensor.name: tensor for tensor in tensors}
    _check_once([entry.name for entry in params.outputs], "output")
    wanted = [(_find_tensor(known, entry.name, "output"), entry.parameters) for entry in params.outputs]
    return tuple((tensor, _place(parameters, tensor, regions)) for tensor, parameters in wanted)


def _find_tensor(tensors: dict[str, TensorSpec], name: str, what: str) -> TensorSpec:
    if name not in tensors:
        raise InvalidArgument(f"the model has no {what} {name[:80]!r}; it has {', '.join(tensors)}")
    return tensors[name]


def _check_once(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"{what} {name!r} is given twice; give it once")
        seen.add(name)


def _check_input(entry: InputTensor, tensor: TensorSpec) -> None:
    if entry.datatype == dtype(tensor.dtype).datatype and (
        entry.shape == tensor.shape or tensor.takes(entry.shape)
    ):
        return
    expected = describe(tensor)
    if entry.datatype != expected.datatype:
        raise InvalidArgument(
            f"input {tensor.name!r} is {entry.datatype[:20]} and the model takes {expected.datatype}; "
            "convert it"
        )
    fixed = "-1 is any size" if tensor.is_open else "the shapes of a model are fixed when it is added"
    raise InvalidArgument(
        f"input {tensor.name!r} has shape {list(entry.shape)} and the model takes {list(expected.shape)}"
        f"; {fixed}"
    )


def _check_content(tensor: TensorSpec, content: Data | None) -> None:
    if content is None:
        raise InvalidArgument(f"raw_input_contents has no data for input {tensor.name!r}; append it")
    if _is_text(tensor):
        # The length of each string is known only to the reader; `strings.decode` reports malformed ones.
        if len(content) < _LEAST_TEXT * math.prod(tensor.shape or ()):
            raise InvalidArgument(
                f"the data of input {tensor.name!r} is too short for its shape; write the length of each "
                "string as 4 bytes in front of it"
            )
        return
    if len(content) != nbytes(tensor):
        raise InvalidArgument(
            f"the data of input {tensor.name!r} has {len(content)} bytes and should have {nbytes(tensor)}; "
            "send the whole tensor, row-major"
        )


def nbytes(tensor: TensorSpec) -> int:
    """Return the bytes of a tensor with static sizes in a message."""
    return nbytes_of(tensor, tensor.shape or ())


def _is_text(tensor: TensorSpec) -> bool:
    return tensor.dtype == STRING.name


def nbytes_of(tensor: TensorSpec, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor in `shape`."""
    return dtype(tensor.dtype).itemsize * math.prod(shape)


def _room(options: InferOptions | None, regions: RegionTable) -> RegionRange | None:
    if options is None or options.shared_memory_region is None:
        return None
    region = regions.get(options.shared_memory_region)
    offset, size = options.shared_memory_offset or 0, options.shared_memory_byte_size
    if size is None or size < 1 or offset % ROOM_ALIGN:
        raise InvalidArgument(
            f"the request's shared memory starts at byte {offset} and has {size}; give at least 1, from a "
            f"multiple of {ROOM_ALIGN} on"
        )
    region.check_range(offset, size)
    return RegionRange(region, offset, size)


def _place(parameters: RegionPlace | None, tensor: TensorSpec, regions: RegionTable) -> RegionRange | None:
    if parameters is None or parameters.shared_memory_region is None:
        return None
    if _is_text(tensor):
        raise InvalidArgument(f"{tensor.name!r} is BYTES, which does not go to shared memory; take it inline")
    region = regions.get(parameters.shared_memory_region)
    size = parameters.shared_memory_byte_size
    if size is None or (not tensor.is_open and size != nbytes(tensor)):
        raise InvalidArgument(
            f"shared_memory_byte_size of {tensor.name!r} is {size} and must be the tensor's"
            + ("" if tensor.is_open else f", {nbytes(tensor)}")
        )
    offset = parameters.shared_memory_offset or 0
    region.check_range(offset, size)
    return RegionRange(region, offset, size)


def _slice(place: RegionRange | None) -> RegionSlice | None:
    if place is None:
        return None
    return RegionSlice(region=place.region.number, offset=place.offset, nbytes=place.nbytes)


def _place_map(place: RegionRange | None) -> dict[str, str | int]:
    if place is None:
        return {}
    return {
        "shared_memory_region": place.region.name,
        "shared_memory_offset": place.offset,
        "shared_memory_byte_size": place.nbytes,
    }


# ---- Requests that only a compiled file may answer: apps whose own ONNX Runtime runs the others ----


def wants_compiled(params: PrepareParams) -> bool:
    """Return whether only a verified compiled file may answer a request."""
    return params.parameters is not None and bool(params.parameters.compiled)


def compiled_answers(model: ServedModel, shapes: Shapes) -> bool:
    """Return whether a model's compiled file answers inputs of these shapes now, on its preferred engine."""
    if model.compiled is None or not (
        model.on_device and model.on_preferred_engine and model.state is State.READY
    ):
        return False
    return all(shapes.get(tensor.name) == tensor.shape for tensor in model.compiled.inputs)


def check_compiled(model: ServedModel, params: PrepareParams) -> None:
    """Raise NotCompiled if a request requires a compiled file and none answers it."""
    if wants_compiled(params) and not compiled_answers(
        model, {each.name: each.shape for each in params.inputs}
    ):
        raise NotCompiled(
            f"no compiled form of {params.model_name!r} answers these shapes now; ModelForm says why"
        )


def scalars(shapes: Shapes, interface: Interface | None) -> Shapes:
    """Return `shapes` with () for inputs of one element that are scalars in the file.

    Apps also send [1] for a scalar, because ONNX Runtime ignores the shape of scalars.
    """
    single = {each.name for each in interface.inputs if each.shape == ()} if interface is not None else set()
    if not single:
        return shapes
    return {name: () if name in single and math.prod(shape) == 1 else shape for name, shape in shapes.items()}


def with_scalars(params: PrepareParams, interface: Interface | None) -> PrepareParams:
    """Return a request whose inputs have the shapes that `scalars` returns."""
    given = {each.name: each.shape for each in params.inputs}
    shapes = scalars(given, interface)
    if shapes == given:
        return params
    inputs = tuple(dataclasses.replace(each, shape=shapes[each.name]) for each in params.inputs)
    return dataclasses.replace(params, inputs=inputs)
