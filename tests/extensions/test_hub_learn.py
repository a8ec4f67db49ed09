"""`hone hub learn`, as a user calls it: where records come from, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from honed.hub import layout, pushing, remote
from honed.hub.command import print_learned
from honed.hub.layout import NamedKey
from honed.jobs.events import Learned, LearnedTask
from honed.tool import main as tool
from honed.tool.output import Output

from .test_hub_pull import ATTIC, OWNER, Machine, of


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub with records of one machine, of today."""
    folder = tmp_path / "hub"
    folder.mkdir()
    now = time.time()
    pushing.make(remote.store(str(folder)), OWNER, (NamedKey("attic", str(ATTIC.public)),), (), now)
    Machine(folder).push(ATTIC, of(), now=now)
    return folder


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str
) -> str:
    """What is said where nothing is learned."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    output = tmp_path / "mali.prior"
    more = ("--models", str(tmp_path / "model.onnx"), "-o", str(output), "--bench", "mali-g610")
    assert tool.main(["hub", "learn", *arguments, *more]) == 1
    assert not output.exists()
    return capsys.readouterr().err


def test_a_folder_without_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "records").mkdir()
    told = refused(capsys, monkeypatch, tmp_path, str(tmp_path / "records"))
    assert "there are no records at" in told


def test_records_of_a_hub_get_to_the_tuner(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: Path
) -> None:
    told = refused(capsys, monkeypatch, tmp_path, str(hub), "--owner", str(OWNER.public))
    assert "there is no ONNX file at" in told


def test_a_hub_that_another_signed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: Path
) -> None:
    told = refused(capsys, monkeypatch, tmp_path, str(hub), "--owner", str(ATTIC.public))
    assert "it is signed by key" in told


@pytest.mark.parametrize("listed", [True, False])
def test_a_hub_without_signatures_is_no_folder_of_files(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hub: Path,
    listed: bool,
) -> None:
    for path in hub.rglob(f"*{layout.SIGNATURE}"):
        path.unlink()
    if not listed:
        (hub / layout.HUB).unlink()
    told = refused(capsys, monkeypatch, tmp_path, str(hub), "--owner", str(OWNER.public))
    assert "no signature" in told or "has no hub.json" in told


def test_of_many_tasks_the_worst_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = tuple(
        LearnedTask(task=f"task{n:03}", candidates=9, correlation=0.5, prior=n / 100, without=0.5, rule=True)
        for n in reversed(range(100))
    )
    done = Learned(
        output=None,
        family="mali",
        tasks=tasks,
        candidates=900,
        left_out={},
        prior=0.495,
        without=0.5,
        correlation=0.5,
    )
    Output(json=False).emit({}, lambda console: print_learned(console, done))
    told = capsys.readouterr().out
    shown = [row.split()[0] for row in told.splitlines() if row.startswith("task0")]
    assert shown == [f"task{n:03}" for n in range(20)]
    assert "and 80 more" in told
