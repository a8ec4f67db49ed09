"""Lines of memory that a warp touches, against counts by hand."""

from __future__ import annotations

import pytest

from honed.valhall.compiler import Dump
from honed.valhall.count import count
from honed.valhall.dump import kernels
from honed.valhall.lanes import Access, LaunchGeometry, accesses, constant_offsets

K, N = 256, 1280  # of a product of halves, rows of both in memory


def group(*block: int) -> LaunchGeometry:
    x, y, z = (*block, 1, 1)[:3]
    return LaunchGeometry(grid=(8, 8, 1), block=(x, y, z))


def product(rows: int, steps: int) -> list[str]:
    """The loads of a turn, for a tile of so many rows and 8 columns, as NIR has them."""
    lines = [
        "    block b1:    // preds: b0 b1",
        "    32x3 %0 = @load_global_invocation_id",
        "    64   %1 = load_const (0x0000000000000000)",
        f"    32   %2 = load_const ({rows * K * 2:#010x})",
        "    32   %3 = imul %0.y, %2",
        "    32   %4 = load_const (0x00000004)",
        "    32   %5 = ishl! %0.x, %4 (0x4)",
    ]
    for n, (register, offset, loaded) in enumerate(
        [(3, row * K * 2, "16x4") for row in range(rows)]
        + [(5, step * N * 2, "64x2") for step in range(steps)]
    ):
        lines += [
            f"    32   %{10 + 4 * n} = load_const ({offset:#010x})",
            f"    32   %{11 + 4 * n} = iadd.nsw %{register}, %{10 + 4 * n} // exact",
            f"    64   %{12 + 4 * n} = pack_64_2x32_split %{11 + 4 * n}, %1 (0x0)",
            f"    {loaded} %{13 + 4 * n} = @load_global (%{12 + 4 * n}) (access=none, align_mul=8)",
        ]
    return lines


@pytest.mark.parametrize(
    ("rows", "steps", "block", "lines"),
    [
        (4, 4, (8, 8), 4 * 2 + 4 * 2),  # two rows of eight: 2 lines of A, and 8 x 16 bytes of B
        (8, 4, (8, 8), 8 * 2 + 4 * 2),
        (4, 4, (16, 4), 4 * 1 + 4 * 4),  # one row: all lanes read the same of A
        (4, 4, (4, 16), 4 * 4 + 4 * 1),  # four rows of four
        (4, 4, (1, 64), 4 * 16 + 4 * 1),  # sixteen rows: all lanes read the same of B
        (4, 4, (8, 3), 4 * 1.5 + 4 * 2),  # a warp of two rows and half a warp of one
    ],
)
def test_lines_are_those_of_the_lanes_of_a_warp(
    rows: int, steps: int, block: tuple[int, int], lines: float
) -> None:
    (found,) = accesses(product(rows, steps), group(*block)).values()
    assert [one.bits for one in found] == [64] * rows + [128] * steps
    assert sum(one.lines for one in found) == lines


def test_lines_of_a_kernel_are_those_of_its_launch(dump: Dump, dump26: Dump) -> None:
    """Each lane reads rows of 1,536 bytes of its own, and all the same of the second operand."""
    halves, whole = (count(kernels(one)["__wrapped_sums"], group(16)) for one in (dump, dump26))
    assert (halves.main.lines, whole.main.lines) == (2 * 16 + 2 * 1, 16 + 1)
    assert halves.whole.lines == 96 * 34 + 2 * 4, "its two stores touch the same 256 bytes"
    assert whole.whole.lines == 96 * 17 + 4


@pytest.mark.parametrize(
    ("statement", "lines"),
    [
        ("ishl %1, %9 (0x6)", 16),  # a line for each lane
        ("iadd %1, %9 (0x6)", 1),
        ("imul %1, %8 (0xfffffffc)", 2),  # down from 0, by 4 bytes
        ("isub %8 (0xfffffffc), %1", 1),
        ("ushr %1, %9 (0x6)", 1),
        ("ishr %8 (0xfffffffc), %1", 2),  # four bytes at -1 lie in two lines
        ("b32csel %2, %1, %9 (0x6)", 1),
        ("extract_u8 %1, %7 (0x0)", 1),
        ("umin %1, %9 (0x6)", 1),
    ],
)
def test_address_arithmetic(statement: str, lines: float) -> None:
    nir = f"""
    block b3:
    32  %1 = @load_local_invocation_index
    32  %7 = load_const (0x00000000)
    32  %8 = load_const (0xfffffffc = -4)
    32  %9 = load_const (0x00000006)
    32  %2 = ilt32 %8, %1
    32  %3 = {statement}
    64  %4 = pack_64_2x32_split %3, %7 (0x0)
            @store_global (%1, %4) (wrmask=x)""".split("\n")
    assert accesses(nir, group(16)) == {3: [Access(32, lines)]}


