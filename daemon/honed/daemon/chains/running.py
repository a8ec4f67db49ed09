"""One request for a chain: its steps are requests of their own, and what goes between them stays here.

It lies in shared memory, which engines map; only what has no known size and turns out larger than expected
travels through the service.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from honed.daemon.blocking import in_thread
from honed.daemon.core.registry import Registry
from honed.daemon.core.states import ServedModel
from honed.daemon.observe.counting import counted
from honed.daemon.serving.inference import InferencePlan, nbytes_of
from honed.daemon.store.interface import Interface, OpenTensor
from honed.daemon.worker.regions import HeldRegion, RegionLookup, unknown
from honed.protocol import strict
from honed.protocol.errors import AnswerTooLarge, DeadlineExceeded, HonedError, Unavailable
from honed.protocol.methods import VERSION
from honed.protocol.params import (
    ChainStep,
    Data,
    InferOptions,
    InferParams,
    InputTensor,
    OutputTensor,
    RegionPlace,
)
from honed.protocol.results import Inferred, InferredOutput, InferTimes
from honed.runtime.dtypes import STRING

from .between import BetweenMemory, ScratchRoom, aligned, region_bytes
from .definition import Chain, ChainProgress, TensorSource, source

UNKNOWN_BYTES = 4 << 20  # that a tensor of open size is expected to have before one was seen
_QUICK_BYTES = 1 << 20  # that are copied without a thread
_AT_ONCE = 16 << 20  # bytes of a copy


class RunsModel(Protocol):
    """Has a model run, as a request of its own."""

    async def __call__(self, entry: ServedModel, params: InferParams, regions: RegionLookup) -> Inferred:
        """Raises what went wrong."""


@dataclass(frozen=True, slots=True)
class _ChainValue:
    """A tensor: in shared memory, or as it travels."""

    datatype: str
    shape: tuple[int, ...]
    place: RegionPlace | None
    data: Data | None


class _ChainRegions:
    """The regions of the client that the request names, and those between steps."""

    def __init__(self, given: Sequence[HeldRegion]) -> None:
        self._by_name = {region.name: region for region in given}
        self.between: dict[str, HeldRegion] = {}  # by step

    def get(self, name: str) -> HeldRegion:
        """Raises NotFound."""
        found = self._by_name.get(name)
        if found is None:
            raise unknown(name)
        return found

    def add(self, step: str, region: HeldRegion) -> None:
        """One for what a step gives."""
        self.between[step] = self._by_name[region.name] = region

    def drop(self, step: str) -> HeldRegion | None:
        """Nobody reads any more what the step gave."""
        region = self.between.pop(step, None)
        if region is not None:
            del self._by_name[region.name]
        return region

    def is_between(self, name: str | None) -> bool:
        """Whether a region of that name is none of the client's."""
        return any(region.name == name for region in self.between.values())


