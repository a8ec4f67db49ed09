"""ModelInfer against a model: everything is checked here, before the worker sees it. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from honed.protocol.errors import InvalidArgument, ResourceExhausted
from honed.protocol.methods import DEFAULT_TIMEOUT_US, VERSION
from honed.protocol.params import Data, InferParams, InputTensor, RegionPlace
from honed.protocol.results import Inferred, InferredOutput, InferTimes, TensorMetadata
from honed.runtime.dtypes import dtype
from honed.runtime.model import Tensor

from .regions import HeldRegion, RegionTable
from .requests import PRIORITIES
from .workercalls import GivenInput, RegionSlice, RunModel, WantedOutput

MAX_TIMEOUT_US = 24 * 3600 * 1_000_000


@dataclass(frozen=True, slots=True)
class RegionRange:
    """Bytes of a region."""

    region: HeldRegion
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePlan:
    """A checked request: what the worker is to be given and to give back."""

    model: str
    id: str
    timeout: float  # seconds
    priority: int
    finite: bool
    keep: bool  # the worker may keep the inputs, to compare a successor on
    inputs: tuple[tuple[Tensor, RegionRange | None], ...]
    outputs: tuple[tuple[Tensor, RegionRange | None], ...]
    raw: tuple[Data, ...]

    @property
    def regions(self) -> list[HeldRegion]:
        """The regions it uses, each once."""
        places = [place for _, place in (*self.inputs, *self.outputs) if place]
        return list({place.region.number: place.region for place in places}.values())

    def for_worker(self, key: str) -> RunModel:
        """What to ask of the worker that knows the model by `key`."""
        return RunModel(
            key=key,
            inputs=tuple(
                GivenInput(name=t.name, dtype=t.dtype, shape=t.shape, place=_slice(place))
                for t, place in self.inputs
            ),
            outputs=tuple(WantedOutput(name=t.name, place=_slice(place)) for t, place in self.outputs),
            raw=self.raw,
            finite=self.finite,
            keep=self.keep,
        )

    def result(self, raw: tuple[Data, ...], queue_us: int, compute_us: int) -> Inferred:
        """The result of ModelInfer for the worker's outputs."""
        return Inferred(
            model_name=self.model,
            model_version=VERSION,
            id=self.id,
            parameters=InferTimes(queue_us=queue_us, compute_us=compute_us),
            outputs=tuple(
                InferredOutput(
                    name=t.name,
                    datatype=dtype(t.dtype).datatype,
                    shape=t.shape,
                    parameters=_place_map(place),
                )
                for t, place in self.outputs
            ),
            raw_output_contents=raw,
        )


def describe(tensor: Tensor) -> TensorMetadata:
    """A tensor as metadata shows it."""
    return TensorMetadata(name=tensor.name, datatype=dtype(tensor.dtype).datatype, shape=tensor.shape)


def check(
    params: InferParams,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    regions: RegionTable,
    *,
    max_bytes: int,
    keep: bool,
) -> InferencePlan:
    """The request as a plan; raises InvalidArgument or NotFound for whatever is wrong with it.

    ResourceExhausted where the answer would hold more than `max_bytes`. With `keep` the worker may keep the
    inputs for comparisons.
    """
    options = params.parameters
    timeout = DEFAULT_TIMEOUT_US if options is None or options.timeout is None else options.timeout
    priority = 2 if options is None or options.priority is None else options.priority
    if not 1 <= timeout <= MAX_TIMEOUT_US:
        raise InvalidArgument(f"timeout is {timeout}; give 1 to {MAX_TIMEOUT_US} microseconds")
    if priority not in PRIORITIES:
        raise InvalidArgument(f"priority is {priority}; give 1 (first), 2 or 3 (last)")
    asked = _outputs(params, outputs, regions)
    answer = sum(nbytes(tensor) for tensor, place in asked if place is None)
    if answer > max_bytes:
        raise ResourceExhausted(
            f"the outputs have {answer} bytes and an answer may hold {max_bytes}; place them in shared memory"
        )
    return InferencePlan(
        model=params.model_name,
        id=params.id or "",
        timeout=timeout / 1e6,
        priority=priority,
        finite=bool(options and options.finite),
        keep=keep,
        inputs=_inputs(params, inputs, regions),
        outputs=asked,
        raw=params.raw_input_contents or (),
    )


