"""Starts the measuring child, and runs a pool of building children that fill the cache it reads.

A building child, `python -m honed.tuner.measure.process FD`, fills the driver's cache of compiled programs.
Where the device is the processor, it launches a single work-group of each kernel, too: PoCL compiles most at
the first launch, for the size of the work-groups, whatever their number. Its results say nothing about a
candidate.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from honed.machine import devices
from honed.machine.opencl import cl, context
from honed.process.children import python
from honed.process.limits import data_bytes, limit_data
from honed.process.rpc import ChildCrashed, RpcChild, RpcServer, by_name, connect, ready
from honed.protocol.errors import HonedError

from .candidate import BuildCandidate, Candidate, OpenBuilder, Workload
from .timing import build

COMMAND = python("honed.tuner.measure.child")
BUILDER = python("honed.tuner.measure.process")
# Every candidate is a different program: kept binaries would fill the disk and never be used again.
NO_CACHES = {
    "CUDA_CACHE_DISABLE": "1",
    "MESA_SHADER_CACHE_DISABLE": "true",
    "POCL_KERNEL_CACHE": "0",
}
FENCE = "fence"  # The phase in which a candidate's buffers lie against pages without access
_AT_ONCE = 2  # Candidates sent to a child at once, so that it need not wait for us


def cache_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which PoCL and NVIDIA's driver store compiled programs in `folder`."""
    kept = str(folder)
    return {
        "POCL_KERNEL_CACHE": "1",
        "POCL_CACHE_DIR": kept,
        "CUDA_CACHE_DISABLE": "0",
        "CUDA_CACHE_PATH": kept,
        "CUDA_CACHE_MAXSIZE": str(256 << 20),
    }


class Builders:
    """A pool of `count` children that build candidates. Not for several threads.

    A candidate that fails, crashes or takes too long is left to the measuring child, which gives the verdict.
    """

    def __init__(
        self,
        device: str,
        count: int,
        *,
        launch: bool,
        folder: Path,
        seconds: float,
        memory_bytes: int,
    ) -> None:
        """Set up the children's folder and limits.

        `folder` takes the cache and logs. One candidate may take `seconds`, and a child's memory may grow by
        `memory_bytes`. With `launch`, kernels are run once.
        """
        self.cache = folder / "cache"
        self._folder = folder
        self._opening = OpenBuilder(device=device, memory_bytes=memory_bytes)
        self._launch = launch
        self._seconds = seconds
        self._children: list[_Builder | None] = [None] * count
        self._queue: deque[BuildCandidate] = deque()
        self._submitted: set[str] = set()
        self.cache.mkdir(exist_ok=True)

    def close(self) -> None:
        """End the children, and empty the cache."""
        self.forget()
        for builder in self._children:
            if builder is not None:
                builder.child.kill()
        shutil.rmtree(self.cache, ignore_errors=True)

    def forget(self) -> None:
        """Drop queued candidates, and forget built ones, before another batch."""
        self._queue.clear()
        self._submitted.clear()
        if self._busy:
            return  # A busy child may be writing there
        for kept in self.cache.iterdir():
            if kept.is_dir():
                shutil.rmtree(kept, ignore_errors=True)

    def submit(self, candidates: Sequence[Candidate], workload: Workload) -> None:
        """Have candidates of `workload` built, in order; those submitted before are skipped."""
        launched = workload if self._launch else None
        for candidate in candidates:
            if candidate.id not in self._submitted:
                self._submitted.add(candidate.id)
                self._queue.append(BuildCandidate(candidate=candidate, workload=launched))
        self._pump(0.0)

    def was_submitted(self, candidate: Candidate) -> bool:
        """Return whether a candidate was submitted since the last `forget`."""
        return candidate.id in self._submitted

    def wait(self, candidate: Candidate | None = None) -> None:
        """Wait until `candidate`, or every one, was built or given up."""
        while self._waits(candidate):
            self._pump(0.1)

    def _waits(self, candidate: Candidate | None) -> bool:
        if candidate is None:
            return bool(self._queue or self._busy)
        given = [call for builder in self._busy for call in builder.given]
        return any(call.candidate.id == candidate.id for call in (*self._queue, *given))

    @property
    def _busy(self) -> list[_Builder]:
        return [builder for builder in self._children if builder is not None and builder.given]

    def _pump(self, seconds: float) -> None:
        """Send queued candidates to children, and collect finished ones; wait for these at most `seconds`."""
        self._hand_out()
        busy = self._busy
        if not busy:
            return
        answered = ready([builder.child for builder in busy], seconds)
        for builder in busy:
            if builder.child in answered or time.monotonic() > builder.deadline:
                self._take_in(builder)
        self._hand_out()

    def _take_in(self, builder: _Builder) -> None:
        try:
            builder.child.answer(BuildCandidate, max(0.0, builder.deadline - time.monotonic()))
        except ChildCrashed:
            self._children[self._children.index(builder)] = None
            builder.given.popleft()
            self._queue.extendleft(reversed(builder.given))
            return
        builder.given.popleft()
        builder.deadline = time.monotonic() + self._seconds

    def _hand_out(self) -> None:
        for _ in range(_AT_ONCE):
            for place, builder in enumerate(self._children):
                if not self._queue:
                    return
                if builder is None:
                    builder = self._children[place] = self._start(place)
                if len(builder.given) >= _AT_ONCE:
                    continue
                if not builder.given:
                    builder.deadline = time.monotonic() + self._seconds
                builder.given.append(self._queue.popleft())
                builder.child.begin(builder.given[-1])

    def _start(self, place: int) -> _Builder:
        log = self._folder / f"builder-{place}.log"
        child = RpcChild(BUILDER, log=log, environment=cache_environment(self.cache))
        child.tell(self._opening)
        return _Builder(child)


class _Builder:
    """A child, and the candidates sent to it that it has not answered, the oldest first."""

    def __init__(self, child: RpcChild) -> None:
        self.child = child
        self.given: deque[BuildCandidate] = deque()
        self.deadline = 0.0  # Deadline of the oldest, by time.monotonic


class BuildingChild(RpcServer):
    """Builds on one device, which is opened first."""

    _queue: Any

    def _open(self, call: OpenBuilder) -> None:
        device = devices.select(call.device)
        self._queue = cl.CommandQueue(context(device.cl))
        limit_data(data_bytes() + call.memory_bytes)

    def _build(self, call: BuildCandidate) -> None:
        with suppress(cl.Error, HonedError):
            program = build(self._queue.context, call.candidate.source)
            if call.workload is not None:
                sizes = [value.nbytes for value in call.workload.parameters]
                _launch(self._queue, call.candidate, program, sizes)

    METHODS = by_name({OpenBuilder: _open, BuildCandidate: _build})


def main() -> None:
    """Serve until the parent hangs up."""
    BuildingChild(connect()).serve()
    sys.stdout.flush()
    os._exit(0)  # Threads of the driver may hang, as in the measuring child


def _launch(queue: Any, candidate: Candidate, program: Any, parameters: list[int]) -> None:
    sizes = [*parameters, *(value.nbytes for value in candidate.inner)]
    buffers = [cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, max(1, size)) for size in sizes]
    try:
        for launch in candidate.launches:
            kernel = cl.Kernel(program, launch.entry)
            kernel.set_args(*(buffers[index] for index in launch.args))
            cl.enqueue_nd_range_kernel(queue, kernel, launch.block, launch.block)
        queue.finish()
    finally:
        for buffer in buffers:
            buffer.release()


if __name__ == "__main__":
    main()
