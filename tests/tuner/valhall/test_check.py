"""The bench beside figures of others: what its kernels compute, and which way a ratio goes."""

from __future__ import annotations

import pytest
from benchmarks.valhall.check import Row
from benchmarks.valhall.peaks import arithmetic, loads


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
