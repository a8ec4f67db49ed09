"""A driver's errors become honed's."""

from __future__ import annotations

import pytest

from honed.runtime.opencl import cl, failure


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
