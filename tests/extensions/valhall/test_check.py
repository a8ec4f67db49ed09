"""The bench beside figures of others: what its kernels compute, and which way a ratio goes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from benchmarks.valhall.__main__ import _HEADS, _judged, _row
from benchmarks.valhall.check import Row
from benchmarks.valhall.peaks import arithmetic, loads
from rich.table import Table

from honed.valhall.compiler import Dump
from honed.valhall.judge import MachineCodeJudge

from .test_bench import OneProgram, launch


@pytest.mark.parametrize(("unit", "predicted"), [("GFLOP/s", 20.0), ("us", 5.0), ("ms", 5.0), ("GB/s", 20.0)])
def test_a_ratio_above_one_is_a_bench_that_promises_too_much(unit: str, predicted: float) -> None:
    assert Row("", unit, 10.0, predicted, "").optimism == pytest.approx(2.0)


def test_operations_and_bytes_are_what_the_source_has() -> None:
    source, launch = arithmetic("half", 4)
    items = launch.grid[0] * launch.block[0]
    assert "half4 x" in source
    assert launch.flops == items * 64 * source.count("mad(") * 4 * 2
    source, launch = loads(8)
    assert launch.bytes == items * (source.count("sum += ") * 32 + 4)


def test_predictions_of_both_compilers_stand_side_by_side(source: str, dump: Dump, dump26: Dump) -> None:
    programs = ({source: dump}, {source: dump26}, {})
    judges = {name: MachineCodeJudge(OneProgram(one)) for name, one in zip("abc", programs, strict=True)}
    judged = _judged(judges, source, [launch()])
    assert list(judged) == ["a", "b"], "the third refuses it"
    table = Table("kernel", *(f"{name}\n{head}" for name in judges for head in _HEADS))
    task = SimpleNamespace(flops=launch().flops)
    _row(table, "sums", task, judged)
    cells = [next(iter(column.cells)) for column in table.columns]
    shown = {
        name: dict(zip(_HEADS, cells[1 + n * len(_HEADS) :], strict=False)) for n, name in enumerate(judges)
    }
    assert cells[0] == "sums"
    assert shown["a"]["fma:cvt:sfu:ls"] == "2:6:9:34"
    assert shown["b"]["fma:cvt:sfu:ls"] == "1:5:9:17"
    assert float(shown["a"]["alu us"]) <= float(shown["a"]["us"]), "loads take longest of all"
    assert shown["c"]["us"] == "refused"
