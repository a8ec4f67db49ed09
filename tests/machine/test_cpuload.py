"""Whose the CPUs' time was, from the text of /proc/stat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from honed.machine import microbench

TICKS = os.sysconf("SC_CLK_TCK")


def stat(busy: int = 0, idle: int = 0, steal: int = 0, guest: int = 0) -> str:
    """Two CPUs' ticks together; guests' are in "user" already."""
    return f"cpu  {busy} 0 0 {idle} 7 0 0 {steal} {guest} 0\ncpu0 1 1 1 1 1 1 1 1 0 0\nintr 5\n"


def share(before: str, after: str, own: float) -> float | None:
    return microbench.others_load(microbench.parse_load(before, 1.0), microbench.parse_load(after, 1.0 + own))


def test_what_neither_idled_nor_was_ours_is_the_others() -> None:
    alone = share(stat(1000, 1000), stat(1000 + TICKS, 1000 + TICKS), own=1.0)
    assert alone == pytest.approx(0.0)
    beside = share(stat(1000, 1000), stat(1000 + 2 * TICKS, 1000), own=1.0)
    assert beside == pytest.approx(0.5)
    stolen = share(stat(1000, 1000), stat(1000 + TICKS, 1000, steal=TICKS), own=1.0)
    assert stolen == pytest.approx(0.5)
    guests = share(stat(1000, 1000), stat(1000 + TICKS, 1000 + TICKS, guest=TICKS), own=1.0)
    assert guests == pytest.approx(0.0)


def test_it_is_a_share_whatever_the_rounding() -> None:
    assert share(stat(1000, 1000), stat(1000 + TICKS, 1000), own=1.5) == 0.0
    assert share(stat(1000, 1000), stat(1001, 1000), own=0.0) is None, "too short to say"
    assert microbench.others_load(None, microbench.parse_load(stat(1, 1), 0.0)) is None


@pytest.mark.parametrize("text", ["", "intr 5\n", "cpu 1 2 3\n", "cpu a b c d e f g h\n"])
def test_no_figures(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    assert microbench.read_load(tmp_path / "stat") is None
    assert microbench.read_load(tmp_path / "none") is None


def test_this_machine() -> None:
    found = microbench.read_load()
    assert found is not None
    assert 0 < found.busy <= found.total
    assert found.own > 0
