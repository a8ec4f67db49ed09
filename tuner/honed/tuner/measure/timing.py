"""Runs a candidate on a device, and times it in turns with kernels that show what the device can do."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from honed.machine.opencl import cl, most_work_items
from honed.machine.profile import DeviceLimits
from honed.runtime.execution import programs
from honed.tuner.records.rows import Outcome, Timing

from .candidate import Candidate, MeasureLimits
from .checks import AFTER_WAIT, Finished, Launched, Refusal, Waited, first_refusal, private_memory

Reader = Callable[[Any], Launched]
_Command = tuple[Any, tuple[int, ...], tuple[int, int, int]]  # Kernel, work-items, those of a group


class BoundCandidate:
    """Launches with their arguments set, on one in-order queue: some are prepared, the others run.

    `len` is how many run.
    """

    def __init__(
        self,
        queue: Any,
        candidate: Candidate,
        program: Any,
        buffers: Sequence[Any],
        prepared: Container[int] = (),
    ) -> None:
        """Set the arguments of all launches; raises pyopencl's errors.

        `buffers` are numbered as the launches' args, `prepared` are numbers of launches.
        """
        self._queue = queue
        self._prepared: list[_Command] = []
        self._commands: list[_Command] = []
        for n, launch in enumerate(candidate.launches):
            kernel = cl.Kernel(program, launch.entry)
            kernel.set_args(*(buffers[index] for index in launch.args))
            size = tuple(groups * items for groups, items in zip(launch.grid, launch.block, strict=True))
            (self._prepared if n in prepared else self._commands).append((kernel, size, launch.block))

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def prepares(self) -> bool:
        """Return whether any launches are prepared."""
        return bool(self._prepared)

    def fits(self, device: Any, limits: DeviceLimits, memory_bytes: int) -> Refusal | None:
        """Refuse kernels whose work-groups need more than the driver grants them.

        The driver alone knows what they declare inside (local arrays, private ones that spill), once they are
        built. Private memory of all work-groups that can run together may take `memory_bytes`.
        """
        info = cl.kernel_work_group_info
        for kernel, _, block in (*self._prepared, *self._commands):
            name, items, most = kernel.function_name, math.prod(block), most_work_items(kernel, device, block)
            if items > most:
                return Refusal(
                    Outcome.BUILD, f"kernel {name} needs so many registers that a work-group has {most} items"
                )
            local = kernel.get_work_group_info(info.LOCAL_MEM_SIZE, device)
            if local > limits.local_mem_bytes:
                return Refusal(
                    Outcome.BUILD,
                    f"kernel {name} needs {local} bytes of local memory "
                    f"and the device has {limits.local_mem_bytes}",
                )
            private = kernel.get_work_group_info(info.PRIVATE_MEM_SIZE, device)
            refusal = private_memory(name, private, items, limits.compute_units, memory_bytes)
            if refusal is not None:
                return refusal
        return None

    def enqueue(self) -> list[Any]:
        """Enqueue one run, and return the events of its launches."""
        return self._enqueue(self._commands)

    def prepare(self, read: Reader) -> Finished:
        """Run the prepared launches, whose results later runs use, and wait."""
        return self._finish(read, time.perf_counter(), self._enqueue(self._prepared))

    def run(self, read: Reader, times: int = 1) -> Finished:
        """Run `times` times in a row, and wait once."""
        began = time.perf_counter()
        return self._finish(read, began, [event for _ in range(times) for event in self.enqueue()])

    def _enqueue(self, commands: Sequence[_Command]) -> list[Any]:
        return [
            cl.enqueue_nd_range_kernel(self._queue, kernel, size, block) for kernel, size, block in commands
        ]

    def _finish(self, read: Reader, began: float, events: Sequence[Any]) -> Finished:
        self._queue.finish()
        wall = time.perf_counter() - began
        return Finished(tuple(read(event) for event in events), wall)


def build(context: Any, source: str) -> Any:
    """Build a program as the executor does; raises pyopencl's errors. Lets other threads run meanwhile."""
    return cl.Program(context, source).build(options=list(programs.OPTIONS), cache_dir=False)


