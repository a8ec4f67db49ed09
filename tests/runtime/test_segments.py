from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from honed.machine.devices import Device
from honed.machine.opencl import cl, context
from honed.protocol.errors import Cancelled
from honed.runtime.execution.segments import CHUNK, Command, LaunchBatch, running_now

LAUNCHES = 300


class Gate:
    """A queue that runs nothing until it is opened, and counts what was enqueued before that."""

    def __init__(self, device: Device) -> None:
        self.queue = cl.CommandQueue(context(device.cl))
        self._event = cl.UserEvent(context(device.cl))
        cl.enqueue_barrier(self.queue, wait_for=[self._event])
        self._program = cl.Program(context(device.cl), "__kernel void none(__global int* a) { }").build(
            cache_dir=False
        )
        self._buffer = cl.Buffer(context(device.cl), cl.mem_flags.READ_WRITE, 64)
        self._kernel = cl.Kernel(self._program, "none")
        self._kernel.set_args(self._buffer)
        self._launch = Command.launch(0, "none", self._kernel, (1, 1, 1), (1, 1, 1))
        self._closed = True
        self.waiting = 0
        self.enqueued = 0

    def command(self) -> Command:
        return replace(self._launch, function=self._enqueue)

    def open(self) -> None:
        if self._closed:
            self._closed = False
            self._event.set_status(cl.command_execution_status.COMPLETE)

    def _enqueue(self, *args: Any) -> Any:
        self.enqueued += 1
        self.waiting += self._closed
        return self._launch.function(*args)


@pytest.fixture
def gate(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Opened when the host is about to wait for the queue."""
    made = Gate(device)
    wait = LaunchBatch._wait

    def opening(batch: LaunchBatch, tails: Sequence[Any], window: int) -> None:
        if window and len(tails) >= window:
            made.open()
        wait(batch, tails, window)

    monkeypatch.setattr(LaunchBatch, "_wait", opening)
    yield made
    made.open()
    made.queue.finish()


@pytest.mark.parametrize("cap", [1, 2, 3, 7, 100, 128, 200])
def test_no_more_than_the_cap_wait_in_the_queue(gate: Gate, cap: int) -> None:
    LaunchBatch([gate.command() for _ in range(LAUNCHES)], cap, gate.queue).run()
    assert gate.enqueued == LAUNCHES
    assert max(1, cap // 2) <= gate.waiting <= cap


def test_without_a_cap_the_host_never_waits(gate: Gate) -> None:
    events = LaunchBatch([gate.command() for _ in range(LAUNCHES)], 0, gate.queue).run()
    assert gate.waiting == gate.enqueued == LAUNCHES
    assert len(events) == -(-LAUNCHES // CHUNK)


def test_a_run_that_takes_long_has_few_launches_in_flight_and_ends_between_them(gate: Gate) -> None:
    batch = LaunchBatch([gate.command() for _ in range(LAUNCHES)], 0, gate.queue)
    batch.run(long=True)
    assert (gate.waiting, gate.enqueued) == (2 * CHUNK, LAUNCHES)
    running_now.ended = lambda: gate.enqueued > LAUNCHES
    try:
        with pytest.raises(Cancelled):
            batch.run(long=True)
    finally:
        running_now.ended = None
    assert gate.enqueued == LAUNCHES + CHUNK
