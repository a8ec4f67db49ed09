"""Runs a compiled model on an OpenCL device.

Preparation computes what depends on constants only, once, when the model is loaded; buffers and kernel
arguments are bound once. An inference writes the inputs, enqueues every step without waiting, and waits once,
when it reads the outputs; each host call in the plan costs one more wait.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine.devices import Device, select
from honed.machine.opencl import Calls, cl, context, driver_call, handle
from honed.protocol.errors import Cancelled, DeviceError, InvalidArgument
from honed.protocol.values import ObservedSizes
from honed.protocol.wire import Closing
from honed.runtime.compiled.model import (
    COMPILED_PART,
    CPU_PART,
    Buffer,
    CompiledModel,
    Growth,
    Launch,
    Place,
    Preparation,
)
from honed.runtime.compiled.modelfile import ModelFile, read

from . import memory, programs, segments
from .cpuparts import CpuPartitionProcess, TailPartitions
from .memory import DeviceMemory, Port
from .segments import Command, RowCopy
from .timing import InferenceProfile, Timeline, summarise

Array = NDArray[Any]
Progress = Callable[[int, int], None]


def load(
    path: str | os.PathLike[str],
    device: Device | str | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Executor:
    """Return the model in a `.honed` file, ready to `run` on `device`.

    `device` is a Device, or a spec as for `devices.select`. `cache_dir` keeps compiled programs between
    processes. A model with partitions that the CPU engine runs starts a process for them. Raises NotFound,
    ModelFileError, DeviceError, or ModelRefused if the CPU engine cannot run a partition.
    """
    chosen = device if isinstance(device, Device) else select(device)
    return Executor(read(path), chosen, cache_dir=Path(cache_dir) if cache_dir else None)


_LONG_SECONDS = 0.25  # Seconds of a run; a run expected to take longer can be cancelled between its launches


class _HeldPorts:
    """The ports of a decoder's steps, whose state grows on the device.

    `names` are the inputs that grow, `given` and `made` the other inputs and outputs; `row_bytes` is the size
    of a row of the state.
    """

    def __init__(
        self,
        growing: Sequence[Growth],
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        buffers: Sequence[Any],
        queue: Any,
    ) -> None:
        """Bind the copies of new rows; raise InvalidArgument if the model's outputs lack some of them."""
        given, made = ({port.name: port for port in ports} for ports in (inputs, outputs))
        self._copies, self.row_bytes = list[RowCopy](), 0
        for each in growing:
            taken, new = given.pop(each.input), made.pop(each.output)
            capacity, rows = taken.shape[each.axis], new.shape[each.axis]
            if rows < capacity:
                raise InvalidArgument(
                    f"of {capacity} rows of {each.input!r} the model keeps {rows}, and no form does"
                )
            elements = math.prod(taken.shape[each.axis + 1 :])
            outer = math.prod(taken.shape[: each.axis])
            self.row_bytes += outer * elements * taken.seen.itemsize
            if taken.buffer != new.buffer:  # An equal buffer is written in place
                row = elements * taken.held.itemsize
                ends = buffers[new.buffer], buffers[taken.buffer]
                copy = RowCopy(queue, *ends, outer=outer, row=row, written=rows, capacity=capacity)
                self._copies.append(copy)
        self.names = frozenset(each.input for each in growing)
        self.given, self.made = tuple(given.values()), tuple(made.values())
        self._copying = Calls(copy.call for copy in self._copies)

    def append(self, rows: int, count: int) -> None:
        """Enqueue copies of `count` new rows to follow the first `rows` of the state; raise DeviceError."""
        for copy in self._copies:
            copy.set(rows, count)
        self._copying.make()