# Kernels that show the device's present speed: a yardstick, and probes of its memory.

GROUP = 64  # Work-items
_GROUPS_PER_UNIT = 4
_STEPS = 512  # Steps of the yardstick: about 25 us on an H100, 0.3 ms on two CPU cores
_TABLE = 1 << 14  # Floats the yardstick loads from: 64 KiB, within every second-level cache

# Always the same work on the same device, so that yardsticks of different days compare. Half its time is
# spent on dependent multiply-adds, half on loads.
_YARDSTICK = f"""
__kernel void yardstick(__global const float* table, __global float* sink) {{
  const uint me = get_global_id(0);
  float a = (float)(me & 7u), b = 1.0f, c = 2.0f, d = 3.0f;
  for (uint i = 0; i < {_STEPS}u; ++i) {{
    const float x = table[(me + i * {GROUP}u) & {_TABLE - 1}u];
    a = a * 0.5f + x; b = b * 0.5f + x; c = c * 0.5f + a; d = d * 0.5f + b;
  }}
  sink[me] = a + b + c + d;
}}
"""

# Few long work-items suit a CPU, many short ones a GPU; reading alone is faster than copying in caches.
_TRAFFIC = """
__kernel void copy_long(__global const float4* in, __global float4* out, const uint n) {
  for (uint i = get_global_id(0); i < n; i += get_global_size(0)) out[i] = in[i];
}
__kernel void copy_short(__global const float4* in, __global float4* out, const uint n) {
  out[get_global_id(0)] = in[get_global_id(0)];
}
__kernel void read_long(__global const float4* in, __global float4* out, const uint n) {
  float4 s = 0.0f;
  for (uint i = get_global_id(0); i < n; i += get_global_size(0)) s += in[i];
  out[get_global_id(0)] = s;
}
"""
_MOST_BYTES = 64 << 20  # Bytes of one probe buffer; beyond it the measured bandwidth of the device holds
_REPEATS = 6


def reading(event: Any) -> Launched:
    """Return the driver's report of a finished launch; only this function reads events."""
    profile = event.profile
    return Launched(event.command_execution_status, profile.start, profile.end)


class Yardstick:
    """The fixed kernel measured in turns with candidates."""

    def __init__(self, context: Any, queue: Any, compute_units: int) -> None:
        """Build the kernel; raises pyopencl's errors."""
        items = compute_units * _GROUPS_PER_UNIT * GROUP
        flags = cl.mem_flags
        table = np.linspace(0.0, 1.0, _TABLE, dtype=np.float32)
        self._memory = (
            cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=table),
            cl.Buffer(context, flags.READ_WRITE, items * 4),
        )
        self._kernel = cl.Kernel(cl.Program(context, _YARDSTICK).build(cache_dir=False), "yardstick")
        self._kernel.set_args(*self._memory)
        self._items = items
        self._queue = queue

    def enqueue(self) -> Any:
        """Enqueue the yardstick, and return its event."""
        return cl.enqueue_nd_range_kernel(self._queue, self._kernel, (self._items,), (GROUP,))

    def seconds(self) -> float:
        """Run the yardstick once, wait, and return its seconds."""
        event = self.enqueue()
        event.wait()
        return Finished((reading(event),), 0.0).seconds


