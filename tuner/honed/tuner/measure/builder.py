"""The building child: `python -m honed.tuner.measure.builder FD`, one of the pool of `process`.

It fills the driver's cache of compiled programs for the measuring child. Where the device is the processor,
it launches a single work-group of each kernel, too: PoCL compiles most at the first launch, for the size of
the work-groups, whatever their number. Its results say nothing about a candidate.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from honed.machine import devices
from honed.machine.opencl import cl, context
from honed.process.limits import data_bytes, limit_data
from honed.process.rpc import RpcServer, by_name, connect
from honed.protocol.errors import HonedError

from .candidate import BuildCandidate, Candidate, OpenBuilder
from .timing import build


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
