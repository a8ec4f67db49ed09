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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from honed.machine import devices
from honed.machine.opencl import cl, context
from honed.process.children import kill_group, python
from honed.process.limits import data_bytes, limit_data
from honed.process.rpc import ChildCrashed, RpcChild, RpcServer, by_name, connect
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
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="builder")
        self._children: list[RpcChild | None] = [None] * count
        self._free: SimpleQueue[int] = SimpleQueue()  # Places of children that build nothing
        self._builds: dict[str, Future[None]] = {}  # By candidate id
        self._closed = False
        for place in range(count):
            self._free.put(place)
        self.cache.mkdir(exist_ok=True)

    def close(self) -> None:
        """End the children, and empty the cache."""
        self._closed = True
        for child in self._children:
            if child is not None:
                kill_group(child.pid)  # The thread that it builds for, if any, notices
        self._pool.shutdown(cancel_futures=True)
        for child in self._children:
            if child is not None:
                child.kill()
        shutil.rmtree(self.cache, ignore_errors=True)

    def forget(self) -> None:
        """Drop queued candidates, and forget built ones, before another batch."""
        self._builds = {
            name: build for name, build in self._builds.items() if not (build.cancel() or build.done())
        }
        if self._builds:
            return  # A busy child may be writing there
        for kept in self.cache.iterdir():
            if kept.is_dir():
                shutil.rmtree(kept, ignore_errors=True)

    def submit(self, candidates: Sequence[Candidate], workload: Workload) -> None:
        """Have candidates of `workload` built, in order; those submitted before are skipped."""
        launched = workload if self._launch else None
        for candidate in candidates:
            if candidate.id not in self._builds:
                call = BuildCandidate(candidate=candidate, workload=launched)
                self._builds[candidate.id] = self._pool.submit(self._build, call)

    def was_submitted(self, candidate: Candidate) -> bool:
        """Return whether a candidate was submitted since the last `forget`."""
        return candidate.id in self._builds

    def wait(self, candidate: Candidate | None = None) -> None:
        """Wait until `candidate`, or every one, was built or given up."""
        wait(build for name, build in self._builds.items() if candidate is None or name == candidate.id)

    def _build(self, call: BuildCandidate) -> None:
        """Have a child build a candidate; one that crashes or takes too long is replaced for the next."""
        place = self._free.get()
        try:
            child = self._children[place] = self._children[place] or self._start(place)
            if not self._closed:
                child.call(call, seconds=self._seconds)
        except ChildCrashed:
            self._children[place] = None
        finally:
            self._free.put(place)

    def _start(self, place: int) -> RpcChild:
        log = self._folder / f"builder-{place}.log"
        child = RpcChild(BUILDER, log=log, environment=cache_environment(self.cache))
        child.tell(self._opening)
        return child


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
