"""The measuring child's device: context, queue, yardstick, and memory between guard bands."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.machine import peaks
from honed.machine.devices import Device
from honed.machine.families import mali_model
from honed.machine.opencl import cl, context
from honed.machine.profile import DevicePeaks, DeviceProfile, higher_peaks, raise_peaks, with_traffic
from honed.protocol.errors import InvalidArgument
from honed.tuner.lower.program import MemoryValue

from . import timing
from .candidate import Candidate, MeasureLimits, Workload
from .checks import Array, Ceiling, ExpectedOutput, ceiling, physical
from .timing import Reader, Warmth

GUARD_BYTES = 64 << 10  # Guard bytes on each side; a multiple of every base alignment, and of a page
FENCE_ALIGNED = 128  # Alignment in bytes, as the largest vector needs
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_LEAST_BYTES = 64  # OpenCL has no empty sub-buffer

Bytes = NDArray[np.uint8]


class GuardedBuffer:
    """A tensor's memory: a sub-buffer of an allocation that holds a guard band on either side.

    Kernels get `buffer`. The first byte beyond the tensor belongs to the band after it, padding included.
    """

    def __init__(self, context: Any, value: MemoryValue) -> None:
        """Allocate; raises pyopencl's errors."""
        self.value = value
        self.nbytes = value.nbytes
        self._whole = GUARD_BYTES + _pad(self.nbytes) + GUARD_BYTES
        self._allocation = cl.Buffer(context, cl.mem_flags.READ_WRITE, self._whole)
        self.buffer: Any = self._allocation.get_sub_region(GUARD_BYTES, max(self.nbytes, _LEAST_BYTES))
        self._host: Bytes = np.empty(self._whole, np.uint8)

    def poison(self, queue: Any, byte: int, *, bands: bool = True) -> None:
        """Fill the tensor (and its padding), with `bands` these too, without waiting."""
        start = 0 if bands else GUARD_BYTES
        size = self._whole - 2 * start
        cl.enqueue_fill_buffer(queue, self._allocation, np.uint32(byte * 0x01010101), start, size)

    def write(self, queue: Any, array: NDArray[Any]) -> None:
        """Copy the tensor in, and wait."""
        if self.nbytes:
            cl.enqueue_copy(queue, self.buffer, array, is_blocking=True)

    def fetch(self, queue: Any, *, inside: bool) -> None:
        """Copy the bands to the host, with `inside` the tensor too, and wait."""
        end = GUARD_BYTES + self.nbytes
        if inside:
            cl.enqueue_copy(queue, self._host, self._allocation, is_blocking=True)
            return
        cl.enqueue_copy(queue, self._host[:GUARD_BYTES], self._allocation, is_blocking=True)
        cl.enqueue_copy(queue, self._host[end:], self._allocation, src_offset=end, is_blocking=True)

    @property
    def bands(self) -> tuple[Bytes, Bytes]:
        """The bands before and after the tensor, as last fetched."""
        return self._host[:GUARD_BYTES], self._host[GUARD_BYTES + self.nbytes :]

    @property
    def array(self) -> NDArray[Any]:
        """The tensor as last fetched: a view that the next fetch overwrites."""
        inside = self._host[GUARD_BYTES : GUARD_BYTES + self.nbytes]
        return inside.view(np.dtype(self.value.dtype)).reshape(self.value.shape)

    def release(self) -> None:
        """Free the memory; only on a context that did not fail."""
        self.buffer.release()
        self._allocation.release()


