"""A driver's errors become honed's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from honed.machine import opencl
from honed.machine.devices import Device
from honed.machine.opencl import DOTS_EXTENSION, accelerates_dots, cl, context, failure, most_work_items


class Raised(Exception):
    """In the place of a pyopencl error, which only pyopencl can make with a code."""

    def __init__(self, code: int | None, routine: str | None) -> None:
        super().__init__("what it says")
        self.code, self.routine = code, routine


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (cl.status_code.OUT_OF_RESOURCES, "OUT_OF_RESOURCES, -5"),
        (-9999, "unknown error -9999, -9999"),  # NVIDIA's driver, after a kernel wrote out of all memory
    ],
)
def test_an_error_is_told_by_name_and_number(code: int, said: str) -> None:
    told = failure("run the model", Raised(code, "clFlush"))
    assert str(told) == f"the OpenCL driver could not run the model (clFlush: {said}); see `hone doctor`"


def test_an_error_without_a_code_is_told_as_it_is() -> None:
    assert "a driver call: what it says" in str(failure("run the model", Raised(None, None)))


class NvidiaKernel:
    """Stands in for a kernel of NVIDIA's driver, which says 256 even of one compiled for more."""

    def __init__(self, compiled_for: tuple[int, int, int]) -> None:
        self._says = {
            cl.kernel_work_group_info.COMPILE_WORK_GROUP_SIZE: list(compiled_for),
            cl.kernel_work_group_info.WORK_GROUP_SIZE: 256,
        }

    def get_work_group_info(self, info: int, _device: object) -> object:
        return self._says[info]


def test_a_kernel_has_the_work_group_that_it_was_compiled_for(device: Device) -> None:
    assert most_work_items(NvidiaKernel((512, 1, 1)), None, (512, 1, 1)) == 512
    assert most_work_items(NvidiaKernel((64, 8, 1)), None, (512, 1, 1)) == 256
    assert most_work_items(NvidiaKernel((0, 0, 0)), None, (512, 1, 1)) == 256
    source = "__kernel __attribute__((reqd_work_group_size(8, 2, 1))) void none(__global int* a) { }"
    built = cl.Kernel(cl.Program(context(device.cl), source).build(), "none")
    assert most_work_items(built, device.cl, (8, 2, 1)) == 16


@pytest.mark.parametrize(
    ("extensions", "answers", "code", "expected"),
    [
        ("cl_khr_fp16", (1, 1, 1, 1, 1, 1), 0, False),  # no extension, nothing to ask for
        (f"cl_khr_fp16 {DOTS_EXTENSION}", (1, 1, 1, 1, 1, 1), 0, True),
        (DOTS_EXTENSION, (0, 0, 0, 0, 0, 0), 0, False),  # Mesa 25.0.7 on a Mali
        (DOTS_EXTENSION, (1, 1, 1, 0, 1, 1), 0, False),  # all but the one that honed prints
        (DOTS_EXTENSION, (0, 0, 0, 0, 0, 0), -30, True),  # INVALID_VALUE: version 1 of the extension
    ],
)
def test_dot_products_are_what_the_driver_accelerates(
    monkeypatch: pytest.MonkeyPatch, extensions: str, answers: tuple[int, ...], code: int, expected: bool
) -> None:
    def answer(_device: Any, what: int, size: Any, into: Any, _size_back: None) -> int:
        assert (what, size.value) == (0x1075, 24)
        into[:] = answers
        return code

    monkeypatch.setattr(opencl, "LOADER", SimpleNamespace(clGetDeviceInfo=answer))
    device = SimpleNamespace(extensions=extensions, int_ptr=1)
    assert accelerates_dots(device) is expected


def test_the_real_loader_is_asked(device: Device) -> None:
    """A driver without the extension does not know the question, and answers INVALID_VALUE."""
    if DOTS_EXTENSION not in device.cl.extensions:
        assert accelerates_dots(SimpleNamespace(extensions=DOTS_EXTENSION, int_ptr=device.cl.int_ptr))
        assert not device.profile.limits.int8_dots
