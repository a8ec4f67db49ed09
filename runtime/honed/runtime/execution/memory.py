"""Manages a model's device memory, and checks, casts and copies between it and arrays of the host.

Inputs, outputs, and constants, which are uploaded once, have allocations of their own. Of the scratch and
prepared buffers, and of buffers within another, those at the start of an allocation are that allocation
itself, whatever its size: on an H100 a launch with sub-buffers among its arguments takes NVIDIA's driver 10
to 18 us longer (docs/dev/measurements.md).

If host and device share memory, the host maps a buffer, unless it is so small that copying takes less time
than the two calls and the wait of mapping. Otherwise it copies through a staging array, in memory that the
driver can read itself, that lives as long as the model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine.devices import Device
from honed.machine.opencl import LOADER, Calls, cl, context, driver_call, handle, size
from honed.protocol.errors import InvalidArgument, PreconditionBroken
from honed.runtime.compiled.model import Buffer, CompiledModel, Place, Precondition, Preparation
from honed.runtime.compiled.modelfile import ModelFile
from honed.runtime.compiled.plan import allocations, bytes_of, constants_of, family_of
from honed.runtime.dtypes import dtype

Array = NDArray[Any]
_LEAST_BYTES = 64  # OpenCL has no buffer of 0 bytes
_POISON = 0xFF
_COPIED_BYTES = 4096  # Larger ones are mapped; saves 60 us of 150 with PoCL (docs/dev/measurements.md)


class DeviceMemory:
    """The buffers of one model on one device; `buffers[i]` is the pyopencl buffer of buffer i.

    It is None for constants that no inference reads (those of probes, and those that only preparation reads),
    which stay in the file.
    """

    def __init__(self, file: ModelFile, device: Device, queue: Any) -> None:
        model = file.model
        self._described = list(model.buffers)
        self._shared = device.profile.limits.host_unified
        self._staging: dict[int, Array] = {}
        self._copies: dict[tuple[int, ...], Calls] = {}  # Copies by queue, buffer, direction and bytes
        self._context = context(device.cl)
        self._file = file
        self._resident = constants_of(model, model.steps)
        with driver_call("allocate the model's memory"):
            self.buffers = self._allocate()
        with driver_call("upload the model's constants"):
            for index in self._resident:
                self._upload(queue, index)

    def close(self) -> None:
        """Free all device memory."""
        self.buffers = []
        self._copies = {}
        self._staging = {}

    def add(self, described: Buffer) -> int:
        """Add a buffer with an allocation of its own, and return its index; raise pyopencl's errors."""
        flags = cl.mem_flags.ALLOC_HOST_PTR if self._shared else 0
        self._described.append(described)
        self.buffers.append(self._new_buffer(described.nbytes, flags))
        return len(self.buffers) - 1

    def poison(self, queue: Any) -> None:
        """Fill outputs and scratch memory with bytes of NaN, which a right model neither leaves nor reads."""
        for buffer, described in zip(self.buffers, self._described, strict=True):
            if described.place in ("output", "scratch") and described.nbytes:
                cl.enqueue_fill_buffer(queue, buffer, np.uint8(_POISON), 0, described.nbytes)

    @contextmanager
    def lend(self, queue: Any, step: Preparation) -> Iterator[None]:
        """Keep the constants that `step` of the preparation reads on the device during the block."""
        lent = constants_of(self._file.model, (step,)) - self._resident
        try:
            for index in lent:
                self.buffers[index] = self._new_buffer(self._described[index].nbytes)
                self._upload(queue, index)
            yield
        finally:
            for index in lent:
                self.buffers[index] = None

    @contextmanager
    def writing(self, queue: Any, index: int) -> Iterator[Array]:
        """Yield an array whose contents are written to buffer `index` after the block.

        The array's contents are unspecified at first.
        """
        described = self._described[index]
        if not self._is_mapped(described):
            yield self._stage(queue, index)
            self._copy(queue, index, inwards=True)
            return
        array = self._map(queue, index, cl.map_flags.WRITE_INVALIDATE_REGION, blocking=True)
        try:
            yield array
        finally:
            _unmap(queue, array)

    @contextmanager
    def read(
        self, queue: Any, indices: tuple[int, ...], rows: Mapping[int, int] = MappingProxyType({})
    ) -> Iterator[list[Array]]:
        """Yield the contents of buffers, valid during the block, after one wait for all of `queue`.

        Of the buffers in `rows`, which are [1, n, ...], that row alone is read, and yielded as [1, 1, ...].
        """
        arrays: list[Array] = []
        mapped: list[Array] = []
        try:
            for index in indices:
                if self._is_mapped(self._described[index]):
                    mapped.append(self._map(queue, index, cl.map_flags.READ, blocking=False))
                    array = mapped[-1]
                else:
                    array = self._stage(queue, index)
                    self._copy(queue, index, inwards=False, row=rows.get(index))
                row = rows.get(index)
                arrays.append(array if row is None else array[:, row : row + 1])
            queue.finish()
            yield arrays
        finally:
            for array in mapped:
                _unmap(queue, array)

    def _is_mapped(self, described: Buffer) -> bool:
        """Return whether the host maps the buffer; it copies others through a staging array."""
        return self._shared and described.nbytes > _COPIED_BYTES

    def _map(self, queue: Any, index: int, flags: int, *, blocking: bool) -> Array:
        described = self._described[index]
        array: Array
        array, _ = cl.enqueue_map_buffer(
            queue,
            self.buffers[index],
            flags,
            0,
            described.shape,
            dtype(described.dtype).numpy,
            is_blocking=blocking,
        )
        return array

    def _copy(self, queue: Any, index: int, *, inwards: bool, row: int | None = None) -> None:
        """Enqueue a copy of a buffer's staging array to it, or (not `inwards`) back; raise DeviceError."""
        if not (nbytes := self._described[index].nbytes):
            return
        start = 0
        if row is not None:
            nbytes //= self._described[index].shape[1]
            start = row * nbytes
        key = queue.int_ptr, index, inwards, start, nbytes
        if key not in self._copies:
            host = size(self._staging[index].ctypes.data + start)
            ends = handle(queue), handle(self.buffers[index])
            args = *ends, 0, size(start), size(nbytes), host, 0, None, None
            function = LOADER.clEnqueueWriteBuffer if inwards else LOADER.clEnqueueReadBuffer
            self._copies[key] = Calls([(function, args, "copy a tensor")])
        self._copies[key].make()

    def _stage(self, queue: Any, index: int) -> Array:
        array = self._staging.get(index)
        if array is None:
            described = self._described[index]
            numpy = dtype(described.dtype).numpy
            if self._shared or not described.nbytes:
                array = np.empty(described.shape, numpy)
            else:
                host = self._new_buffer(described.nbytes, cl.mem_flags.ALLOC_HOST_PTR)
                both = cl.map_flags.READ | cl.map_flags.WRITE
                array, _ = cl.enqueue_map_buffer(queue, host, both, 0, described.shape, numpy)
            self._staging[index] = array
        return array

    def _allocate(self) -> list[Any]:
        flags = cl.mem_flags.ALLOC_HOST_PTR if self._shared else 0
        held = self._section("scratch") | self._section("prepared")
        for index, described in enumerate(self._described):
            resident = described.place != "constant" or index in self._resident
            if index not in held and described.within is None and resident:
                held[index] = self._new_buffer(described.nbytes, flags), 0
        cut: dict[tuple[int, int, int], Any] = {}
        buffers: list[Any] = []
        for index in range(len(self._described)):
            if (family := family_of(self._described, index)) not in held:
                buffers.append(None)
                continue
            allocation, start = held[family]
            span = bytes_of(self._described, index)
            at, nbytes = start + span.start, len(span)
            lies = id(allocation), at, nbytes
            if lies not in cut:
                cut[lies] = allocation.get_sub_region(at, nbytes) if at else allocation
            buffers.append(cut[lies])
        return buffers

    def _section(self, place: Place) -> dict[int, tuple[Any, int]]:
        """Return the allocation and the offset in it of each non-empty buffer of the section, by index.

        Buffers that overlap share one allocation.
        """
        ranges = allocations(self._described, place)
        wholes = [self._new_buffer(len(lies)) for lies in ranges]
        starts = [lies.start for lies in ranges]
        found: dict[int, tuple[Any, int]] = {}
        for index, b in enumerate(self._described):
            if b.place == place and b.within is None and b.nbytes:
                at = bisect_right(starts, b.offset) - 1
                found[index] = wholes[at], b.offset - starts[at]
        return found

    def _new_buffer(self, nbytes: int, flags: int = 0) -> Any:
        return cl.Buffer(self._context, cl.mem_flags.READ_WRITE | flags, max(nbytes, _LEAST_BYTES))

    def _upload(self, queue: Any, index: int) -> None:
        if self._described[index].nbytes:
            cl.enqueue_copy(queue, self.buffers[index], self._file.constant(index))