class ChainRun:
    """One request, from its first step to its answer.

    `sizes` are bytes by step and output, as they were seen before, and get those seen now.
    """

    def __init__(
        self,
        chain: Chain,
        params: InferParams,
        plan: InferencePlan,
        registry: Registry,
        memory: BetweenMemory,
        sizes: dict[TensorSource, int],
    ) -> None:
        """`plan` is the request checked against what the chain takes and gives."""
        self._chain = chain
        self._id = params.id or ""
        self._plan = plan
        self._registry = registry
        self._memory = memory
        self._sizes = sizes
        self._deadline = time.monotonic() + plan.timeout
        self._progress = ChainProgress(chain, [tensor.name for tensor, _ in plan.outputs])
        self._steps = {step.name: step for step in self._progress.steps}
        self._regions = _ChainRegions(plan.regions)
        self._room = ScratchRoom(plan.room) if plan.room is not None else None
        self._wanted = {
            source(chain.outputs[tensor.name]): None if place is None else place.place
            for tensor, place in plan.outputs
        }
        self._values = dict(_given(params))
        self.queue_us = self.compute_us = 0
        self._engines: set[str] = set()

    @property
    def engine(self) -> str:
        """What answered: "cpu", "gpu", or "gpu+cpu" for both."""
        return next(iter(self._engines)) if len(self._engines) == 1 else "gpu+cpu"

    async def answer(self, user: int, infer: RunsModel) -> Inferred:
        """The result of ModelInfer; raises what went wrong in a step, which it names."""
        expected = sum(map(self._expected, self._progress.steps))
        async with AsyncExitStack() as stack:
            stack.enter_context(self._held())
            try:
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    await stack.enter_async_context(self._memory.reserved(user, expected))
            except TimeoutError as error:
                raise DeadlineExceeded(
                    "the request's deadline passed before there was memory for what goes between the chain's "
                    "steps; allow more time"
                ) from error
            stack.callback(self._give_all_back)
            await self._run(infer)
            return await self._answered()

    async def _run(self, infer: RunsModel) -> None:
        tasks: dict[asyncio.Task[None], str] = {}
        try:
            while not self._progress.finished:
                for name in self._progress.begun():
                    tasks[asyncio.ensure_future(self._step(self._steps[name], infer))] = name
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    for freed in self._progress.done(tasks.pop(task)):
                        self._give_back(freed)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _step(self, step: ChainStep, infer: RunsModel) -> None:
        try:
            with counted(self._registry.statistics(step.model)):
                entry = self._registry.model(step.model)
                params, lent = self._asked(step, entry)
                result = await infer(entry, params, self._regions)
        except HonedError as error:
            told = copy.copy(error)  # others that it refuses are told the same one
            told.args = (f"step {step.name!r} of chain {self._chain.name!r}: {error}",)
            raise told from error
        self._note(step, result, lent)

    # What a step is given, and asked for

    def _asked(self, step: ChainStep, entry: ServedModel) -> tuple[InferParams, bool]:
        """The step as a request, and whether it was lent the client's room."""
        given = {name: self._values[source(text)] for name, text in step.inputs.items()}
        shapes = {name: value.shape for name, value in given.items()}
        outputs, loose = [], []
        for tensor in self._outputs(step, interface_for(entry, shapes)):
            place = self._place_of(TensorSource(step.name, tensor.name), tensor)
            outputs.append(OutputTensor(name=tensor.name, parameters=place))
            if place is None and tensor.dtype != STRING.name:
                loose.append(tensor)
        room, lent = self._room_for(step, loose)
        left = max(1, round((self._deadline - time.monotonic()) * 1e6))
        options = InferOptions(
            timeout=left,
            priority=self._plan.priority,
            finite=self._plan.finite,
            shared_memory_region=room.shared_memory_region if room is not None else None,
            shared_memory_offset=room.shared_memory_offset if room is not None else None,
            shared_memory_byte_size=room.shared_memory_byte_size if room is not None else None,
        )
        asked = InferParams(
            model_name=step.model,
            parameters=options,
            inputs=tuple(
                InputTensor(name=name, datatype=each.datatype, shape=each.shape, parameters=each.place)
                for name, each in given.items()
            ),
            outputs=tuple(outputs),
            raw_input_contents=tuple(each.data for each in given.values() if each.data is not None),
        )
        return asked, lent

    def _outputs(self, step: ChainStep, interface: Interface) -> list[OpenTensor]:
        """Those that somebody needs."""
        tensors = {tensor.name: tensor for tensor in interface.outputs}
        for name in (needed := self._progress.needed(step.name)):
            if name not in tensors:
                raise Unavailable(
                    f"model {step.model!r} has no output {name!r} any more, since it was replaced; "
                    "add the chain again"
                )
        return [tensors[name] for name in needed]

    def _place_of(self, of: TensorSource, tensor: OpenTensor) -> RegionPlace | None:
        """Where the client has a tensor, or its room for it, where it is known how large it is."""
        if (place := self._wanted.get(of)) is not None:
            return place
        if of not in self._wanted or self._room is None or tensor.is_open or tensor.dtype == STRING.name:
            return None
        return self._room.take(nbytes_of(tensor, tensor.shape or ()))

    def _room_for(self, step: ChainStep, loose: Sequence[OpenTensor]) -> tuple[RegionPlace | None, bool]:
        """Room for outputs without a place, and whether it is the client's."""
        if any(self._progress.read_later(step.name, tensor.name) for tensor in loose):
            region = self._memory.take(sum(self._bytes(step, tensor) for tensor in loose))
            self._regions.add(step.name, region)
            room = RegionPlace(shared_memory_region=region.name, shared_memory_byte_size=region.byte_size)
            return room, False
        lent = self._room.lend() if loose and self._room is not None else None
        return lent, lent is not None

    def _expected(self, step: ChainStep) -> int:
        """Bytes between this step and later ones, as far as they are known."""
        entry = self._registry.find(step.model)
        if entry is None:  # which the step says when it is its turn
            return 0
        tensors = self._outputs(step, interface_for(entry, None))
        if not any(self._progress.read_later(step.name, tensor.name) for tensor in tensors):
            return 0
        return region_bytes(sum(self._bytes(step, tensor) for tensor in tensors))

    def _bytes(self, step: ChainStep, tensor: OpenTensor) -> int:
        if not tensor.is_open:
            return aligned(nbytes_of(tensor, tensor.shape or ()))
        return self._sizes.get(TensorSource(step.name, tensor.name), UNKNOWN_BYTES)

    # What came of it

    def _note(self, step: ChainStep, result: Inferred, lent: bool) -> None:
        """Remember what a step gave."""
        self.queue_us += result.parameters.queue_us
        self.compute_us += result.parameters.compute_us
        self._engines.add(result.parameters.engine)
        contents = iter(result.raw_output_contents)
        end = 0
        for output in result.outputs:
            of = TensorSource(step.name, output.name)
            place = (
                strict.from_plain(RegionPlace, output.parameters, where="place")
                if output.parameters
                else None
            )
            data = next(contents) if place is None else None
            self._values[of] = _ChainValue(output.datatype, output.shape, place, data)
            nbytes = len(data) if data is not None else _size(place)
            self._sizes[of] = max(aligned(nbytes), self._sizes.get(of, 0))
            if place is not None and self._wanted.get(of) is None:
                end = max(end, (place.shared_memory_offset or 0) + nbytes)
        if lent and self._room is not None:
            self._room.returned(end)

    async def _answered(self) -> Inferred:
        """The result of ModelInfer."""
        outputs, raw = [], []
        for tensor, _ in self._plan.outputs:
            value = self._values[source(self._chain.outputs[tensor.name])]
            place, data = value.place, value.data
            if place is not None and self._regions.is_between(place.shared_memory_region):
                place, data = await self._delivered(place)
            if data is not None:
                raw.append(data)
            outputs.append(
                InferredOutput(
                    name=tensor.name,
                    datatype=value.datatype,
                    shape=value.shape,
                    parameters={} if place is None else strict.to_plain(place),
                )
            )
        whole, room = sum(map(len, raw)), self._plan.room
        if whole > self._plan.max_bytes:
            raise AnswerTooLarge(
                f"the outputs have {whole} bytes and an answer may hold {self._plan.max_bytes}; "
                "place them in shared memory",
                sum(aligned(len(data)) for data in raw) + (room.nbytes if room is not None else 0),
            )
        return Inferred(
            model_name=self._chain.name,
            model_version=VERSION,
            id=self._id,
            parameters=InferTimes(queue_us=self.queue_us, compute_us=self.compute_us, engine=self.engine),
            outputs=tuple(outputs),
            raw_output_contents=tuple(raw),
        )

    async def _delivered(self, place: RegionPlace) -> tuple[RegionPlace | None, Data | None]:
        """A tensor between steps as the answer has it: in the client's room, or in line."""
        nbytes = _size(place)
        target = self._room.take(nbytes) if self._room is not None else None
        quick = nbytes <= _QUICK_BYTES
        if target is None:
            return None, self._read(place) if quick else await in_thread(self._read, place)
        if quick:
            self._copy(place, target)
        else:
            await in_thread(self._copy, place, target)
        return target, None

    def _read(self, place: RegionPlace) -> bytes:
        return b"".join(self._parts(place))

    def _copy(self, place: RegionPlace, target: RegionPlace) -> None:
        region = self._regions.get(target.shared_memory_region or "")
        at = region.offset + (target.shared_memory_offset or 0)
        for part in self._parts(place):
            at += os.pwrite(region.descriptor, part, at)

    def _parts(self, place: RegionPlace) -> Iterator[bytes]:
        region = self._regions.get(place.shared_memory_region or "")
        at = region.offset + (place.shared_memory_offset or 0)
        end = at + _size(place)
        while at < end:
            part = os.pread(region.descriptor, min(end - at, _AT_ONCE), at)
            yield part
            at += len(part)

    # Memory

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The client's regions stay, though it forget them meanwhile."""
        for region in self._plan.regions:
            region.hold()
        try:
            yield
        finally:
            for region in self._plan.regions:
                self._memory.release(region)

    def _give_back(self, step: str) -> None:
        region = self._regions.drop(step)
        if region is not None:
            self._memory.give_back(region)

    def _give_all_back(self) -> None:
        for step in list(self._regions.between):
            self._give_back(step)


def interface_for(entry: ServedModel, shapes: Mapping[str, tuple[int, ...]] | None) -> Interface:
    """What a model takes and gives in these shapes, None: in any; raises Unavailable."""
    compiled, given = entry.compiled, entry.manifest.interface
    if compiled is not None and (given is None or shapes == {t.name: t.shape for t in compiled.inputs}):
        return compiled.interface
    if given is None:
        raise Unavailable(f"model {entry.name!r} cannot be used: {entry.reason}")
    return given


def _given(params: InferParams) -> Iterator[tuple[TensorSource, _ChainValue]]:
    """The inputs of a request that was checked."""
    contents = iter(params.raw_input_contents or ())
    for tensor in params.inputs:
        place = tensor.parameters
        if place is not None and place.shared_memory_region is None:
            place = None
        data = next(contents) if place is None else None
        yield TensorSource("", tensor.name), _ChainValue(tensor.datatype, tensor.shape, place, data)


def _size(place: RegionPlace | None) -> int:
    return (place.shared_memory_byte_size or 0) if place is not None else 0
