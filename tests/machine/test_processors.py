"""Which processors ONNX Runtime is given first, by the /sys of boards and of a PC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from honed.machine.processors import (
    Processor,
    ThreadPlacement,
    first_placement,
    half_arithmetic,
    processors,
)


def machine(
    root: Path,
    capacities: Sequence[int] | None,
    clocks: Sequence[int],
    siblings: Sequence[str] | None = None,
) -> Path:
    """A /sys with a processor for each clock, in MHz; without capacities, as on a PC, by clocks alone."""
    cpus = root / "sys/devices/system/cpu"
    for number, clock in enumerate(clocks):
        folder = cpus / f"cpu{number}"
        (folder / "topology").mkdir(parents=True)
        (folder / "cpufreq").mkdir()
        shared = siblings[number] if siblings else str(number)
        (folder / "topology/thread_siblings_list").write_text(f"{shared}\n")
        (folder / "cpufreq/cpuinfo_max_freq").write_text(f"{clock * 1000}\n")
        if capacities is not None:
            (folder / "cpu_capacity").write_text(f"{capacities[number]}\n")
    for other in ("cpufreq", "cpuidle", "hotplug"):
        (cpus / other).mkdir()
    return root


def rk3588(root: Path) -> Path:
    """Four A55, and two clusters of two A76, whose clocks differ from chip to chip."""
    return machine(root, [414] * 4 + [1009] * 2 + [1024] * 2, [1800] * 4 + [2256] * 2 + [2304] * 2)


def rk3576(root: Path) -> Path:
    """Four A53, and four A72."""
    return machine(root, [480] * 4 + [1024] * 4, [2016] * 4 + [2208] * 4)


def raspberry_pi_5(root: Path) -> Path:
    """Four A76."""
    return machine(root, [1024] * 4, [2400] * 4)


def pc(root: Path) -> Path:
    """Six cores with two hardware threads each, one core with a higher clock than the others."""
    clocks = [4850, *[4700] * 5] * 2
    return machine(root, None, clocks, [f"{each},{each + 6}" for each in range(6)] * 2)


@pytest.mark.parametrize(
    ("board", "threads", "where"),
    [
        (rk3588, 4, (4, 5, 6, 7)),
        (rk3576, 4, (4, 5, 6, 7)),
        (raspberry_pi_5, 4, ()),
        (pc, 6, ()),
    ],
)
def test_one_thread_for_each_big_core(
    tmp_path: Path, board: Callable[[Path], Path], threads: int, where: tuple[int, ...]
) -> None:
    found = first_placement(processors(board(tmp_path)))
    assert (found.threads, found.processors) == (threads, where)


@pytest.mark.parametrize(
    ("asked", "where"),
    [(1, (4, 5, 6, 7)), (4, (4, 5, 6, 7)), (5, ()), (8, ())],
)
def test_threads_that_were_asked_for(tmp_path: Path, asked: int, where: tuple[int, ...]) -> None:
    found = first_placement(processors(rk3588(tmp_path)), asked)
    assert (found.threads, found.processors) == (asked, where)


def test_what_a_container_leaves_of_a_board(tmp_path: Path) -> None:
    root = rk3588(tmp_path)
    mixed = first_placement(processors(root, {1, 2, 3, 6}))
    assert (mixed.threads, mixed.processors) == (1, (6,))
    little = first_placement(processors(root, {0, 1, 2}))
    assert (little.threads, little.processors) == (3, ())


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    found = processors(pc(tmp_path), {0, 1, 6, 7, 8})
    assert [each.core for each in found] == [0, 1, 0, 1, 2]
    assert first_placement(found).threads == 3


def test_kinds_by_their_clocks_where_the_kernel_tells_no_capacity(tmp_path: Path) -> None:
    found = first_placement(processors(machine(tmp_path, None, [1416] * 4 + [1800] * 2)))
    assert (found.threads, found.processors) == (2, (4, 5))


def test_processors_that_are_offline_or_not_shown(tmp_path: Path) -> None:
    root = rk3588(tmp_path)
    (root / "sys/devices/system/cpu/cpu7/topology/thread_siblings_list").unlink()  # as of one that is off
    assert first_placement(processors(root)).processors == (4, 5, 6)
    assert first_placement(processors(tmp_path / "none")) == ThreadPlacement(threads=0)


def test_more_than_nine_processors_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    found = processors(machine(tmp_path, [1024] * 12, [2000] * 12))
    assert found[10] == Processor(number=10, core=10, capacity=1024)


def test_it_is_told_in_short() -> None:
    assert str(ThreadPlacement(threads=4, processors=(4, 5, 6, 7))) == "4 threads on processors 4-7"
    assert str(ThreadPlacement(threads=1, processors=(0, 2, 3))) == "1 thread on processors 0,2-3"
    assert str(ThreadPlacement(threads=6)) == "6 threads"


A76 = "Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
A72 = "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([A76] * 4, True),
        ([A72] * 4, False),
        ([A72] * 4 + [A76] * 4, False),  # a thread may be moved to any of them
        (["flags\t\t: fpu sse2 avx2 f16c avx512_fp16"], False),  # ONNX Runtime has no kernels for it
        ([A76.replace("asimdhp", "asimdfhm")], False),
        ([], False),
    ],
)
def test_fp16_arithmetic_is_that_of_all_processors(tmp_path: Path, lines: list[str], found: bool) -> None:
    (tmp_path / "proc").mkdir()
    blocks = (f"processor\t: {number}\n{line}\n" for number, line in enumerate(lines))
    (tmp_path / "proc/cpuinfo").write_text("\n".join(blocks))
    assert half_arithmetic(tmp_path) == found
    assert not half_arithmetic(tmp_path / "none")