class Executor(Closing):
    """A model on one device, whose calls from several threads take turns.

    After a DeviceError of `run` or `profile` the device's state is unknown, and every later call raises
    DeviceError: start a new process, because a faulted context can damage the whole process.
    """

    def __init__(
        self,
        file: ModelFile,
        device: Device,
        *,
        cache_dir: Path | None = None,
        builder: ThreadPoolExecutor | None = None,
        progress: Progress = lambda _, __: None,
        part_process: Callable[[], CpuPartitionProcess] = CpuPartitionProcess,
    ) -> None:
        """Build, allocate, upload, prepare and bind; raise as `load` does.

        The driver's compiler runs in `builder`, or in this thread; after each kernel, `progress` is called
        with the number built and the number of all. `part_process` returns the process for partitions: by
        default, one of the model's own.
        """
        self.file = file
        self.device = device
        self._lock = threading.Lock()
        self._unusable = ""  # Reason that it is unusable, if it is
        self._seconds = 0.0  # Duration of the latest run
        programs.check(file.model, device)
        kernels = _build_kernels(file.model, device, cache_dir, builder, progress)
        self.programs: Sequence[Any] = kernels  # Kept alive so that models of this process share them
        with driver_call("make a command queue"):
            self._queue = cl.CommandQueue(context(device.cl))
        self._profiling_queue: Any = None
        self._growing: dict[tuple[Growth, ...], _HeldPorts] = {}
        self._memory = DeviceMemory(file, device, self._queue)
        with driver_call("convert halves"):
            given, made = memory.ports(file.model, "input"), memory.ports(file.model, "output")
            kept = {port.buffer for port in given} & {port.buffer for port in made}
            self._inputs = convert_ports(given, kept, True, self._memory, device, cache_dir)
            self._outputs = convert_ports(made, kept, False, self._memory, device, cache_dir)
        cap = device.profile.rules.max_queued_launches
        for step in file.model.prepare:
            if not segments.empty(file.model, step):
                self._prepare(step, kernels)
        self.forms = [  # Size specialisations of its partitions, in the order of the file
            Executor(file.form(n), device, cache_dir=cache_dir, builder=builder, progress=progress)
            for n in range(len(file.model.forms))
        ]
        self._parts = part_process().open(file) if file.model.split is not None else None
        self._tail = TailPartitions(file.model, self._parts) if self._parts is not None else None
        self.observed: tuple[ObservedSizes, ...] = ()  # Sizes that the tail observed in the latest run
        self._segments = segments.segments(file.model, kernels, self._memory, self._queue, cap, self._parts)

    @property
    def model(self) -> CompiledModel:
        """The header of the model's file."""
        return self.file.model

    @property
    def launches(self) -> int:
        """The number of kernels enqueued for one inference."""
        return sum(isinstance(step, Launch) for step in self.model.steps)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs for `inputs`, both by name; outputs are new arrays, which the caller owns.

        Raises InvalidArgument for inputs the model does not take, DeviceError if the device fails.
        """
        given = memory.check_inputs(self._inputs.ports, inputs)
        with self._lock:
            made = self._infer(given, None)
            if self.model.split is None:
                return made
            made |= self.run_behind(made, inputs)
            return {tensor.name: made[tensor.name] for tensor in self.model.split.outputs}

    def step(
        self,
        inputs: Mapping[str, Array],
        growing: tuple[Growth, ...],
        rows: int,
        count: int,
        last: Collection[str] = (),
    ) -> dict[str, Array]:
        """Run on `inputs` and on the first `rows` rows of the state, which stays on the device.

        Appends the first `count` new rows to the state. Returns the other outputs; of those in `last`, if
        they are [1, tokens, ...], the row of the last of `count` tokens alone, [1, 1, ...]. Raises as `run`
        does, and InvalidArgument for a model whose outputs lack rows of the state.
        """
        held = self._state_ports(growing)
        given = iter(memory.check_inputs(held.given, inputs))
        values = [None if port.name in held.names else next(given) for port in self._inputs.ports]
        with self._lock:
            return self._infer(values, None, held, rows, count, last)

    def row_bytes(self, growing: tuple[Growth, ...]) -> int:
        """Return the size of a row of the state in bytes."""
        return self._state_ports(growing).row_bytes

    def _state_ports(self, growing: tuple[Growth, ...]) -> _HeldPorts:
        """Return the ports for this state, which are computed once."""
        if growing not in self._growing:
            self._growing[growing] = _HeldPorts(
                growing, self._inputs.ports, self._outputs.ports, self._memory.buffers, self._queue
            )
        return self._growing[growing]

    def read_rows(self, growing: Sequence[Growth], rows: int) -> dict[str, Array]:
        """Return the first `rows` rows of the state, by input."""
        ports = {port.name: port for port in self._inputs.ports}
        with self._lock, driver_call("read what the model keeps"):
            wanted = tuple(ports[each.input].buffer for each in growing)
            with self._memory.read(self._queue, wanted) as held:
                return {
                    each.input: memory.result(
                        ports[each.input], array[(slice(None),) * each.axis + (slice(rows),)]
                    )
                    for each, array in zip(growing, held, strict=True)
                }

    def restore(self, growing: Sequence[Growth], values: Mapping[str, Array]) -> None:
        """Set the first rows of the state, and all others to zero, as kernels read those, too."""
        ports = {port.name: port for port in self._inputs.ports}
        with self._lock, driver_call("write what the model keeps"):
            for each in growing:
                buffer = ports[each.input].buffer
                with self._memory.writing(self._queue, buffer) as target:
                    target[...] = 0
                    if (value := values.get(each.input)) is not None:
                        cut = (slice(None),) * each.axis + (slice(value.shape[each.axis]),)
                        target[cut] = value
            self._queue.finish()

    def run_compiled(
        self, inputs: Mapping[str, Array], expected: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return the outputs of the steps alone, without the tail; raise as `run` does.

        With `expected` outputs, memory that no kernel writes is found: before the run, every output holds the
        complement of its expected bits, and scratch memory holds NaN.
        """
        given = memory.check_inputs(self._inputs.ports, inputs)
        with self._lock:
            if expected is not None and not self._unusable:
                self._poison(expected)
            return self._infer(given, None)

    def _poison(self, expected: Mapping[str, Array]) -> None:
        with driver_call("poison the model's outputs"):
            self._memory.poison(self._queue)
            for port in self._outputs.ports:
                with self._memory.writing(self._queue, port.buffer) as target:
                    memory.store(port, _opposite(expected[port.name]), target)

    def run_behind(self, *given: Mapping[str, Array], forms: bool = True) -> dict[str, Array]:
        """Return the outputs of the tail for values by name; {} without a tail.

        Without `forms`, the CPU engine runs all its partitions. Raises as `run` does.
        """
        if self._tail is None:
            return {}
        found, self.observed = self._tail.run(_together(given), self._run_form if forms else None)
        return found

    def _run_form(self, number: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self.forms[number].run(inputs)

    def _time_behind(self, tail: TailPartitions, timeline: Timeline, *given: Mapping[str, Array]) -> None:
        """Run the tail, and note when partitions and size specialisations ran."""
        began = time.perf_counter()

        def run_form(number: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
            nonlocal began
            timeline.add(CPU_PART, began)
            start = time.perf_counter()
            made = self._run_form(number, inputs)
            timeline.add(COMPILED_PART, start)
            began = time.perf_counter()
            return made

        tail.run(_together(given), run_form)
        timeline.add(CPU_PART, began)

    def profile(self, inputs: Mapping[str, Array]) -> InferenceProfile:
        """Time each launch of one inference with the device's own clock; raise as `run` does."""
        given = memory.check_inputs(self._inputs.ports, inputs)
        with self._lock:
            if self._profiling_queue is None:
                properties = cl.command_queue_properties.PROFILING_ENABLE
                with driver_call("make a profiling queue"):
                    self._profiling_queue = cl.CommandQueue(context(self.device.cl), properties=properties)
            self._infer(given, Timeline(self._profiling_queue))  # Some drivers compile at the first launch
            timeline = Timeline(self._profiling_queue)
            start = time.perf_counter()
            made = self._infer(given, timeline)
            if self._tail is not None and self.model.tail_outputs:
                self._time_behind(self._tail, timeline, made, inputs)
            whole = time.perf_counter() - start
            with driver_call("time its kernels"):
                return summarise(timeline, self.model, self.device.profile.peaks, start, whole)

    def close(self) -> None:
        """Free the device's memory and close the file; later calls raise InvalidArgument."""
        with self._lock:
            self._unusable = "closed"
            self._segments.clear()
            self.programs = ()
            self._memory.close()
            if self._parts is not None:
                self._parts.close()
            for form in self.forms:
                form.close()
            self.file.close()

    def _prepare(self, step: Preparation, built: list[Any]) -> None:
        """Run a step of the preparation and wait, so that constants only it reads can be freed."""
        with driver_call("prepare the model"), self._memory.lend(self._queue, step):
            command = segments.command(self.model, built, self._memory, step)
            event = command.enqueue(handle(self._queue))
            self._queue.finish()
            _check_complete([event])

    def _infer(
        self,
        inputs: Sequence[Array | None],
        timeline: Timeline | None,
        held: _HeldPorts | None = None,
        rows: int = 0,
        count: int = 0,
        last: Collection[str] = (),
    ) -> dict[str, Array]:
        if self._unusable == "closed":
            raise InvalidArgument("this model was closed; load it again")
        if self._unusable:
            raise DeviceError(f"the device failed before ({self._unusable}); load the model in a new process")
        queue = self._queue if timeline is None else timeline.queue
        begun, long = time.monotonic(), self._seconds >= _LONG_SECONDS
        try:
            with driver_call("run the model"):
                for port, value in zip(self._inputs.ports, inputs, strict=True):
                    if value is None:  # State is on the device already
                        continue
                    with self._memory.writing(queue, port.buffer) as target:
                        memory.store(port, value, target)
                self._inputs.enqueue(queue)
                events = [
                    event
                    for segment in self._segments
                    for event in (segment.run(long=long) if timeline is None else segment.run_timed(timeline))
                ]
                self._outputs.enqueue(queue)
                if held is not None:
                    held.append(rows, count)
                ports = self._outputs.ports if held is None else held.made
                only = {
                    port.buffer: count - 1 for port in ports if port.name in last and _has_rows(port, count)
                }
                with self._memory.read(queue, tuple(port.buffer for port in ports), only) as arrays:
                    _check_complete(events)
                    return {
                        port.name: memory.result(port, array)
                        for port, array in zip(ports, arrays, strict=True)
                    }
        except DeviceError as failed:
            self._unusable = str(failed)
            raise
        except Cancelled:
            queue.finish()  # Launches in flight must end before the next run starts
            raise
        finally:
            self._seconds = time.monotonic() - begun


def _opposite(value: Array) -> Array:
    """Return an array in which every element differs from that of `value`, also NaN from NaN."""
    if value.dtype.kind == "b":
        return ~value
    bits = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
    return (~bits).view(value.dtype).reshape(value.shape)


def _together(maps: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return all values by name; the first of several with one name."""
    return {name: value for each in reversed(maps) for name, value in each.items()}


def _has_rows(port: Port, count: int) -> bool:
    """Return whether a port is [1, n, ...], with n of at least 2 and of `count`."""
    return port.shape[:1] == (1,) and len(port.shape) > 1 and port.shape[1] >= max(2, count)


def _check_complete(events: list[Any]) -> None:
    """Raise DeviceError unless all commands completed.

    A driver may end a command abnormally and still call the queue finished.
    """
    for event in events:
        status = event.command_execution_status
        if status != cl.command_execution_status.COMPLETE:
            raise DeviceError(
                f"a command ended with status {status} instead of completing; load the model in a new process"
            )


def _build_kernels(
    model: CompiledModel,
    device: Device,
    cache_dir: Path | None,
    builder: ThreadPoolExecutor | None,
    progress: Progress,
) -> list[Any]:
    """Return the pyopencl Program of each kernel of the model, in the kernels' order."""

    def build(source: str) -> Any:
        if builder is None:
            return programs.build(device, source, cache_dir)
        return builder.submit(programs.build, device, source, cache_dir).result()

    built: dict[int, Any] = {}
    found = []
    for kernel in model.kernels:
        if kernel.source not in built:
            built[kernel.source] = build(model.sources[kernel.source])
        with driver_call(f"find kernel {kernel.entry!r}"):
            programs.check_built(cl.Kernel(built[kernel.source], kernel.entry), kernel, device)
        found.append(built[kernel.source])
        progress(len(found), len(model.kernels))
    return found


# The device converts inputs and outputs between halves and singles if the model computes in singles. NumPy
# converts one element at a time if it is not built for the processor's own instructions (0.4 ms for an image
# of 224 x 224 on the host of an H100, a third of SqueezeNet's inference). OpenCL 1.0 loads and stores halves
# everywhere; to compute with them takes cl_khr_fp16. Buffers that an inference updates in place are left to
# NumPy.
_GROUP = 64  # Work-items; every OpenCL 1.2 device that honed serves allows this many
_SOURCE = """\
__kernel void widened(__global const half *from, __global float *to, const ulong count) {
  size_t at = get_global_id(0);
  if (at < count) to[at] = vload_half(at, from);
}
__kernel void narrowed(__global const float *from, __global half *to, const ulong count) {
  size_t at = get_global_id(0);
  if (at < count) vstore_half_rte(from[at], at, to);
}
"""


@dataclass(frozen=True, slots=True)
class ConvertedPorts:
    """Ports whose buffers hold the host's types, and launches that convert to or from the model's."""

    ports: tuple[Port, ...]
    launches: tuple[Command, ...] = ()
    _calls: dict[int, Calls] = field(default_factory=dict)  # Bound launches, by queue

    def enqueue(self, queue: Any) -> None:
        """Enqueue the conversion of all ports; raise DeviceError."""
        if queue.int_ptr not in self._calls:
            self._calls[queue.int_ptr] = Calls(launch.call(handle(queue)) for launch in self.launches)
        self._calls[queue.int_ptr].make()


def convert_ports(
    ports: tuple[Port, ...],
    kept: Set[int],
    inwards: bool,
    memory: DeviceMemory,
    device: Device,
    cache_dir: Path | None,
) -> ConvertedPorts:
    """Return the ports of inputs (`inwards`) or outputs, with float16 buffers for those computed in float32.

    Ports whose buffers are `kept`, as both an input's and an output's, are left to NumPy. Raises pyopencl's
    errors, and DeviceError if the device cannot build the conversion.
    """
    name = "widened" if inwards else "narrowed"
    found: list[Port] = []
    launches: list[Command] = []
    for port in ports:
        elements = math.prod(port.shape)
        half = port.seen == np.float16 and port.held == np.float32
        if not half or not elements or port.buffer in kept:
            found.append(port)
            continue
        program = programs.build(device, _SOURCE, cache_dir)
        place: Place = "input" if inwards else "output"
        index = memory.add(
            Buffer(dtype="float16", shape=port.shape, place=place, offset=0, nbytes=2 * elements)
        )
        buffers = [memory.buffers[index], memory.buffers[port.buffer]]
        kernel = cl.Kernel(program, name)
        kernel.set_args(*(buffers if inwards else buffers[::-1]), np.uint64(elements))
        launches.append(Command.launch(None, name, kernel, (-(-elements // _GROUP), 1, 1), (_GROUP, 1, 1)))
        found.append(replace(port, buffer=index, held=port.seen))
    return ConvertedPorts(tuple(found), tuple(launches))
