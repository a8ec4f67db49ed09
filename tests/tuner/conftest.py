"""What all tests of the tuner share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from honed.tuner.measure.candidate import Workload
from honed.tuner.measure.process import NO_CACHES
from tests.tuner import warm
from tests.tuner.liars import honest


@pytest.fixture(scope="session", autouse=True)
def _kept_kernels() -> Iterator[None]:
    """Lets PoCL keep the kernels of measuring children that tests start, most of which build the same ones.

    A tuner forbids that, as its candidates come once. Tests that run a whole tuner as a process have it so.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(NO_CACHES, "POCL_KERNEL_CACHE", raising=False)  # folders of extensions have it, too
        yield


@pytest.fixture(scope="module", autouse=True)
def _warm_evaluators() -> Iterator[None]:
    """Has evaluators of models forked; a module whose tests are about their processes says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        warm.install(patch)
        yield


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return honest.scale(tmp_path_factory.mktemp("tasks") / "scale")
