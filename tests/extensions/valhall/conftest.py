"""Real dumps of Mesa's compilers: `sums.cl` as each makes it for a Mali-G610, less its forms in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.valhall.compiler import Dump
from tests.tuner.conftest import _kept_kernels

__all__ = ["_kept_kernels"]

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def source() -> str:
    return (HERE / "sums.cl").read_text()


@pytest.fixture(scope="session")
def dump() -> Dump:
    return Dump((HERE / "sums.dump").read_text(), (HERE / "sums.stats").read_text())


@pytest.fixture(scope="session")
def dump26() -> Dump:
    """Mesa 26.2.6's, which prints all of it to its stderr."""
    return Dump("", (HERE / "sums26.stats").read_text())