class FencedBuffer:
    """A tensor's memory on a device that shares the host's, beside a page without access.

    A kernel that accesses memory past its end, with `before` before its start, ends this process, whatever it
    does with the value. Ends are exact to `FENCE_ALIGNED` bytes, to which tensors must be aligned.
    """

    def __init__(self, context: Any, value: MemoryValue, *, before: bool = False) -> None:
        """Map the memory; raises MemoryError, and pyopencl's errors."""
        libc, page = _libc(), mmap.PAGESIZE
        self.nbytes = max(value.nbytes, 1)
        room = -(-(self.nbytes + FENCE_ALIGNED) // page) * page
        self._length = room + 2 * page
        self._base = libc.mmap(None, self._length, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, -1, 0)
        if self._base == ctypes.c_void_p(-1).value:
            raise MemoryError
        for place in (self._base, self._base + page + room):
            if libc.mprotect(place, page, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        end = self._base + page + room
        start = self._base + page if before else (end - self.nbytes) // FENCE_ALIGNED * FENCE_ALIGNED
        self.host: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(start))
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        self.buffer: Any = cl.Buffer(context, flags, hostbuf=self.host)

    def release(self) -> None:
        """Unmap the memory, which nothing may use any more."""
        self.buffer.release()
        _libc().munmap(self._base, self._length)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _pad(nbytes: int) -> int:
    return max(-(-nbytes // _LEAST_BYTES) * _LEAST_BYTES, _LEAST_BYTES)


Announce = Callable[[str, float], None]  # A phase, and how many seconds it may take
_SETTLE_SECONDS = 0.5  # At most, for the clock to rise at the start
_PEAKS_SECONDS = 60.0  # Seconds between two measurements of the peaks, which take some seconds
_MOST_PREPARED = 4
_SETTLED = 8  # Yardsticks in a row that were no faster


class LoadedWorkload:
    """A workload: its inputs and expected outputs on the host, its buffers on the device."""

    def __init__(self, workload: Workload, in_context: Any) -> None:
        """Read the arrays and allocate buffers.

        Raises InvalidArgument for tensors that differ from the workload's.
        """
        self.workload = workload
        inputs = [i for i in range(len(workload.parameters)) if i not in workload.outputs]
        self.given: list[dict[int, Array]] = []
        self.expected: list[dict[int, ExpectedOutput]] = []
        for number in range(workload.sets):
            self.given.append({i: _tensor(workload, number, i) for i in inputs})
            self.expected.append(
                {
                    i: ExpectedOutput.of(_tensor(workload, number, i), tolerance)
                    for i, tolerance in zip(workload.outputs, workload.tolerance, strict=True)
                }
            )
        self.memory = [GuardedBuffer(in_context, value) for value in workload.parameters]


class DeviceSession:
    """A device, opened in this process for good."""

    def __init__(
        self,
        device: Device,
        profile: DeviceProfile,
        limits: MeasureLimits,
        without: frozenset[str],
        announce: Announce,
        read: Reader = timing.reading,
    ) -> None:
        """Open the device and warm it up; raises pyopencl's errors, and InvalidArgument without peaks."""
        if profile.peaks is None:
            raise InvalidArgument("the device's peaks are not known; measure them before tuning")
        self.device = device
        self.profile = profile
        self.peaks: DevicePeaks = profile.peaks
        # Peaks without those raised by kernels, once measured here
        self._benchmarks: DevicePeaks = profile.peaks
        self._model = mali_model(profile.identity.name)
        self.limits = limits
        self.without = without  # Names of checks
        self.announce = announce
        self.read = read
        self.context = context(device.cl)
        properties = cl.command_queue_properties.PROFILING_ENABLE
        self.queue = cl.CommandQueue(self.context, properties=properties)
        self.resolution = float(device.cl.profiling_timer_resolution) * 1e-9
        self._peaks_at = float("-inf")
        self.yardstick = timing.Yardstick(self.context, self.queue, profile.limits.compute_units)
        self.warmth = Warmth()
        self.warmth.note(_settle(self.yardstick))
        self.loaded: LoadedWorkload | None = None
        self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="build")
        self._prepared: dict[str, Future[Any]] = {}

    @property
    def shares_memory(self) -> bool:
        """Return whether kernels run in this process, on its mapped memory."""
        return bool(self.device.cl.type & cl.device_type.CPU)

    @property
    def cap(self) -> int:
        """Launches that may be queued before a wait."""
        return self.profile.rules.max_queued_launches or self.limits.max_queued

    def load(self, workload: Workload, traffic: float | None) -> float:
        """Make the buffers of `workload`, in place of the last one's.

        Return the rate (bytes per second) at which the device moves as many bytes; `traffic` is that rate
        where it is known already.
        """
        if self.loaded is not None:
            for memory in self.loaded.memory:
                memory.release()
            self.loaded = None
        if traffic is None:
            traffic = self._probe_rate(workload.bytes)
        self._move(workload.bytes, traffic)
        self.loaded = LoadedWorkload(workload, self.context)
        return traffic

    def most(self, loaded: LoadedWorkload) -> Ceiling:
        """Return the highest rates of the device for a workload by its present peaks."""
        return ceiling(loaded.workload, self.peaks)

    def limit(self, loaded: LoadedWorkload) -> Ceiling:
        """Return the rates beyond which no evidence makes a time believable.

        They depend on microbenchmarks, never on the times of kernels, so that kernels cannot raise them step
        by step.
        """
        measured = ceiling(loaded.workload, self._benchmarks)
        return physical(loaded.workload, measured, self._model, self.profile.limits.compute_units)

    def measure_peaks_again(self, loaded: LoadedWorkload) -> None:
        """Raise the peaks to those measured right now, unless that was done lately.

        The peaks of the profile may be from a busy moment, which must not get a right candidate refused.
        """
        now = time.monotonic()
        if now - self._peaks_at < _PEAKS_SECONDS:
            return
        first = self._peaks_at == float("-inf")
        found = peaks.measure(self.device)
        self._peaks_at = time.monotonic()
        self._benchmarks = found if first and self.peaks.raised else higher_peaks(self._benchmarks, found)
        self.peaks = higher_peaks(self.peaks, found)
        self._move(loaded.workload.bytes, self._probe_rate(loaded.workload.bytes))

    def believe(self, workload: Workload, seconds: float) -> None:
        """Raise the peaks to what a candidate was proven to reach."""
        flops = 0 if workload.integer else workload.flops  # The peaks do not cover integer arithmetic
        self.peaks = raise_peaks(self.peaks, flops, workload.bytes, seconds, half=workload.half)

    def _probe_rate(self, nbytes: int) -> float:
        """Return the rate, in bytes/s, of probes that move just `nbytes`; 0 for more than caches hold."""
        units = self.profile.limits.compute_units
        return timing.traffic(self.context, self.queue, units, nbytes) or 0.0

    def _move(self, nbytes: int, traffic: float) -> None:
        """Raise the memory's known rates to what probes reached, bytes per second."""
        self.peaks = with_traffic(self.peaks, nbytes, traffic * 1e-9)
        self._benchmarks = with_traffic(self._benchmarks, nbytes, traffic * 1e-9)

    def prepare(self, candidate: Candidate) -> None:
        """Build a candidate's program in a thread, for a later `program`."""
        while len(self._prepared) >= _MOST_PREPARED:
            self._prepared.pop(next(iter(self._prepared)))
        self._prepared[candidate.id] = self._builder.submit(timing.build, self.context, candidate.source)

    @property
    def building(self) -> bool:
        """Return whether a prepared program is being built now, which may hold the driver's locks."""
        return any(not build.done() for build in self._prepared.values())

    def finish_building(self) -> None:
        """Wait until no build runs beside, so that the host's clock is meaningful."""
        wait(self._prepared.values())

    def program(self, candidate: Candidate) -> Any:
        """Return the candidate's program, built if it was not prepared; raises pyopencl's errors."""
        prepared = self._prepared.pop(candidate.id, None)
        return prepared.result() if prepared else timing.build(self.context, candidate.source)


def _settle(yardstick: timing.Yardstick) -> float:
    """Return the yardstick's time in seconds, once it no longer gets faster."""
    until = time.perf_counter() + _SETTLE_SECONDS
    best, stale = yardstick.seconds(), 0
    while stale < _SETTLED and time.perf_counter() < until:
        seconds = yardstick.seconds()
        stale = 0 if seconds < 0.98 * best else stale + 1
        best = min(best, seconds)
    return best


def _tensor(workload: Workload, number: int, parameter: int) -> Array:
    path = workload.folder / f"{number}.{parameter}.npy"
    value = workload.parameters[parameter]
    try:
        array: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path} cannot be read ({error}); draw the inputs of the task again"
        ) from error
    if array.dtype != np.dtype(value.dtype) or array.shape != value.shape:
        raise InvalidArgument(
            f"{path} is {array.dtype}{list(array.shape)} and the task's parameter {parameter} is "
            f"{value.dtype}{list(value.shape)}; draw the inputs of the task again"
        )
    return np.ascontiguousarray(array).reshape(value.shape)
