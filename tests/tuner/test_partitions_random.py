"""However a graph is cut: its answers are right, or it is refused, and never is the compiler to blame."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from honed.machine.devices import Device
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler.partition import partition_model
from honed.tuner.verify import confined

from .partitions_random import CHEAP, REFUSED, RIGHT, Drawn, in_this_process, outcome

pytestmark = pytest.mark.tvm


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts whatever can be cut, and starts no children for it."""
    monkeypatch.setattr(compiling, "partition_model", partial(partition_model, worth=CHEAP))
    monkeypatch.setattr(confined, "run", in_this_process)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_random_graphs_are_right_or_refused(seed: int, cheap: None, tmp_path: Path, device: Device) -> None:
    assert outcome(Drawn(seed).model(), tmp_path, device) in (RIGHT, REFUSED, "")


# 55 once ended otherwise, by a scalar of the last part; 2 has a Loop without steps, which has another rank;
# nothing verifies the answers of 82, a model in parts.
@pytest.mark.parametrize("seed", [2, 55, 82])
def test_graphs_that_went_wrong_do_not(seed: int, cheap: None, tmp_path: Path, device: Device) -> None:
    assert outcome(Drawn(seed).model(), tmp_path, device) in (RIGHT, REFUSED)
