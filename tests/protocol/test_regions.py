"""Shared memory: what a region gives, and which memfds are let in."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from honed.daemon.worker.shared_memory import check_memfd as check
from honed.runtime.calling.shared_memory import Region, map_descriptor
from honed.runtime.errors import InvalidArgument, ResourceExhausted


@pytest.fixture
def memfd() -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    yield descriptor
    os.close(descriptor)


def test_arrays_are_placed_one_after_the_other() -> None:
    with Region("r", 4096) as region:
        a, b = region.array("float32", (3, 5)), region.array("int64", (2,))
        assert region.offset_of(a) == 0
        assert region.offset_of(b) == 64
        assert a.shape == (3, 5)
        a[:] = 7
        assert (region.array("float32", (3, 5), offset=0) == 7).all()
        assert not b.any()
        assert region.offset_of(a[1:]) == 20
        assert region.offset_of(a[:, 1]) is None  # not contiguous
        assert region.offset_of(np.zeros(3)) is None
        assert region.array("float32", ()).shape == ()
        assert region.array("float32", (0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("shape", "offset"), [((2000,), None), ((1024,), 4), ((1,), 4096), ((1,), -4), ((1,), 2)]
)
def test_arrays_that_do_not_fit_are_refused(shape: tuple[int, ...], offset: int | None) -> None:
    with Region("r", 4096) as region, pytest.raises(InvalidArgument, match="does not fit"):
        region.array("float32", shape, offset)


def test_regions_of_no_size_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        Region("r", 0)


def test_closing_gives_the_descriptor_back_and_arrays_stay_valid() -> None:
    before = len(os.listdir("/proc/self/fd"))
    region = Region("r", 4096)
    array = region.array("float32", (4,))
    region.close()
    region.close()
    array[:] = 1
    assert array.sum() == 4
    assert region.offset_of(array) is None
    assert len(os.listdir("/proc/self/fd")) == before + 1  # what the mapping itself keeps
    del array, region
    assert len(os.listdir("/proc/self/fd")) == before


def test_our_own_regions_are_let_in_and_cannot_shrink() -> None:
    with Region("r", 8192) as region:
        check(region.descriptor, 0, 8192)
        check(region.descriptor, 4096, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(region.descriptor, 0)
        view = map_descriptor(region.descriptor, 4096, 4096)
        region.array("uint8", (8192,), 0)[4096] = 9
        assert view[0] == 9


def seal(descriptor: int, seals: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


@pytest.mark.parametrize(
    ("offset", "size", "message"),
    [
        (0, 8193, "has 8192 bytes"),
        (4096, 4097, "has 8192 bytes"),
        (2**62, 2**62, "has 8192 bytes"),
        (100, 10, "multiple"),
        (-4096, 10, "multiple"),
        (0, 0, "not possible"),
        (0, -1, "not possible"),
    ],
)
def test_ranges_outside_are_refused(memfd: int, offset: int, size: int, message: str) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK)
    with pytest.raises(InvalidArgument, match=message):
        check(memfd, offset, size)


def test_memfds_that_may_shrink_are_refused(memfd: int) -> None:
    with pytest.raises(InvalidArgument, match="F_SEAL_SHRINK"):
        check(memfd, 0, 8192)


@pytest.mark.parametrize("extra", [fcntl.F_SEAL_WRITE, 0x10])
def test_memfds_that_cannot_be_written_are_refused(memfd: int, extra: int) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK | extra)
    with pytest.raises(InvalidArgument, match="cannot be written"):
        check(memfd, 0, 8192)


def test_read_only_descriptors_are_refused(memfd: int) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK)
    read_only = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY)
    try:
        with pytest.raises(InvalidArgument, match="cannot be written"):
            check(read_only, 0, mmap.PAGESIZE)
    finally:
        os.close(read_only)


def test_files_that_are_no_memfd_are_refused(tmp_path: Path) -> None:
    descriptor = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(InvalidArgument, match=r"not a memfd|can still shrink"):
            check(descriptor, 0, 1)
    finally:
        os.close(descriptor)


def test_more_than_the_machine_has_is_refused_before_it_is_taken() -> None:
    with pytest.raises(ResourceExhausted, match="more than the machine's memory"):
        Region("r", 1 << 62)
