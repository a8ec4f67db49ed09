"""What the user of honed-hub may do in a real service: share what tuning learned, and nothing else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.hub import layout, machine
from honed.hub.machine import HubConfig
from honed.hub.memory import HubState, IndexCache
from honed.hub.minisign import SecretKey
from honed.protocol import methods, strict
from honed.protocol.errors import InvalidArgument, PermissionDenied
from honed.protocol.methods import METHODS, Permission
from honed.protocol.params import TunerRunParams
from honed.protocol.values import DeviceIdentity
from honed.runtime import Client
from tests.attack import users
from tests.daemon.running import Service
from tests.daemon.serving.own_models import ANNA, client, for_users
from tests.daemon.serving.test_own_models import asked

from .test_hub_files import record

pytestmark = [pytest.mark.service, pytest.mark.opencl]
TIMING = {"median_s": 1e-4, "low_s": 9e-5, "high_s": 2e-4, "repeats": 9, "yardstick_ratio": 1.0}
ATTIC, CELLAR = (SecretKey(bytes([n]) * 8, bytes([n]) * 32) for n in (2, 3))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with for_users(tmp_path_factory, cache_dir) as running:
        yield running


@pytest.fixture
def hub(service: Service) -> Iterator[Client]:
    """A client of the user whom honed-hub runs as."""
    with client(service, users.HUB) as connected:
        yield connected


@pytest.fixture
def measured(hub: Client) -> Callable[..., dict[str, Any]]:
    """A record of the service's device, as a machine exports it."""
    (device,) = machine.devices(hub)

    def made(workload: str, **changes: Any) -> dict[str, Any]:
        whole = {"device": strict.to_plain(device), "workload": workload, "timing": TIMING, "reason": ""}
        return record(**(whole | changes))

    return made


def spec(connected: Client) -> str:
    (found,) = machine.devices(connected).values()
    return found


def kept(service: Service) -> list[dict[str, Any]]:
    """All that the records hold, as root exports it."""
    with service.client() as root:
        _, descriptors = root.run_tuner(TunerRunParams(command="export"))
    with open(descriptors[0], "rb") as file:
        return [json.loads(line) for line in file]


def take_in_as_root(service: Service, *lines: dict[str, Any]) -> None:
    with service.client() as root, tempfile.TemporaryFile() as file:
        file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        file.seek(0)
        root.run_tuner(TunerRunParams(command="import"), descriptors=[file.fileno()])


def hint(line: dict[str, Any], source: str = "attic", **changes: Any) -> bytes:
    plain = json.loads(layout.hint_of(json.dumps(line).encode(), source)[0])
    return json.dumps(plain | changes).encode() + b"\n"


def test_it_changes_nothing(hub: Client) -> None:
    """Models, versions, settings, the lease, tuning, and records of this machine are others' to change."""
    changing = {name for name, method in METHODS.items() if method.right is Permission.CHANGE}
    assert changing >= {"RepositoryModelLoad", "ModelRollback", "ModelPublish", "ConfigReload", "TunerRun"}
    for name in changing:
        with pytest.raises(PermissionDenied, match="honed-admin"):
            asked(hub, name, {})
    with pytest.raises(PermissionDenied, match="honed-admin"):
        asked(hub, "RepositoryModelUnload", {"model_name": "small"})


def test_members_of_honed_alone_share_nothing(service: Service) -> None:
    with client(service, ANNA) as anna:
        for name in ("HintsExport", "HintsImport"):
            with pytest.raises(PermissionDenied, match="honed-hints"):
                asked(anna, name, {})


def test_it_takes_in_hints(service: Service, hub: Client, measured: Callable[..., dict[str, Any]]) -> None:
    given = [hint(measured("w1")), hint(measured("w2", state="quarantined", outcome="faulted", timing=None))]
    done = machine.take_in(hub, spec(hub), given)
    assert (done.count, done.merged, done.refused) == (2, 0, ())
    assert machine.take_in(hub, spec(hub), given).merged == 2
    found = {line["workload"]: line for line in kept(service)}
    assert found["w1"]["measured_by"] == found["w2"]["measured_by"] == "hub: attic"
    assert found["w1"]["compiler"] == "tvm 1, lowering 2, by attic"


