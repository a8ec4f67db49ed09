"""Several users' processes at once, one of them hostile: nobody sees, or breaks, what is another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.bringing import DEEDS, Running
from tests.daemon.running import Service, wait_for

from .own_models import for_users

pytestmark = [pytest.mark.service, pytest.mark.opencl]
HONEST, HOSTILE = (61_011, 61_012, 61_013), 61_019
QUOTAS = "\n[apps]\nmax_models = 4\ndisk_mib = 8\ncompile_seconds = 0\n"
TRACES = ("Traceback", "never retrieved", "never awaited", "Exception ignored")
LINES_OF_A_TRACE = 40  # The log of a failure is cut to its ends, and holds hundreds of lines beside them


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, small_model: Path) -> Iterator[Service]:
    with for_users(tmp_path_factory, cache_dir, QUOTAS) as running:
        with running.client() as client:
            client.add(small_model, name="small")
        yield running


@pytest.mark.slow
def test_one_hostile_user_costs_the_others_nothing(own: Service) -> None:
    honest = [Running("honest", own.socket, uid, uid) for uid in HONEST]
    hostile = Running("hostile", own.socket, HOSTILE, 1, HONEST)
    for _ in range(3):
        assert all(each.round_ends() for each in honest)
    for _ in range(DEEDS):
        assert hostile.round_ends()
    with own.client() as root:
        owners = [model["owner"] for model in root.models() if model["owner"]]
        assert owners.count(str(HOSTILE)) <= 4
    told = [each.end() for each in (*honest, hostile)]
    assert [each.problems for each in told] == [[], [], [], []]
    assert all(each.rounds >= 3 for each in told)
    lines = own.log.splitlines()
    traces = [at for at, line in enumerate(lines) if any(trace in line for trace in TRACES)]
    assert not traces, "\n".join(line for at in traces for line in lines[at : at + LINES_OF_A_TRACE])
    with own.client() as root:
        assert root.ready("small")
        for model in root.models():
            if model["owner"]:
                assert model["owner"] == str(HOSTILE)
                root.remove(model["name"])
        objects = list((own.state / "objects").iterdir())
        assert len(objects) == 1, "the small model's"
        wait_for(lambda: not own.children("honed.cpu.worker"), "users' engines to end", own)
    wait_for(lambda: not list((own.state / "staging").iterdir()), "nothing to be left over", own)