@pytest.mark.parametrize(
    "negative",
    [
        "32  %3 = extract_i8 %2, %1 (0x0)",  # -4 from 0x7ffc
        "32  %3 = extract_i16 %2, %1 (0x0)",
        "32  %3 = i2i32 %5",
        "32  %3 = ishr %4, %6 (0x10)",
        "32  %3 = imin %2, %8",
        "64  %3 = i2i64 %8",
    ],
)
@pytest.mark.parametrize("compared", ["1   %10 = ilt", "16  %10 = ilt16", "32  %10 = ilt32"])
def test_signed_operations_keep_the_sign_of_their_operands(negative: str, compared: str) -> None:
    """All lanes read one line if the number is below 0, and one each if it is not."""
    bits = negative.split(maxsplit=1)[0]
    nir = f"""
    block b0:
    32  %0 = @load_local_invocation_index
    32  %1 = load_const (0x00000000)
    32  %2 = load_const (0x7f00fffc)
    32  %4 = load_const (0xfffc0000)
    16  %5 = load_const (0xfffc)
    32  %6 = load_const (0x00000010)
    32  %7 = load_const (0x00000006)
    32  %8 = load_const (0xfffffffc)
    {bits}  %9 = load_const (0x00000000)
    {negative}
    {compared} %3, %9 (0x0)
    32  %11 = ishl %0, %7 (0x6)
    32  %12 = b32csel %10, %1, %11
    64  %13 = pack_64_2x32_split %12, %1 (0x0)
    32  %14 = @load_global (%13)""".split("\n")
    assert accesses(nir, group(16)) == {0: [Access(32, 1)]}


def test_an_address_that_depends_on_memory_is_unknown() -> None:
    nir = [
        "block b0:",
        "64  %1 = load_const (0x0000000000000000)",
        "32  %2 = @load_global (%1 (0x0)) (access=none)",
        "64  %3 = u2u64 %2",
        "32  %4 = @load_global (%3) (access=none)",
    ]
    assert accesses(nir, group(16)) == {0: [Access(32, 1)]}


@pytest.mark.parametrize(
    ("offset", "also", "instructions"),
    [
        (0x80, "", 4),
        (0x7FFF, "", 4),
        (0x8000, "", 0),
        (-0x8000 % 2**64, "", 4),
        (0x80, "64  %6 = iadd %3, %2 (0x80)", 0),  # the sum is read by something else
    ],
)
def test_constants_that_a_load_could_add_are_counted(offset: int, also: str, instructions: int) -> None:
    """Two copies, and an addition that counts twice: as Mesa 26 adds 64 bits."""
    nir = f"""
    block b2:
    64  %1 = pack_64_2x32 %0.xy
    64  %2 = load_const ({offset:#018x})
    64  %3 = iadd %1, %2 ({offset:#x})
    {also}
    32  %4 = @load_global (%3) (access=none)
            @store_global (%4, %1) (wrmask=x)""".split("\n")
    assert constant_offsets(nir) == ({2: instructions} if instructions else {})


@pytest.mark.parametrize(
    ("by", "also", "instructions"),
    [
        ("%5 (0x40)", "", 3),
        ("%5 (0xffffffc0)", "", 3),
        ("%5", "", 0),  # a number that is not constant
        ("%5 (0x40)", "32  %11 = imul %6, %6", 0),
    ],
)
def test_constants_are_added_to_addresses_by_words(by: str, also: str, instructions: int) -> None:
    """The sum, its carry, and the sum of the upper words: as Mesa 25 adds 64 bits."""
    nir = f"""
    block b1:
    32x2  %4 = @load_ubo (%0 (0x0), %1 (0x10))
    32  %5 = load_const (0x00000040)
    32  %6 = iadd! %4.x, {by}
    32  %7 = ult32 %6, %4.x
    32  %8 = b2i32 %7
    32  %9 = iadd! %8, %4.y
    {also}
    64  %10 = pack_64_2x32_split %6, %9
            @store_global (%5, %10) (wrmask=x)""".split("\n")
    assert constant_offsets(nir) == ({1: instructions} if instructions else {})
