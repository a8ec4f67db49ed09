"""The building child: `python -m honed.tuner.measure.builder --channel FD`, one of the pool of `process`.

It fills the driver's cache of compiled programs, which the measuring child then finds. Where the device is
the processor, it launches a single work-group of each kernel, too: PoCL compiles most at the first launch,
for the size of the work-groups, however many there are. Nothing that it does says anything of a candidate.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from honed.machine import devices
from honed.machine.limits import data_bytes, limit_data
from honed.machine.opencl import cl, context

from . import codec
from .candidate import Candidate
from .timing import build


def main(argv: list[str] | None = None) -> int:
    """Serve the channel until it closes: a device to open, then candidates to build."""
    channel = codec.channel(argv, "honed.tuner.measure.builder")
    with suppress(codec.ChannelClosed):
        opened = codec.receive(channel)
        device = devices.select(opened["device"])
        queue = cl.CommandQueue(context(device.cl))
        limit_data(data_bytes() + opened["memory_bytes"])
        while True:
            message = codec.receive(channel)
            candidate = codec.candidate_from_plain(message["candidate"])
            workload = codec.workload_from_plain(message["workload"]) if opened["launch"] else None
            with suppress(cl.Error):
                program = build(queue.context, candidate.source)
                if workload is not None:
                    _launch(queue, candidate, program, [value.nbytes for value in workload.parameters])
            codec.send(channel, {"built": candidate.id})
    sys.stdout.flush()
    os._exit(0)  # as the measuring child: threads of the driver may hang


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
    sys.exit(main())