def _inputs(
    params: InferParams, tensors: Sequence[Tensor], regions: RegionTable
) -> tuple[tuple[Tensor, RegionRange | None], ...]:
    known = {tensor.name: tensor for tensor in tensors}
    given = [_named(known, entry.name, "input") for entry in params.inputs]
    _check_once([tensor.name for tensor in given], "input")
    missing = sorted(known.keys() - {tensor.name for tensor in given})
    if missing:
        raise InvalidArgument(f"input {missing[0]!r} is missing; the model takes {', '.join(known)}")
    placed = []
    contents = list(params.raw_input_contents or ())
    for entry, tensor in zip(params.inputs, given, strict=True):
        _check_input(entry, tensor)
        place = _place(entry.parameters, tensor, regions)
        if place is None:
            _check_content(tensor, contents.pop(0) if contents else None)
        placed.append((tensor, place))
    if contents:
        raise InvalidArgument(
            f"raw_input_contents holds {len(contents)} more than the inputs that are not in shared memory; "
            "give one for each of those"
        )
    return tuple(placed)


def _outputs(
    params: InferParams, tensors: Sequence[Tensor], regions: RegionTable
) -> tuple[tuple[Tensor, RegionRange | None], ...]:
    if not params.outputs:
        return tuple((tensor, None) for tensor in tensors)
    known = {tensor.name: tensor for tensor in tensors}
    _check_once([entry.name for entry in params.outputs], "output")
    wanted = [(_named(known, entry.name, "output"), entry.parameters) for entry in params.outputs]
    return tuple((tensor, _place(parameters, tensor, regions)) for tensor, parameters in wanted)


def _named(known: dict[str, Tensor], name: str, what: str) -> Tensor:
    if name not in known:
        raise InvalidArgument(f"the model has no {what} {name[:80]!r}; it has {', '.join(known)}")
    return known[name]


def _check_once(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"{what} {name!r} is given twice; give it once")
        seen.add(name)


def _check_input(entry: InputTensor, tensor: Tensor) -> None:
    expected = describe(tensor)
    if entry.datatype != expected.datatype:
        raise InvalidArgument(
            f"input {tensor.name!r} is {entry.datatype[:20]} and the model takes {expected.datatype}; "
            "convert it"
        )
    if entry.shape != tensor.shape:
        raise InvalidArgument(
            f"input {tensor.name!r} has shape {list(entry.shape)} and the model takes {list(expected.shape)}"
            "; the shapes of a model are fixed when it is added"
        )


def _check_content(tensor: Tensor, content: Data | None) -> None:
    if content is None:
        raise InvalidArgument(f"raw_input_contents has no data for input {tensor.name!r}; append it")
    if len(content) != nbytes(tensor):
        raise InvalidArgument(
            f"the data of input {tensor.name!r} has {len(content)} bytes and should have {nbytes(tensor)}; "
            "send the whole tensor, row-major"
        )


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor as it travels."""
    return dtype(tensor.dtype).itemsize * math.prod(tensor.shape)


def _place(parameters: RegionPlace | None, tensor: Tensor, regions: RegionTable) -> RegionRange | None:
    if parameters is None or parameters.shared_memory_region is None:
        return None
    region = regions.get(parameters.shared_memory_region)
    size = parameters.shared_memory_byte_size
    if size != nbytes(tensor):
        raise InvalidArgument(
            f"shared_memory_byte_size of {tensor.name!r} is {size} and must be the tensor's, {nbytes(tensor)}"
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
