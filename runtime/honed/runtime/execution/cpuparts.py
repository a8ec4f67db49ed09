"""The client of the process that runs partitions on the CPU engine, and the calls to that process.

The process is `honed.cpu.parts`, of the package honed-cpu. It starts with the first model that has partitions
and ends with the last one. If an untrusted partition crashes it, the caller gets a DeviceError.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine.bundle import has_cpu_engine
from honed.process.children import ResourceLimits, python
from honed.process.rpc import Call, ChildCrashed, R, RpcChild
from honed.protocol.errors import DeviceError, InvalidArgument
from honed.protocol.values import Data, ObservedSizes
from honed.protocol.wire import Closing, FrameLimits
from honed.runtime.calling.shared_memory import Region
from honed.runtime.compiled.model import CompiledModel, CpuPartition, PartitionTensor
from honed.runtime.compiled.modelfile import ModelFile
from honed.runtime.compiled.parts import covers, open_count, takes
from honed.runtime.dtypes import dtype
from honed.runtime.engines import UNLIMITED, PartLimits

Array = NDArray[Any]
_MODULE = "honed.cpu.parts"
_SHARED_BYTES = 1 << 16  # Bytes of a partition's inputs and outputs; fewer go over the socket
ALIGN = 64  # Bytes that tensors in shared memory are aligned to
FRAMES = FrameLimits(max_bytes=1 << 31, max_values=1 << 20)


class CpuPartitionProcess:
    """A process that holds the partitions of any number of models. Calls from several threads take turns.

    The process ends with the thread that opened the first model.
    """

    def __init__(self, limits: PartLimits = UNLIMITED) -> None:
        """Set up the client, without starting the process yet."""
        self._limits = limits
        self._lock = threading.Lock()
        self._child: RpcChild | None = None
        self._next = 0
        self._open = 0
        self._region: Region | None = None  # Shared memory for tensors, registered with the present process
        self._most_made = 0  # Largest size of one call's outputs in bytes

    def open(self, file: ModelFile) -> LoadedPartitions:
        """Load the partitions of a model that has some.

        Raises DeviceError if the CPU engine is not installed or the process ends, and the errors that it
        reports of a partition.
        """
        split = file.model.split
        assert split is not None
        if not has_cpu_engine():
            raise DeviceError(
                "parts of this model run in the CPU engine, which is not installed; install honed-cpu"
            )
        loaded: list[int] = []  # Grows in place, so that `close` unloads what was loaded
        with self._lock:
            self._open += 1
        opened = LoadedPartitions(self, split.parts, loaded)
        try:
            for part in split.parts:
                loaded += [self._load(file.constant(part.onnx), part)]
        except BaseException:
            opened.close()
            raise
        return opened

    def run(
        self,
        numbers: Sequence[int],
        inputs: Sequence[tuple[PartitionTensor, Array]],
        outputs: Sequence[PartitionTensor],
        wanted: Sequence[str],
        stops: Sequence[SpecialisedSizes],
    ) -> tuple[PartitionsResult, dict[str, Array]]:
        """Run loaded partitions, which compute some of `outputs`; return the `wanted` ones by name.

        Raises as `LoadedPartitions.run` does.
        """
        given = tuple(PartitionTensor(name=t.name, dtype=t.dtype, shape=a.shape) for t, a in inputs)
        arrays = [array for _, array in inputs]
        declared = {tensor.name: tensor for tensor in outputs}
        with self._lock:
            places, room = self._place(arrays, outputs)
            call = RunParts(
                parts=tuple(numbers),
                inputs=given,
                wanted=tuple(wanted),
                stops=tuple(stops),
                raw=() if places else tuple(array.reshape(-1).view(np.uint8).data for array in arrays),
                places=places,
                room=room,
            )
            ran = self._call(call)
            data: Sequence[Data] = ran.raw
            if ran.places:
                assert self._region is not None
                whole = self._region.array("uint8", (self._region.nbytes,), 0)
                each = zip(ran.outputs, ran.places, strict=True)
                data = [whole[at : at + _nbytes(tensor)].data for tensor, at in each]
            self._most_made = max(self._most_made, sum(map(len, data)))
            found = zip(ran.outputs, data, strict=True)
            # Copied, as the next run writes to the same memory.
            made = {t.name: np.array(_check_output(declared.get(t.name), t, held)) for t, held in found}
        return ran, made

    def unload(self, numbers: Sequence[int]) -> None:
        """Unload a model's partitions; the process ends with the last model."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._end()
            if self._child is None:
                return
            with contextlib.suppress(DeviceError):  # A process that is gone holds no partitions
                for number in numbers:
                    self._call(UnloadPart(part=number))

    def _place(
        self, inputs: Sequence[Array], outputs: Sequence[PartitionTensor]
    ) -> tuple[tuple[int, ...], int]:
        """Copy large inputs to shared memory; return the offset of each, and where outputs may begin.

        Returns () and 0 if there is too little data, which then goes over the socket.
        """
        places, room = lay_out([array.nbytes for array in inputs], 0)
        _, end = lay_out([_nbytes(t) for t in outputs if -1 not in t.shape], room)
        end = max(end, room + self._most_made)
        if end < _SHARED_BYTES or not inputs:
            return (), 0
        if self._region is None or self._region.nbytes < end:
            self._forget_region()
            region = Region("parts", end)
            try:
                self._call(ShareMemory(nbytes=end), [region.descriptor])
            except BaseException:
                region.close()
                raise
            self._region = region
        for place, array in zip(places, inputs, strict=True):
            self._region.array(array.dtype.name, array.shape, place)[...] = array
        return places, room

    def _load(self, data: Array, part: CpuPartition) -> int:
        descriptor = os.memfd_create("honed-part", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data.data)
            with self._lock:
                self._next += 1
                number = self._next
                self._call(LoadPart(part=number, inputs=part.inputs, level=part.level), [descriptor])
        finally:
            os.close(descriptor)
        return number

    def _call(self, call: Call[R], descriptors: Sequence[int] = ()) -> R:
        """Return the process's answer; start the process if there is none. The caller holds the lock.

        Raises DeviceError if the process cannot be started or has ended.
        """
        try:
            if self._child is None:
                command = python(_MODULE, str(self._limits.threads))
                self._child = RpcChild(
                    command, ResourceLimits(memory_mib=self._limits.memory_mib), frames=FRAMES
                )
            return self._child.call(call, descriptors)
        except OSError as error:
            raise DeviceError(f"the CPU engine cannot be started: {error}") from error
        except ChildCrashed as ended:
            self._end()
            raise DeviceError(f"the CPU engine's process for parts of the model is gone: {ended}") from ended

    def _forget_region(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.close()

    def _end(self) -> None:
        self._forget_region()
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class LoadedPartitions(Closing):
    """The partitions of one model, loaded in the process."""

    def __init__(
        self, process: CpuPartitionProcess, parts: Sequence[CpuPartition], numbers: Sequence[int]
    ) -> None:
        self._process = process
        self._parts = parts
        self._numbers = numbers
        self._closed = False

    def run(self, index: int, inputs: Sequence[Array]) -> list[Array]:
        """Run a partition on inputs of its shapes, whose types can be cast to its own; return its outputs.

        Raises InvalidArgument if it cannot be run on these inputs, DeviceError if its process ended.
        """
        part = self._parts[index]
        given = dict(zip([tensor.name for tensor in part.inputs], inputs, strict=True))
        wanted = [tensor.name for tensor in part.outputs]
        _, made = self.run_chain([index], given, wanted)
        return [made[name] for name in wanted]

    def run_chain(
        self,
        indices: Sequence[int],
        values: Mapping[str, Array],
        wanted: Sequence[str],
        stops: Sequence[SpecialisedSizes] = (),
    ) -> tuple[PartitionsResult, dict[str, Array]]:
        """Run partitions in order on values by name, up to one with sizes in `stops`.

        Returns the progress, and the computed outputs that are `wanted` or that the remaining partitions
        read. Raises as `run` does.
        """
        parts = [self._parts[index] for index in indices]
        own = {tensor.name for part in parts for tensor in part.outputs}
        taken = {t.name: t for part in parts for t in part.inputs if t.name not in own}
        inputs = [
            (tensor, np.asarray(values[name], dtype(tensor.dtype).numpy, order="C"))
            for name, tensor in taken.items()
        ]
        ran, made = self._process.run(
            [self._numbers[index] for index in indices],
            inputs,
            [tensor for part in parts for tensor in part.outputs],
            wanted,
            [replace(stop, part=self._numbers[stop.part]) for stop in stops],
        )
        _check_answer(parts, ran)
        return ran, made

    def close(self) -> None:
        """Unload the partitions; may be called again."""
        if not self._closed:
            self._closed = True
            self._process.unload(self._numbers)


def _nbytes(tensor: PartitionTensor) -> int:
    return math.prod(tensor.shape) * dtype(tensor.dtype).itemsize


def _check_answer(parts: Sequence[CpuPartition], ran: PartitionsResult) -> None:
    """Raise DeviceError unless the answer's counts fit these partitions."""
    whole = 0 <= ran.done <= len(parts) and ran.done <= len(ran.sizes) <= ran.done + 1
    observed = zip(parts, ran.sizes, strict=False)
    if not whole or any(len(sizes) != open_count(part.inputs) for part, sizes in observed):
        raise DeviceError("the CPU engine's process for parts of the model says what it should not")


def _check_output(wanted: PartitionTensor | None, output: PartitionTensor, data: Data) -> Array:
    """Return an output as an array; `wanted` describes it in the header, None if it is not there.

    Raises DeviceError if it is not there, and InvalidArgument if it has another type or shape.
    """
    if wanted is None:
        raise DeviceError(f"a part of the model gave {output.name!r}, which was not asked for")
    if wanted.dtype != output.dtype or not takes(wanted, output.shape):
        raise InvalidArgument(
            f"a part of the model gave {output.name!r} as {output.dtype}{list(output.shape)} instead of "
            f"{wanted.dtype}{list(wanted.shape)}; add the model with engine onnxruntime"
        )
    return np.frombuffer(data, dtype(output.dtype).numpy).reshape(output.shape)


# ---- The tail of a model: partitions on the CPU engine, and size specialisations ----

RunForm = Callable[[int, Mapping[str, Array]], Mapping[str, Array]]  # Specialisation by number, on inputs


class TailPartitions:
    """The partitions of one model that run after all its steps, if any do."""

    def __init__(self, model: CompiledModel, parts: LoadedPartitions) -> None:
        """Set up the tail of a model whose partitions are loaded as `parts`."""
        assert model.split is not None
        self._parts = parts
        self._split = model.split
        self._wanted = [tensor.name for tensor in model.tail_outputs]
        self._forms = model.forms
        self._stops = [
            SpecialisedSizes(part=form.part, sizes=form.sizes, least=form.least) for form in model.forms
        ]

    def run(
        self, values: Mapping[str, Array], run_form: RunForm | None
    ) -> tuple[dict[str, Array], tuple[ObservedSizes, ...]]:
        """Return the outputs of the tail, and the sizes that sized partitions observed.

        `values` are the available tensors by name. `run_form` runs size specialisations; None: the CPU engine
        runs every partition. Raises what `LoadedPartitions.run` and `run_form` raise.
        """
        left, there, observed = list(self._split.tail), dict(values), list[ObservedSizes]()
        while left:
            ran, made = self._parts.run_chain(left, there, self._wanted, self._stops if run_form else ())
            there |= made
            observed += self._observe(left, ran.sizes)
            left = left[ran.done :]
            if left and run_form is not None:
                there |= self._run_specialisation(left[0], ran.sizes[ran.done], there, run_form)
                left = left[1:]
        return {name: there[name] for name in self._wanted}, tuple(observed)

    def _observe(self, numbers: Sequence[int], sizes: Sequence[tuple[int, ...]]) -> list[ObservedSizes]:
        each = zip(numbers, sizes, strict=False)
        return [ObservedSizes(part=n, sizes=those) for n, those in each if self._split.parts[n].sized]

    def _run_specialisation(
        self, number: int, observed: tuple[int, ...], values: Mapping[str, Array], run_form: RunForm
    ) -> dict[str, Array]:
        """Return a partition's outputs for `values`, from its smallest specialisation that covers `observed`.

        If the specialisation has more rows than the values, their last row is repeated to fill it.
        """
        part = self._split.parts[number]
        fit = [
            (form.sizes, n)
            for n, form in enumerate(self._forms)
            if form.part == number and covers(form.sizes, form.least, observed)
        ]
        sizes, form = min(fit)
        given = {tensor.name: values[tensor.name] for tensor in part.inputs}
        if sizes == observed:
            return dict(run_form(form, given))
        more = sizes[0] - observed[0]
        for tensor in part.inputs:
            if -1 in tensor.shape:
                rows = given[tensor.name]
                given[tensor.name] = np.concatenate([rows, np.repeat(rows[-1:], more, 0)])
        made = run_form(form, given)
        return {t.name: made[t.name][: observed[0]] if -1 in t.shape else made[t.name] for t in part.outputs}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPart(Call[None]):
    """Load the ONNX file in the message's descriptor as `part` with these `inputs`, optimised to `level`."""

    part: int
    inputs: tuple[PartitionTensor, ...]
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadPart(Call[None]):
    """Unload a partition; there is no answer but success."""

    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMemory(Call[None]):
    """Map the memory in the message's descriptor, in place of any mapped before."""

    nbytes: int


@dataclass(slots=True, kw_only=True)
class SpecialisedSizes:
    """Sizes of a partition that a specialisation runs, as in `compiled.model.SizeSpecialisation`."""

    part: int
    sizes: tuple[int, ...]
    least: int


@dataclass(slots=True, kw_only=True)
class PartitionsResult:
    """The progress of `RunParts`: the number of partitions that ran, and their nanoseconds.

    `sizes` are those observed by each partition, including the one that stopped the run. `outputs` are the
    computed ones that are wanted, or read by partitions that did not run; their data is as in `RunParts`.
    """

    done: int
    ns: int
    sizes: tuple[tuple[int, ...], ...]
    outputs: tuple[PartitionTensor, ...]
    raw: tuple[Data, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class RunParts(Call[PartitionsResult]):
    """Run `parts` once, in order, on `inputs` and outputs of earlier parts, for the `wanted` outputs.

    The data of `inputs` is in `raw`, or in shared memory at `places`, one offset for each. In the latter case
    the process writes outputs there, too, from `room` on, if they fit. The run stops before a part that
    observes sizes of `stops`.
    """

    parts: tuple[int, ...]
    inputs: tuple[PartitionTensor, ...]
    wanted: tuple[str, ...]
    stops: tuple[SpecialisedSizes, ...] = ()
    raw: tuple[Data, ...] = ()
    places: tuple[int, ...] = ()
    room: int = 0


def lay_out(sizes: Sequence[int], start: int) -> tuple[tuple[int, ...], int]:
    """Return aligned offsets for tensors of these sizes, in order from `start` on, and the end."""
    places = []
    for size in sizes:
        start = -(-start // ALIGN) * ALIGN
        places.append(start)
        start += size
    return tuple(places), start
