"""What tests of farms share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from honed.farm.certificates import issue
from tests.tuner.conftest import _kept_kernels

from .running import RunningFarm

__all__ = ["_kept_kernels"]


@pytest.fixture(scope="session")
def certificates(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """A folder with certificates for `pc` and `board`."""
    return made_once("farm-certificates", lambda folder: issue(folder, ["pc", "board"]))


@pytest.fixture
def farm(tmp_path: Path, certificates: Path, cache_dir: Path) -> Iterator[RunningFarm]:
    """A scheduler on loopback with TLS, without boards."""
    with RunningFarm(tmp_path, certificates, cache_dir) as running:
        yield running