FORGED: list[dict[str, Any]] = [
    {"measured_by": "this board"},
    {"measured_by": "hub: "},
    {"measured_by": "hub: a\x1b[2J"},
    {"measured_by": "hub: " + "x" * 100},
    {"compiler": "tvm 1, lowering 2"},
    {"compiler": "tvm 1, lowering 2, by cellar"},
    {"name": "a name"},
    {"story": "a story"},
    {"reason": "whatever"},
]


def test_it_takes_in_nothing_but_hints(
    service: Service, hub: Client, measured: Callable[..., dict[str, Any]]
) -> None:
    """Neither records of this machine nor hints that say more than one may."""
    with pytest.raises(InvalidArgument, match="it is no hint"):
        machine.take_in(hub, spec(hub), [json.dumps(measured("forged")).encode() + b"\n"])
    lines = [hint(measured(f"forged {number}"), **forged) for number, forged in enumerate(FORGED)]
    done = machine.take_in(hub, spec(hub), [*lines, hint(measured("w3"))])
    assert done.count == 1
    assert len(done.refused) == len(FORGED)
    assert all("it is no hint" in why for why in done.refused)
    assert not any(line["workload"].startswith("forged") for line in kept(service))


def test_a_hint_changes_no_record_of_this_machine(
    service: Service, hub: Client, measured: Callable[..., dict[str, Any]]
) -> None:
    own = measured("own")
    take_in_as_root(service, own)
    before = [line for line in kept(service) if line["workload"] == "own"]
    banned = own | {"state": "quarantined", "outcome": "faulted", "timing": None}
    assert machine.take_in(hub, spec(hub), [hint(banned), hint(own | {"trace": "[2]"})]).count == 2
    after = [line for line in kept(service) if line["workload"] == "own"]
    assert before == [line for line in after if line["measured_by"] == "my-board"]
    assert len(after) == 3


def test_a_file_is_wanted(hub: Client) -> None:
    with pytest.raises(InvalidArgument, match="0 descriptors"):
        asked(hub, "HintsImport", {})
    reading, writing = os.pipe()
    try:
        with pytest.raises(InvalidArgument, match="not a regular file"):
            asked(hub, "HintsImport", {}, [reading])
    finally:
        os.close(reading)
        os.close(writing)


def test_it_pushes_and_pulls(
    service: Service, hub: Client, measured: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """What was measured here goes to the hub, and what a hub brought does not."""
    banned = measured("mine", trace="[9]", state="quarantined", outcome="faulted", timing=None)
    take_in_as_root(
        service, measured("mine"), measured("mine", trace="[5]", timing=TIMING | {"median_s": 1.0})
    )
    take_in_as_root(service, banned)
    machine.take_in(hub, spec(hub), [hint(measured("theirs"))])
    lines = {(line["workload"], line["trace"]) for line in machine.export_measurements(hub)}
    assert {("mine", "[1]"), ("mine", "[9]")} <= lines
    assert ("mine", "[5]") not in lines, "of each task the best"
    assert not {workload for workload, _ in lines} & {"theirs", "w1", "w3"}
    folder = tmp_path / "hub"
    pushed = machine.push(hub, ATTIC, HubState(), str(folder))
    assert pushed.records == len(lines)

    settings = HubConfig(
        url=str(folder), push_url="", owner=None, keys={"attic": ATTIC.public}, pull=True, push=False,
        hold=False, hours=6.0,
    )  # fmt: skip
    pulled = machine.pull(hub, settings, HubState(), IndexCache(str(folder)), CELLAR.public)
    assert (pulled.added + pulled.merged, pulled.refused) == (pushed.records, [])


def test_what_honed_hub_asks_besides(hub: Client) -> None:
    assert hub.ask(methods.METRICS) is not None
    assert machine.models(hub) == frozenset()
    assert machine.find_withdrawn(hub) == []
    assert isinstance(next(iter(machine.devices(hub))), DeviceIdentity)
    assert HubConfig.of(hub.ask(methods.CONFIG_SHOW)).url == ""