def _unmap(queue: Any, array: Array) -> None:
    region: Any = array.base
    region.release(queue)


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output: the dtype that its user sees, and the dtype that its buffer holds."""

    name: str
    shape: tuple[int, ...]
    buffer: int
    seen: np.dtype[Any]
    held: np.dtype[Any]
    bounds: tuple[Precondition, ...] = ()  # Ranges in which all values of an input lie


def ports(model: CompiledModel, place: str) -> tuple[Port, ...]:
    """Return the ports of a model's inputs (`place` "input") or outputs ("output"), in order."""
    found = []
    for tensor in model.inputs if place == "input" else model.outputs:
        seen, held = dtype(tensor.dtype).numpy, dtype(model.buffers[tensor.buffer].dtype).numpy
        bounds = [each for each in model.preconditions if each.input == tensor.name] * (place == "input")
        if held.kind in "iu" and not np.can_cast(seen, held):
            fits, why = np.iinfo(held.name), f"the compiled form computes in {held.name}"
            bounds.append(Precondition(input=tensor.name, low=int(fits.min), high=int(fits.max), why=why))
        found.append(Port(tensor.name, tensor.shape, tensor.buffer, seen, held, tuple(bounds)))
    return tuple(found)


def check_inputs(wanted: tuple[Port, ...], inputs: Mapping[str, Array]) -> list[Array]:
    """Return the arrays of `inputs` in the order of `wanted`, each of its port's `seen` dtype and shape.

    Raises InvalidArgument for missing and unknown names, other dtypes and shapes, and PreconditionBroken for
    values that the compiled model does not serve. NaN is allowed unless a range bounds the values.
    """
    if inputs.keys() != {port.name for port in wanted}:
        raise InvalidArgument(_names_problem(wanted, inputs))
    return [_check_input(port, inputs[port.name]) for port in wanted]


