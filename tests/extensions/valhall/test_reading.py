"""What is read from a dump and counted, against what the compiler says of itself."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from honed.valhall.compiler import Dump
from honed.valhall.count import count, pipe_of
from honed.valhall.dump import BasicBlock, KernelDump, Unreadable, kernels, trip_counts
from honed.valhall.judge import CLOCK_HZ, bound
from honed.valhall.lanes import LaunchGeometry

KERNEL = KernelDump(name="k", blocks=(), trips=(), instructions=1, half_occupancy=False, spills=0, fills=0)
SUMS, UNTIL = "__wrapped_sums", "__wrapped_until"


def test_every_kernel_is_read_as_it_was_made_last(dump: Dump) -> None:
    found = kernels(dump)
    assert list(found) == [SUMS, UNTIL]
    assert [kernel.instructions for kernel in found.values()] == [79, 28]
    assert [kernel.trips for kernel in found.values()] == [(96,), (None,)]
    blocks = found[SUMS].blocks
    assert [block.number for block in blocks] == [0, 1, 2, 3, 4, 5]
    assert blocks[0].instructions[0] == "r0 = IMUL.i32 r60, u259.b2"
    assert [block.successors for block in blocks] == [(1,), (3, 2), (5,), (4,), (1,), ()]


def test_registers_and_spills_are_read(dump: Dump) -> None:
    assert not kernels(dump)[SUMS].half_occupancy
    stats = dump.stats.replace("2 threads, 1 loops, 0:0", "1 threads, 1 loops, 3:5")
    kernel = kernels(replace(dump, stats=stats))[SUMS]
    assert (kernel.half_occupancy, kernel.spills, kernel.fills) == (True, 3, 5)


@pytest.mark.parametrize("name", [SUMS, UNTIL])
def test_instructions_go_to_the_pipes_that_the_compiler_counts_them_for(dump: Dump, name: str) -> None:
    """Its totals count each instruction once, in clocks of 64 lanes (FMA, CVT) or 16 (SFU)."""
    kernel = kernels(dump)[name]
    said = dump.stats.splitlines()[1 if name == SUMS else 2]
    cycles = {pipe: float(c) for c, pipe in re.findall(r"([\d.]+) (fma|cvt|sfu|ls)\b", said)}
    once = count(replace(kernel, trips=(1,), once_more=())).whole
    assert once.fma / 64 == cycles["fma"]
    assert once.cvt / 64 == cycles["cvt"]
    assert once.sfu / 16 == cycles["sfu"]
    assert once.ls == cycles["ls"]


def test_what_mesa_26_prints_is_read(dump26: Dump) -> None:
    found = kernels(dump26)
    assert list(found) == [SUMS, UNTIL]
    assert [kernel.instructions for kernel in found.values()] == [45, 25]
    assert [kernel.registers for kernel in found.values()] == [17, 9]
    assert [kernel.trips for kernel in found.values()] == [(96,), (None,)]
    assert not found[SUMS].half_occupancy
    stats = dump26.stats.replace("2 threads, 1 loops, 0:0", "1 threads, 1 loops, 3:5")
    kernel = kernels(Dump("", stats))[SUMS]
    assert (kernel.half_occupancy, kernel.spills, kernel.fills) == (True, 3, 5)


@pytest.mark.parametrize("name", [SUMS, UNTIL])
def test_instructions_of_mesa_26_are_counted_as_it_counts_them(dump26: Dump, name: str) -> None:
    """Its totals have `alu`, too: SFU, or all three pipes, which share 64 lanes a clock."""
    kernel = kernels(dump26)[name]
    said = [line for line in dump26.stats.splitlines() if " instrs, " in line][0 if name == SUMS else 1]
    cycles = {pipe: float(c) for c, pipe in re.findall(r"([\d.]+) (fma|cvt|sfu|alu|ls)\b", said)}
    once = count(replace(kernel, trips=(1,), once_more=())).whole
    assert (once.fma / 64, once.cvt / 64, once.sfu / 16) == (cycles["fma"], cycles["cvt"], cycles["sfu"])
    assert once.ls == cycles["ls"]
    geometry = LaunchGeometry(grid=(1, 1, 1), block=(16, 1, 1))
    shared = bound(once, geometry, 0).alu * CLOCK_HZ
    assert shared / 16 == pytest.approx(cycles["alu"])


def test_mesa_26_packs_halves_in_a_loop(dump26: Dump) -> None:
    found = count(kernels(dump26)[SUMS])
    assert found.certain
    assert (found.main.fma, found.main.half) == (4, 0), "eight products by four instructions"


def test_what_precedes_the_test_of_this_turns_value_runs_once_more(dump: Dump) -> None:
    """Mesa 25 tests at the top of its loop, so its test runs once more; its work does not."""
    kernel = kernels(dump)[SUMS]
    assert kernel.once_more == (True,)
    before, after = (count(replace(kernel, once_more=once_more)).whole for once_more in ((), (True,)))
    assert (after.fma, after.ls) == (before.fma, before.ls)
    assert after.cvt == before.cvt + 3, "a comparison and two branches"


def test_a_loop_counts_as_often_as_it_turns(dump: Dump) -> None:
    found = count(kernels(dump)[SUMS])
    assert found.certain
    assert (found.main.fma, found.whole.fma) == (8, 96 * 8)
    assert found.whole.half == found.whole.fma, "all of it is on halves"
    assert found.whole.ls == 96 * 4 + 2, "four loads of half4 a turn, and two stores at the end"
    assert found.whole.lines == 2 * found.whole.ls, "16 lanes side by side touch 128 bytes each time"


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("r18 = FMA.v2f16 r45.h00, r50.h11, ^r18.h00", 1),
        ("r24 = FMA.v2f16.flow4 r45.h11, ^r47, r24", 0),
        ("r24 = FMA.v2f16 r45.h11, r47.h01, u256.neg", 0),
        ("r24 = FMA.f32 r45, r47, u256.neg", 0),
        ("r18 = FMA.v2f16 r45^.h00, r50^.h11, r18^.h00", 1),
        ("r24 = FMA.v2f16 r45^, r47.h11, r24^", 0),
    ],
)
def test_halves_that_the_compiler_packs_are_told_from_those_it_leaves(text: str, half: int) -> None:
    found = count(replace(KERNEL, blocks=(BasicBlock(0, (text,), ()),))).whole
    assert (found.fma, found.half) == (1, half)


@pytest.mark.parametrize(
    ("registers", "clocks"), [("r3", 2), ("r4:r5", 4), ("r6:r7:r8:r9", 8)], ids=["32", "64", "128"]
)
def test_a_fetch_takes_as_long_as_its_texel_is_wide(registers: str, clocks: int) -> None:
    text = f"{registers} = TEX_FETCH.flow1.rgba.2d.f16 r4:r5, r6^, r7^, sr_count:2"
    found = count(replace(KERNEL, blocks=(BasicBlock(0, (text,), ()),))).whole
    assert (found.tex, found.cycles["tex"], found.ls, found.cvt) == (1, clocks, 0, 0)


def test_a_loop_of_unknown_turns_counts_once_and_is_said_to(dump: Dump) -> None:
    found = count(kernels(dump)[UNTIL])
    assert not found.certain
    assert found.whole.fma == 1


def test_lines_of_loads_are_those_of_their_width(dump: Dump) -> None:
    narrow = Dump(dump.code.replace("LOAD.i64", "LOAD.i16"), dump.stats)
    assert count(kernels(narrow)[SUMS]).main.lines == 4
    wide = Dump(dump.code.replace("LOAD.i64", "LOAD.i128"), dump.stats)
    assert count(kernels(wide)[SUMS]).main.lines == 16


@pytest.mark.parametrize(
    ("start", "step", "comparison", "limit", "turns"),
    [
        ("%0 (0x0)", "%1 (0x1)", "ige32", "%9 (0x60)", 96),
        ("%0 (0x0)", "%1 (0x4)", "ige32", "%9 (0x60)", 24),
        ("%0 (0x5)", "%1 (0x4)", "uge32", "%9 (0x60)", 23),
        ("%0 (0x60)", "%1 (0xffffffff)", "ieq32", "%9 (0x0)", 96),
        ("%0 (0x0)", "%1 (0x1)", "ige32", "%9", None),
        ("%0", "%1 (0x1)", "ige32", "%9 (0x60)", None),
        ("%6", "%1 (0x1)", "ige32", "%9 (0x60)", 96),  # from a group's place along z
        ("%7", "%1 (0x1)", "ige32", "%9 (0x60)", None),  # along y
        ("%12", "%1 (0x1)", "ige32", "%9 (0x60)", 96),  # along z, added to in 64 bits
        ("%13", "%1 (0x1)", "ige32", "%9 (0x60)", None),
    ],
)
def test_turns_of_a_loop(start: str, step: str, comparison: str, limit: str, turns: int | None) -> None:
    lines = f"""
    32x3   %5 = @load_workgroup_id
    32     %6 = iadd %5.z, %8
    32     %7 = iadd %5.y, %8
    64    %10 = pack_64_2x32_split %5.z, %0 (0x0)
    64    %11 = iadd %10, %8
    32    %12 = unpack_64_2x32_split_x %11
    32    %13 = unpack_64_2x32_split_y %11
    loop {{
        block b1:
        32     %2 = phi b0: {start}, b4: %4
        32     %3 = {comparison} %2, {limit}
        if %3 {{
            break
        }}
        32     %4 = iadd %2, {step}
    }}""".split("\n")
    assert trip_counts(lines) == [turns]


def test_what_is_no_dump_is_refused(dump: Dump) -> None:
    with pytest.raises(Unreadable, match="no kernel"):
        kernels(Dump("", ""))
    with pytest.raises(Unreadable, match="totals of 2"):
        kernels(replace(dump, stats="".join(dump.stats.splitlines(keepends=True)[1:])))


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("FMA.v2f16", "fma"),
        ("IADD.s32", "cvt"),
        ("MKVEC.v2i16", "cvt"),
        ("LSHIFT_OR.i32", "sfu"),
        ("IMUL.i32", "sfu"),
        ("LOAD.i64.flow1", "ls"),
        ("STORE.i32", "ls"),
        ("PHI", "none"),
        ("IDPADD.v4s8", "fma"),
        ("SHADDX.s64", "cvt"),
        ("CLPER.i32", "sfu"),
        ("TEX_FETCH.rgba.2d.f16", "tex"),
        ("TEX_SINGLE.slot0", "tex"),
    ],
)
def test_pipes(opcode: str, pipe: str) -> None:
    assert pipe_of(opcode) == pipe
