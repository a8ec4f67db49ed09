"""A candidate bound to buffers: its launches, run and read."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from typing import Any

from honed.machine.opencl import cl, most_work_items
from honed.machine.profile import DeviceLimits
from honed.runtime.execution import programs
from honed.tuner.records.verdict import Outcome

from .candidate import Candidate
from .checks import Finished, Launched, Refusal, private_memory

Reader = Callable[[Any], Launched]


_Command = tuple[Any, tuple[int, int, int], tuple[int, int, int]]  # kernel, work-items, those of a group


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
        """Set arguments; raises pyopencl's errors. `buffers` are numbered as the launches' args, `prepared`
        are numbers of launches.
        """
        self._queue = queue
        self._prepared: list[_Command] = []
        self._commands: list[_Command] = []
        for n, launch in enumerate(candidate.launches):
            kernel = cl.Kernel(program, launch.entry)
            kernel.set_args(*(buffers[index] for index in launch.args))
            size = (
                launch.grid[0] * launch.block[0],
                launch.grid[1] * launch.block[1],
                launch.grid[2] * launch.block[2],
            )
            (self._prepared if n in prepared else self._commands).append((kernel, size, launch.block))

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def prepares(self) -> bool:
        """Whether there is anything to prepare."""
        return bool(self._prepared)

    def fits(self, device: Any, limits: DeviceLimits, memory_bytes: int) -> Refusal | None:
        """Refuse kernels that need more of a work-group than the driver grants them.

        What they declare within (local arrays, private ones that spill) is known to the driver alone, once
        they are built. Private memory of all work-groups that can run together may take `memory_bytes`.
        """
        info = cl.kernel_work_group_info
        for kernel, _, block in (*self._prepared, *self._commands):
            most = most_work_items(kernel, device, block)
            if block[0] * block[1] * block[2] > most:
                name = kernel.function_name
                return Refusal(
                    Outcome.BUILD, f"kernel {name} needs so many registers that a work-group has {most} items"
                )
            local = kernel.get_work_group_info(info.LOCAL_MEM_SIZE, device)
            if local > limits.local_mem_bytes:
                return Refusal(
                    Outcome.BUILD,
                    f"kernel {kernel.function_name} needs {local} bytes of local memory "
                    f"and the device has {limits.local_mem_bytes}",
                )
            private = kernel.get_work_group_info(info.PRIVATE_MEM_SIZE, device)
            items = block[0] * block[1] * block[2]
            refusal = private_memory(kernel.function_name, private, items, limits.compute_units, memory_bytes)
            if refusal is not None:
                return refusal
        return None

    def enqueue(self) -> list[Any]:
        """One run: the events of its launches."""
        return self._enqueue(self._commands)

    def prepare(self, read: Reader) -> Finished:
        """Run what is prepared, which the runs that follow find done, and wait."""
        return self._finish(read, time.perf_counter(), self._enqueue(self._prepared))

    def run(self, read: Reader, times: int = 1) -> Finished:
        """So many runs in a row, waited for once."""
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
    """The program, as the executor builds it; raises pyopencl's errors. Lets other threads run meanwhile."""
    return cl.Program(context, source).build(options=list(programs.OPTIONS), cache_dir=False)


def complaint(error: Exception) -> str:
    """The line of a driver's error that says most: the first with "error:", else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if "error:" in line.casefold())
    return next(telling, lines[0] if lines else type(error).__name__)[:200]
