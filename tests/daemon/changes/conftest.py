"""A service for the tests of a file, whose compiler does what they tell it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.running import Service, serving
from tests.daemon.stubs import StubTuner


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> StubTuner:
    return StubTuner(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module")
def stub_service(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, stub: StubTuner
) -> Iterator[Service]:
    """A daemon whose compiler is the stub."""
    with serving(tmp_path_factory, cache_dir, environment=stub.environment) as running:
        yield running
