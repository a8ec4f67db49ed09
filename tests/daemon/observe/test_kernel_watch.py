"""Faults of GPUs, told once each with whose they were, from records of real drivers."""

from __future__ import annotations

import asyncio
import logging
import os
import time

import pytest

from honed.daemon.observe.kernelwatch import KernelWatch
from honed.machine.kernellog.reader import Reader, Record
from honed.protocol.service import FaultFigures
from honed.runtime.errors import PermissionDenied
from tests.daemon.running import DEADLINE

XID = (
    "NVRM: Xid (PCI:0000:00:06): 31, pid={pid}, name=python3, channel 0x0000000a, intr 00000000. MMU Fault: "
    "ENGINE GRAPHICS GPC1 GPCCLIENT_T1_8 faulted @ 0x400_00000000. Fault is of type FAULT_PDE "
    "ACCESS_TYPE_VIRT_WRITE"
)
GROUP = (
    "mali fb000000.gpu: Ctx {pid}_0 Group 0 CSG 0 CSI: {stream}\n"
    "CS_FAULT.EXCEPTION_TYPE: 0x48 (CS_BUS_FAULT)\nCS_FAULT.EXCEPTION_DATA: 0xc\n"
    "CS_FAULT_INFO.EXCEPTION_DATA: 0x0"
)
OURS, FOREIGN = 1784, 2222


class Log:
    """In the place of the kernel's: records are there once `write` gave them."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK)
        self._records: list[Record] = []
        self.closed = False

    def write(self, *messages: str, genuine: bool = True) -> None:
        """Written a minute ago, so that no other record can belong to them."""
        long_ago = time.monotonic() - 60
        self._records += [
            Record(
                message=message,
                monotonic_s=long_ago,
                realtime_s=time.time() - 60,
                genuine=genuine,
                device=None,
            )
            for message in messages
        ]
        os.write(self._in, b"x")

    def fileno(self) -> int:
        return self._out

    def read(self) -> list[Record]:
        os.read(self._out, 100)
        records, self._records = self._records, []
        return records

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self.closed = True


def watched(log: Log, expected: int) -> KernelWatch:
    """What is known after so many faults were told."""
    watch = KernelWatch(lambda: {OURS}, lambda: log)

    async def go() -> None:
        task = asyncio.ensure_future(watch.run())
        async with asyncio.timeout(DEADLINE):
            while sum(watch.figures().counts.values()) < expected:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(go())
    return watch


def test_each_fault_is_counted_by_whose_it_was(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    log.write("usb 1-1: new device", XID.format(pid=OURS), XID.format(pid=FOREIGN))
    watch = watched(log, 2)
    assert watch.figures() == FaultFigures(
        watched=True, reason="", counts={"service": 1, "other": 1, "unknown": 0}
    )
    assert log.closed
    first, second = (record.getMessage() for record in caplog.records)
    assert "of a worker of the service, process 1784" in first
    assert "MMU Fault" in first
    assert "of another process, none of the service, process 2222" in second


def test_records_of_one_fault_are_one(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    log.write(GROUP.format(pid=OURS, stream=0), GROUP.format(pid=OURS, stream=1))
    assert watched(log, 1).figures().counts["service"] == 1
    assert len(caplog.records) == 1


def test_what_a_program_wrote_is_not_believed() -> None:
    log = Log()
    log.write(XID.format(pid=OURS), genuine=False)
    log.write(XID.format(pid=FOREIGN))
    assert watched(log, 1).figures().counts == {"service": 0, "other": 1, "unknown": 0}


def test_want_of_memory_is_no_fault_of_the_gpu() -> None:
    log = Log()
    log.write(f"Memory cgroup out of memory: Killed process {FOREIGN} (python3) total-vm:1988084kB")
    log.write(f"Out of memory: Killed process {OURS} (python3) total-vm:1988084kB", XID.format(pid=OURS))
    assert watched(log, 1).figures().counts == {"service": 1, "other": 0, "unknown": 0}


def test_a_log_that_cannot_be_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def denied() -> Reader:
        raise PermissionDenied("the kernel log cannot be read; join group systemd-journal")

    watch = KernelWatch(lambda: (), denied)
    with caplog.at_level(logging.WARNING):
        asyncio.run(watch.run())
    told = watch.figures()
    assert not told.watched
    assert "join group" in told.reason
    assert "join group" in caplog.text