def traffic(context: Any, queue: Any, compute_units: int, nbytes: int) -> float | None:
    """Return the bytes per second of the fastest way to move `nbytes`, half in and half out or all in.

    Return None where that is more than the caches of any device hold: its bandwidth is in the profile then.
    """
    if nbytes > 2 * _MOST_BYTES:
        return None
    program = cl.Program(context, _TRAFFIC).build(cache_dir=False)
    most = max(nbytes, 1 << 12)
    source, target = (cl.Buffer(context, cl.mem_flags.READ_WRITE, -(-most // 1024) * 1024) for _ in range(2))
    cl.enqueue_fill_buffer(queue, source, np.float32(1), 0, source.size)
    long_items = compute_units * _GROUPS_PER_UNIT * GROUP
    best = 0.0
    for name, moved in (("copy_long", most // 2), ("copy_short", most // 2), ("read_long", most)):
        groups = max(1, moved // 16 // GROUP)
        items = groups * GROUP if name == "copy_short" else min(groups * GROUP, long_items)
        counted = groups * GROUP
        kernel = cl.Kernel(program, name)
        kernel.set_args(source, target, np.uint32(counted))
        total = counted * 16 * (1 if name == "read_long" else 2)
        for _ in range(_REPEATS):
            event = cl.enqueue_nd_range_kernel(queue, kernel, (items,), (GROUP,))
            event.wait()
            seconds = Finished((reading(event),), 0.0).seconds
            if seconds > 0:
                best = max(best, total / seconds)
    return best or None


CONFIDENCE = 0.95
LEAST = 6  # Samples: the range of five holds the median with 93.8 %, that of six with 96.9 %
_LEAST_SAMPLE = 50e-6  # Seconds; shorter runs are repeated within a sample
_CLOCK_STEPS = 100  # A sample is at least this many steps of the device's clock
_MOST_RUNS = 64  # Runs in a sample
_GROUP = 3  # Samples between two waits
_AWAKE = 1.1  # A yardstick within this of the best recent one means that the clock is up
_MEMORY = 16  # Candidates whose yardsticks are remembered


@dataclass(slots=True)
class Warmth:
    """The fastest recent yardsticks (seconds), and clocks, which show whether the device's clock is up."""

    best: list[float] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)  # Clocks of recent candidates, in Hz; 0: unknown

    def note(self, seconds: float, clock: int = 0) -> None:
        """Remember a candidate's yardstick and clock; lasting throttling becomes the new standard."""
        self.best = [*self.best[1 - _MEMORY :], seconds]
        self.clocks = [*self.clocks[1 - _MEMORY :], clock]

    @property
    def clock(self) -> int:
        """The highest recent clock, in Hz; 0 where none is known."""
        return max(self.clocks, default=0)

    def up(self, seconds: float) -> bool:
        """Return whether a yardstick of `seconds` is as fast as recent ones."""
        return bool(self.best) and seconds <= _AWAKE * min(self.best)


def warm_up(
    bound: BoundCandidate, yardstick: Yardstick, warmth: Warmth, limits: MeasureLimits, read: Reader
) -> None:
    """Keep the device busy until the yardstick is as fast as recent ones, or the limit has passed."""
    until = time.perf_counter() + limits.warm_seconds
    while not warmth.up(yardstick.seconds()) and time.perf_counter() < until:
        bound.run(read)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """The sizes of samples, from the seconds of one run and the number of launches that may queue."""

    runs: int  # Runs in a sample
    group: int  # Samples between two waits

    @classmethod
    def of(
        cls, seconds: float, launches: int, resolution: float, cap: int, limits: MeasureLimits
    ) -> SamplingPlan:
        """Return a schedule long enough for the device's clock.

        It is short enough for the device's queue and the run's deadline.
        """
        wanted = max(_LEAST_SAMPLE, _CLOCK_STEPS * resolution)
        fit = max(1, (cap - 1) // launches)
        runs = max(1, min(_MOST_RUNS, math.ceil(wanted / max(seconds, 1e-9)), fit))
        by_queue = cap // (runs * launches + 1)
        by_time = int(limits.run_seconds / 2 / max(seconds * runs, 1e-9))
        return cls(runs=runs, group=max(1, min(_GROUP, by_queue, by_time)))


@dataclass(frozen=True, slots=True)
class _Sample:
    """Seconds of one run and of the yardstick before it, and the clock in Hz, 0 where it is unknown."""

    run: float
    yardstick: float
    clock: int


class InterleavedTiming:
    """A candidate and the yardstick, measured in turns on one queue, and the samples so far.

    Only samples at one clock count, the highest observed, because times at other clocks do not compare.
    Samples during which the clock changed do not count.
    """

    def __init__(
        self,
        bound: BoundCandidate,
        yardstick: Yardstick,
        queue: Any,
        read: Reader,
        clock: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Set up; `clock` reads the device's clock in Hz, None where that is impossible."""
        self._bound = bound
        self._yardstick = yardstick
        self._queue = queue
        self._read = read
        self._clock = clock
        self._samples: list[_Sample] = []
        self.last = Finished((), 0.0)  # The last wait

    def __len__(self) -> int:
        """Return how many samples were taken, including those that do not count."""
        return len(self._samples)

    @property
    def clock(self) -> int:
        """Clock of the samples that count, in Hz; 0 where it is unknown."""
        return max((sample.clock for sample in self._samples), default=0)

    @property
    def runs(self) -> list[float]:
        """Seconds of one run, of each sample that counts."""
        return [sample.run for sample in self._samples if sample.clock == self.clock]

    @property
    def yardsticks(self) -> list[float]:
        """The yardstick's seconds, of each sample that counts."""
        return [sample.yardstick for sample in self._samples if sample.clock == self.clock]

    @property
    def yardstick(self) -> float:
        """The yardstick's median so far, in seconds."""
        return statistics.median(self.yardsticks)

    def take(self, schedule: SamplingPlan) -> None:
        """Take one more group of samples."""
        clock = self._clock()
        began = time.perf_counter()
        taken = []
        for _ in range(schedule.group):
            mark = self._yardstick.enqueue()
            taken.append((mark, [event for _ in range(schedule.runs) for event in self._bound.enqueue()]))
        self._queue.finish()
        wall = time.perf_counter() - began
        steady = clock if clock is not None and clock == self._clock() else 0
        everything = []
        for mark, events in taken:
            launched = tuple(self._read(event) for event in events)
            measured = self._read(mark)
            run = Finished(launched, wall).seconds / schedule.runs
            self._samples.append(_Sample(run, Finished((measured,), wall).seconds, steady))
            everything += [measured, *launched]
        self.last = Finished(tuple(everything), wall)


def time_candidate(
    turns: InterleavedTiming,
    schedule: SamplingPlan,
    limits: MeasureLimits,
    *,
    without: Container[str],
    slow: bool,
    clock: int = 0,
) -> Timing | Refusal:
    """Measure until the median is known within `limits.precision`, at `clock` or above, or a cap is reached.

    With `slow`, only `limits.few_repeats` times. Every launch is checked as in the runs before, except for
    the checks named in `without`.
    """
    if slow:
        schedule = SamplingPlan(runs=schedule.runs, group=min(schedule.group, limits.few_repeats))
    began = time.perf_counter()
    while True:
        turns.take(schedule)
        refusal = first_refusal(AFTER_WAIT, Waited(turns.last), without)
        if refusal is not None:
            return refusal
        if _enough(turns, limits, time.perf_counter() - began, slow, clock):
            break
    return interval(turns.runs)


def _enough(turns: InterleavedTiming, limits: MeasureLimits, elapsed: float, slow: bool, clock: int) -> bool:
    if slow:
        return len(turns) >= limits.few_repeats
    if len(turns) >= limits.max_repeats:
        return True
    if elapsed >= limits.timing_seconds and len(turns) >= limits.few_repeats:
        return True
    if turns.clock < clock or len(turns.runs) < LEAST:
        return False
    found = interval(turns.runs)
    spread = max(found.high_s - found.median_s, found.median_s - found.low_s)
    return spread <= limits.precision * found.median_s


def interval(samples: Sequence[float]) -> Timing:
    """Return the median of one or more samples, between the order statistics that enclose it with 95 %.

    The number of samples below the true median is binomial with p = 1/2, whatever their distribution
    (Conover, Practical Nonparametric Statistics, 3.2). Fewer than six samples do not reach 95 %: the interval
    is then their range.
    """
    ordered = sorted(samples)
    skip = _samples_to_skip(len(ordered))
    return Timing(
        median_s=statistics.median(ordered),
        low_s=ordered[skip],
        high_s=ordered[-1 - skip],
        repeats=len(ordered),
    )


@functools.cache
def _samples_to_skip(n: int) -> int:
    """Return how many samples may be left out at each end."""
    tail, skip = 2.0**-n, 0
    while 2 * (tail + math.comb(n, skip + 1) * 2.0**-n) <= 1 - CONFIDENCE:
        skip += 1
        tail += math.comb(n, skip) * 2.0**-n
    return skip