def store(port: Port, value: Array, target: Array) -> None:
    """Write `value` to `target`, an array of the port's `held` dtype and shape."""
    if port.seen.kind == "b":
        np.not_equal(value.view(np.uint8), 0, out=target.view(np.bool_), casting="unsafe")
        return
    if value.dtype == target.dtype:
        target[...] = value
        return
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # A float64 beyond float32 becomes inf, as on the device
        np.copyto(target, value, casting="unsafe")


def result(port: Port, held: Array) -> Array:
    """Return a copy of `held` for the caller, in the port's `seen` dtype."""
    if held.dtype == port.seen:
        return held.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(held, dtype=port.seen, order="C", copy=True)


def _check_input(port: Port, value: object) -> Array:
    if not isinstance(value, np.ndarray):
        raise InvalidArgument(
            f"input {port.name!r} is {type(value).__name__}; give a NumPy array of {_describe(port)}"
        )
    if value.dtype != port.seen or value.shape != port.shape:
        raise InvalidArgument(
            f"input {port.name!r} is {value.dtype}{list(value.shape)} and must be {_describe(port)}; "
            "convert it first"
        )
    for bound in port.bounds:
        if not bound.allows(value):
            raise PreconditionBroken(
                f"the compiled form serves requests whose {bound}, and this one has {value.min()} to "
                f"{value.max()}; give other values, or have ONNX Runtime run the model"
            )
    return value


def _names_problem(wanted: tuple[Port, ...], inputs: Mapping[str, Array]) -> str:
    names = [port.name for port in wanted]
    missing = [repr(name) for name in names if name not in inputs]
    unknown = [repr(name) for name in inputs if name not in names]
    problems = [f"input {', '.join(missing)} is missing"] * bool(missing)
    problems += [f"input {', '.join(unknown)} is unknown"] * bool(unknown)
    listed = ", ".join(f"{port.name!r} as {_describe(port)}" for port in wanted) or "none"
    return f"{' and '.join(problems)}; this model's inputs are {listed}"


def _describe(port: Port) -> str:
    return f"{port.seen.name}{list(port.shape)}"
