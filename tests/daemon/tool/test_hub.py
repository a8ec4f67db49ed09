"""`hone hub` and honed-hub's looks at a real service, whose records go to a folder and come back as hints."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.hub import machine
from honed.hub.machine import HubPlace
from honed.hub.main import HubAction, key_of, look
from honed.tool.main import main
from tests.daemon.running import Service, serving
from tests.tuner.records.test_records import FAULT, add, right

pytest.importorskip("honed.tuner")
from honed.tuner.records.rows import MeasurementSetup, TaskRecord
from honed.tuner.records.store import Records
from honed.tuner.setup import setup_for

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
Hone = Callable[..., dict[str, Any]]
TASK = TaskRecord(workload="dense", name="secret_layer", flops=1e8, bytes=1e6)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir) as running:
        yield running


@pytest.fixture
def setup(service: Service) -> Iterator[MeasurementSetup]:
    """The service has two records of its device then, and one in quarantine."""
    with service.client() as client:
        ((device, _),) = _devices(client).items()
    setup = setup_for(device)
    with Records.open(service.state / "records.sqlite", measured_by="secret-host") as records:
        records.put_model("secret-model", {TASK: 36})
        add(records, 1, right(2.0), setup=setup)
        add(records, 2, right(1.0), setup=setup)
        add(records, 3, FAULT, setup=setup)
    yield setup
    for file in service.state.glob("records.sqlite*"):
        file.unlink()


def _devices(client: Any) -> Any:
    from honed.hub import machine

    return machine.devices(client)


@pytest.fixture
def hone(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Hone:
    """Runs `hone hub` with the key of a machine in a folder of that name: as JSON, and for people."""
    monkeypatch.setenv("HONED_SOCKET", str(service.socket))
    monkeypatch.setenv("COLUMNS", "80")

    def run(who: str, *arguments: str, fails: bool = False) -> dict[str, Any]:
        folder = f"--folder={tmp_path / who}"
        capsys.readouterr()
        assert main(["hub", *arguments, folder, "--json"]) == int(fails)
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    return run


@pytest.fixture
def hub(service: Service, hone: Hone, tmp_path: Path) -> Path:
    """A hub that the service is told of, whose list has `attic`."""
    place = tmp_path / "www"
    owner = hone("owner", "init", str(place))["owner"]
    hone("owner", "trust", str(place), "attic", hone("attic", "key")["key"])
    service.configure(f'[hub]\nurl = "{place}"\nowner = "{owner}"\n[tuner]\nspawn = false\n')
    return place


def test_from_one_machine_to_another(
    hone: Hone,
    hub: Path,
    setup: MeasurementSetup,
    service: Service,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert hone("attic", "push")["records"] == 2  # the best, and what faulted
    text = "".join(gzip.decompress(file.read_bytes()).decode() for file in hub.glob("boards/*/*.gz"))
    assert "secret" not in text
    assert hone("cellar", "pull", "--hold")["held"] == 2
    assert hone("cellar", "status")["waiting"] == 2
    told = hone("cellar", "pull")
    assert (told["added"], told["refused"]) == (2, [])
    assert [source["name"] for source in told["sources"]] == ["attic"]
    assert hone("cellar", "pull")["added"] == 0
    assert hone("attic", "pull")["sources"] == []  # its own
    with Records.open(service.state / "records.sqlite") as records:
        assert records.hint_sources()["attic"].taken == 2
        assert records.best("dense", setup) is not None
    for command in ("key", "push", "pull", "status"):
        assert main(["hub", command, f"--folder={tmp_path / 'cellar'}"]) == 0
        assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


def test_what_did_not_change_is_not_read_and_a_lost_note_is_written_again(
    hone: Hone, hub: Path, setup: MeasurementSetup, tmp_path: Path
) -> None:
    overview = hub / "boards.json"
    empty = overview.read_bytes()
    hone("attic", "push")
    full = overview.read_bytes()
    hone("attic", "pull")
    assert hone("cellar", "pull")["added"] == 2
    (index,) = hub.glob("boards/*/index.json")
    index.rename(away := tmp_path / "index.json")
    assert not hone("cellar", "pull")["sources"][0]["problem"]  # by what is kept in its folder
    assert "gone" in hone("cellar", "pull", "--from", "attic", fails=True)["sources"][0]["problem"]
    away.rename(index)
    overview.write_bytes(empty)
    hone("attic", "status")
    assert overview.read_bytes() == empty, "who only looks writes nothing"
    hone("attic", "pull")
    assert overview.read_bytes() == full


def test_what_is_revoked_is_believed_no_more(hone: Hone, hub: Path, setup: MeasurementSetup) -> None:
    hone("attic", "push")
    assert hone("owner", "revoke", str(hub), "attic")["boards"] == []
    assert hone("cellar", "pull")["added"] == 0
    key = hone("attic", "key")["key"]
    assert "was revoked" in hone("owner", "trust", str(hub), "attic", key, fails=True)["error"]["message"]
    assert "has no 'nobody'" in hone("owner", "revoke", str(hub), "nobody", fails=True)["error"]["message"]


def test_what_is_wrong_is_said(hone: Hone, hub: Path, setup: MeasurementSetup, service: Service) -> None:
    assert "already" in hone("owner", "init", str(hub), fails=True)["error"]["message"]
    assert "signed by key" in hone("attic", "trust", str(hub), "x", "RW", fails=True)["error"]["message"]
    hone("attic", "push")
    for file in hub.glob("boards/*/*.minisig"):
        file.unlink()
    told = hone("cellar", "pull", fails=True)
    assert "has no signature" in told["sources"][0]["problem"]
    assert "has no signature" in hone("cellar", "status")["sources"][0]["problem"]
    service.configure("[tuner]\nspawn = false\n")
    assert "set hub.url" in hone("cellar", "pull", fails=True)["error"]["message"]
    assert "set hub.url" in hone("cellar", "status")["problem"]


def test_the_program_pulls_and_pushes_and_comes_back_after_a_hub_was_away(
    hone: Hone, hub: Path, setup: MeasurementSetup, service: Service, tmp_path: Path
) -> None:
    socket, attic, cellar = str(service.socket), HubPlace(tmp_path / "attic"), HubPlace(tmp_path / "cellar")
    key_of(cellar)
    with service.client() as client:
        assert machine.trials(client) == 0  # nobody has told the service of these records yet
    assert look(socket, attic, 0.5, 0.0) is HubAction.PULL
    assert look(socket, attic, 0.5, 0.0) is None
    hone("attic", "push")
    away = hub.rename(tmp_path / "away")
    assert look(socket, cellar, 0.5, 0.0) is HubAction.PULL
    assert "make or mount it" in hone("cellar", "status")["last_problem"]
    assert hone("cellar", "status")["retry_seconds"] > 0
    assert look(socket, cellar, 0.5, 0.0) is None
    away.rename(hub)
    with cellar.changing() as memory:
        memory.retry_s = 0.0
    assert look(socket, cellar, 0.5, 0.0) is HubAction.PULL
    assert cellar.read_state().sources[0].records == 2
