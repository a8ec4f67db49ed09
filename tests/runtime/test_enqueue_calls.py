from __future__ import annotations

import ctypes
from typing import Any

import pytest

from honed.machine.devices import Device
from honed.machine.opencl import LOADER, Call, Calls, ReusedEvent, cl, context, handle, size, sizes
from honed.protocol.errors import DeviceError


class Driver:
    """Functions that note what they are called with, and refuse one argument."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused
        self.got: list[tuple[str, int]] = []

    def launch(self, number: int) -> int:
        return self._do("launch", number)

    def copy(self, number: int) -> int:
        return self._do("copy", number)

    def _do(self, name: str, number: int) -> int:
        self.got.append((name, number))
        return -6 * (number == self.refused)

    def calls(self) -> list[Call]:
        """Two launches, a copy and two launches, numbered."""
        functions = [self.launch, self.launch, self.copy, self.launch, self.launch]
        return [(function, (n,), f"do number {n}") for n, function in enumerate(functions)]


ORDER = [("launch", 0), ("launch", 1), ("copy", 2), ("launch", 3), ("launch", 4)]


def test_calls_are_made_in_order_and_again() -> None:
    driver = Driver()
    calls = Calls(driver.calls())
    for times in (1, 2):
        calls.make()
        assert driver.got == ORDER * times


@pytest.mark.parametrize("refused", range(5))
def test_the_first_call_that_is_refused_is_named_and_none_follows(refused: int) -> None:
    driver = Driver(refused)
    with pytest.raises(DeviceError, match=rf"do number {refused} \({ORDER[refused][0]}: OUT_OF_HOST_MEMORY"):
        Calls(driver.calls()).make()
    assert driver.got == ORDER[: refused + 1]


def test_arguments_are_what_ctypes_passes() -> None:
    class Owner:
        int_ptr = (1 << 47) + 3

    wide = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda value: value)
    assert wide(handle(Owner)) == Owner.int_ptr
    assert wide(size((1 << 40) + 5)) == (1 << 40) + 5
    three = (ctypes.c_size_t * 3).from_address(wide(sizes(1 << 33, 2, 4)))
    assert list(three) == [1 << 33, 2, 4]


def test_an_event_is_of_the_latest_command_and_released_once(device: Device) -> None:
    made = context(device.cl)
    gate, queue, event = cl.UserEvent(made), cl.CommandQueue(made), ReusedEvent()
    marker = _marker(queue, event)
    marker.make()
    event.wait()
    assert event.command_execution_status == cl.command_execution_status.COMPLETE
    event.release()
    event.release()
    cl.enqueue_barrier(queue, wait_for=[gate])
    marker.make()
    assert event.command_execution_status > cl.command_execution_status.COMPLETE
    gate.set_status(cl.command_execution_status.COMPLETE)
    event.wait()
    assert event.command_execution_status == cl.command_execution_status.COMPLETE


def _marker(queue: Any, event: ReusedEvent) -> Calls:
    arguments = handle(queue), 0, None, event.at
    return Calls([(LOADER.clEnqueueMarkerWithWaitList, arguments, "mark")])
