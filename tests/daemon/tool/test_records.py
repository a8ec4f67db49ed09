"""`hone history`, `hone records` and `hone faults` on real records, through the real child."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.daemon.observe.faults import EndedProcess, ServiceProcesses
from honed.machine.kernellog.reader import Record
from honed.runtime.errors import PermissionDenied
from honed.tool.commands import faults
from honed.tool.commands.records import check_access, create_records
from tests.daemon.conftest import Hone
from tests.tuner.records.test_records import FAULT, IDENTITY, OTHER_DEVICE, add, new, right

pytest.importorskip("honed.tuner")
from honed.tuner.records.rows import MeasurementSetup, TaskRecord
from honed.tuner.records.store import Records

TASK = TaskRecord(workload="dense", name="dense_3", flops=1e8, bytes=1e6)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a service that tuned a model in two runs."""
    folder = tmp_path / "state"
    folder.mkdir()
    with Records.open(folder / "records.sqlite", measured_by="board") as records:
        records.put_model("lightglue", {TASK: 36})
        add(records, 1, right(2.0))
        add(records, 2, right(1.5))
        add(records, 3, FAULT)
        add(records, 4, right(1.0), workload="softmax")
        add(records, 5, right(3.0), setup=OTHER_DEVICE)
        for trials, milliseconds in ((0, 944.6), (16, 700), (16, 650), (0, 650), (100, 301.5)):
            records.add_progress("lightglue", trials, milliseconds / 1e3)
        records.add_version("lightglue", "tuned: 132 trials in 60 s", 0.298)
        records.add_progress("other", 0, 0.001)
    return folder


@pytest.fixture
def hone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Hone) -> Hone:
    """Runs the tool where no service answers."""
    monkeypatch.setenv("HONED_SOCKET", str(tmp_path / "no-service"))
    return typed


def document(result: tuple[int, str, str]) -> dict[str, Any]:
    status, out, err = result
    assert status == 0, err
    loaded: dict[str, Any] = json.loads(out)
    return loaded


def test_history_as_a_curve(hone: Hone, state: Path) -> None:
    status, out, _ = hone("history", "lightglue", f"--state-dir={state}")
    assert status == 0
    lines = out.splitlines()
    assert lines[:2] == ["lightglue: estimated latency over trials", "ms an inference"]
    assert lines[2].startswith(" 1,000 ┤")
    assert "⠉⠉⠉" in lines[2] + lines[3] or "⣀⣀⣀" in lines[2] + lines[3]
    assert lines[18].startswith("       └┬")
    assert lines[19].split() == ["0", "50", "100", "trials"]
    assert lines[-2].split() == ["version", "since", "trials", "measured", "why"]
    assert lines[-1].split()[0] == "1"
    assert "132" in lines[-1]
    assert "298 ms" in lines[-1]


def test_history_where_braille_cannot_be_shown(
    hone: Hone, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "linux")
    status, out, _ = hone("history", "lightglue", f"--state-dir={state}")
    assert status == 0
    assert out.isascii()
    assert "|****" in out
    assert "`+----" in out


def test_history_as_json_and_picture(hone: Hone, state: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    picture = tmp_path / "h.png"
    told = document(hone("history", "lightglue", f"--state-dir={state}", f"--png={picture}", "--json"))
    assert [(point["trials"], round(point["us"])) for point in told["points"]] == [
        (0, 944600), (16, 700000), (32, 650000), (32, 650000), (132, 301500),
    ]  # fmt: skip
    (version,) = told["measured"]
    assert (version["version"], version["trials"], version["us"]) == (1, 132, 298000)
    assert told["png"] == str(picture)
    pixels = image.imread(picture)[..., :3]
    assert pixels.shape == (540, 960, 3)
    blue, red = (np.array(colour) / 255 for colour in ((28, 98, 196), (196, 52, 40)))
    assert np.isclose(pixels, blue, atol=0.01).all(-1).sum() > 500
    assert 20 < np.isclose(pixels, red, atol=0.01).all(-1).sum() < 2000
    status, _, err = hone("history", "lightglue", f"--state-dir={state}", f"--png={tmp_path}/no/h.png")
    assert status == 1
    assert "check that its folder exists" in err


def test_history_of_what_was_not_tuned(hone: Hone, state: Path, tmp_path: Path) -> None:
    status, _, err = hone("history", "nope", f"--state-dir={state}")
    assert status == 1
    assert "nope was not tuned yet" in err
    assert "lightglue, other" in err
    status, _, err = hone("history", "lightglue", f"--state-dir={tmp_path}/elsewhere")
    assert status == 1
    assert "there are no records at" in err
    assert not (tmp_path / "elsewhere").exists()
    status, out, _ = hone("history", "other", f"--state-dir={state}")
    assert status == 0
    assert "No tuned version of other was served yet" in out


def test_export(hone: Hone, state: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    told = document(hone("records", "export", f"--state-dir={state}", "-o", str(file), "--json"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert told["count"] == len(lines) == 5
    assert {line["device"]["name"] for line in lines} == {"Mali-G610", "PoCL"}
    assert sum(line["state"] == "quarantined" for line in lines) == 1
    status, out, _ = hone("records", "export", "--best", f"--state-dir={state}", "-o", str(file))
    assert status == 0
    best = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["timing"]["median_s"] for line in best] == [0.0015, 0.001, 0.003]
    assert " ".join(out.split()) == f"3 records are written to {file}."


@pytest.mark.slow
@pytest.mark.opencl
def test_import_on_a_board_of_the_same_kind(hone: Hone, tmp_path: Path) -> None:
    from honed.machine import devices
    from honed.tuner.setup import setup_for

    here = setup_for(devices.select(None).profile.identity)
    elsewhere = MeasurementSetup(device=IDENTITY, compiler=here.compiler)
    ours, theirs = export_of(tmp_path, "ours", [here, elsewhere]), export_of(tmp_path, "theirs", [elsewhere])
    target = tmp_path / "new" / "state"
    told = document(hone("records", "import", str(ours), f"--state-dir={target}", "--json"))
    assert (told["count"], told["merged"], len(told["refused"])) == (2, 0, 2)
    assert "measured on Mali-G610" in told["refused"][0]
    status, out, _ = hone("records", "import", str(ours), f"--state-dir={target}")
    assert status == 0
    assert "0 records are new, 2 were here already, 2 cannot be used." in out
    with Records.open(target / "records.sqlite") as records:
        best = records.best("dense", here)
        assert best is not None
        assert best.timing is not None
        assert best.timing.median_s == 0.0015
    status, _, err = hone("records", "import", str(theirs), f"--state-dir={target}")
    assert status == 1
    assert "none of the 2 records" in err
    status, _, err = hone("records", "import", str(tmp_path / "absent"), f"--state-dir={target}")
    assert status == 1
    assert "does not exist" in err


def export_of(folder: Path, name: str, setups: Sequence[MeasurementSetup]) -> Path:
    """A file with two candidates of each setup."""
    from honed.tuner.records.exchange import export_jsonl

    file = folder / f"{name}.jsonl"
    with Records.open(folder / f"{name}.sqlite") as records, file.open("wb") as stream:
        for setup in setups:
            add(records, 1, right(2.0), setup=setup)
            add(records, 2, right(1.5), setup=setup)
            export_jsonl(records, stream, setup)
    return file


def test_usage_of_records(hone: Hone) -> None:
    for arguments in (["records"], ["records", "export"], ["records", "import"], ["records", "fly"]):
        status, _, err = hone(*arguments)
        assert status == 2
        assert err.count("\n") == 1


def test_faults(hone: Hone, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Records.open(state / "records.sqlite") as records:
        records.begin(new(9))  # in flight: not in quarantine yet
    monkeypatch.setattr("honed.machine.kernellog.reader.open_reader", lambda **_: Log([PAGE_FAULT, ORDINARY]))
    told = document(hone("faults", f"--state-dir={state}", "--json"))
    (candidate,) = told["quarantined"]
    assert (candidate["name"], candidate["outcome"], candidate["reason"]) == (
        "dense_3",
        "faulted",
        "page fault",
    )
    assert (candidate["device"], candidate["driver_version"]) == ("Mali-G610", "g13p0")
    (fault,) = told["kernel_log"]["faults"]
    assert (fault["driver"], fault["severity"], fault["process"]) == ("kbase", "context", 1693)
    assert fault["time"] == 1.7e9
    status, text, _ = hone("faults", f"--state-dir={state}")
    assert status == 0
    assert "1 candidate is in quarantine and not run again:" in text
    assert "dense_3: faulted" in text
    assert "mali ...: Page fault" in text
    assert "The kernel log holds 1 fault since the machine started:" in text
    assert "every queue of the process was lost" in " ".join(text.split())


def test_faults_without_records_or_a_kernel_log(
    hone: Hone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**_: object) -> None:
        raise PermissionDenied("the kernel log cannot be read: join group systemd-journal")

    monkeypatch.setattr("honed.machine.kernellog.reader.open_reader", denied)
    told = document(hone("faults", f"--state-dir={tmp_path}", "--json"))
    assert told["quarantined"] == []
    assert told["kernel_log"] == {
        "readable": False,
        "reason": "the kernel log cannot be read: join group systemd-journal",
        "faults": [],
    }
    status, text, _ = hone("faults", f"--state-dir={tmp_path}")
    assert status == 0
    assert "No candidate is in quarantine." in text
    assert "The kernel log cannot be read: join group systemd-journal." in text
    monkeypatch.setattr("honed.machine.kernellog.reader.open_reader", lambda **_: Log([ORDINARY]))
    assert "holds no fault of a GPU" in hone("faults", f"--state-dir={tmp_path}")[1]


def test_processes_of_the_service_that_crashed_are_listed(
    hone: Hone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = EndedProcess(
        time=1.7e9,
        pid=4321,
        kind="crashed",
        reason="it was ended by signal SIGFPE",
        engine="ONNX Runtime/CPU",
    )
    service = ServiceProcesses(workers=frozenset({4321}), since=1.6e9, ended=(ended,))
    monkeypatch.setattr("honed.tool.commands.faults.of_service", lambda _: service)
    monkeypatch.setattr("honed.machine.kernellog.reader.open_reader", lambda **_: Log([ORDINARY]))
    (listed,) = document(hone("faults", f"--state-dir={tmp_path}", "--json"))["ended_processes"]
    assert (listed["engine"], listed["pid"], listed["kind"]) == ("ONNX Runtime/CPU", 4321, "crashed")
    text = hone("faults", f"--state-dir={tmp_path}")[1]
    assert "ONNX Runtime/CPU, process 4321: crashed" in text
    assert "it was ended by signal SIGFPE" in text


def test_every_reach_of_a_fault_is_explained() -> None:
    from honed.machine.kernellog.fault import Severity

    assert set(faults.REACH) == set(Severity)


def test_records_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tmp_path / "records.sqlite"
    check_access(records)
    check_access(tmp_path / "absent" / "records.sqlite")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionDenied, match=r"belong to user \w+; run the same command as that user"):
        check_access(records)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_leaves_files_to_the_services_user(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    os.chown(folder, 4711, 4712)
    create_records(folder / "records.sqlite")
    create_records(folder / "records.sqlite")  # it is there already
    with Records.open(folder / "records.sqlite") as records:
        add(records, 1, right(1))
        owners = {(file.name, file.stat().st_uid, file.stat().st_gid) for file in folder.iterdir()}
    assert {name for name, *_ in owners} >= {"records.sqlite", "records.sqlite.lock", "records.sqlite-wal"}
    assert {(uid, gid) for _, uid, gid in owners} == {(4711, 4712)}
    assert stat.S_IMODE((folder / "records.sqlite").stat().st_mode) == 0o600


PAGE_FAULT = Record(
    message="mali fb000000.gpu: Unhandled Page fault in AS1 at VA 0x00007FE0DA65CB80\n"
    "Reason: Memory is not mapped on the GPU\nraw fault status: 0x210002C1\n"
    "exception type 0xC1: TRANSLATION_FAULT at level 1\naccess type 0x2: READ\nsource id 0x2100\n"
    "pid: 1693",
    monotonic_s=100.0,
    realtime_s=1.7e9,
    genuine=True,
    device="fb000000.gpu",
)
ORDINARY = Record(
    message="usb 1-1: new high-speed USB device number 2",
    monotonic_s=101.0,
    realtime_s=1.7e9 + 1,
    genuine=True,
    device=None,
)


class Log:
    """A kernel log that holds these records: reading one really needs a GPU that faults."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = list(records)

    def read(self) -> list[Record]:
        found, self._records = self._records[:1], self._records[1:]
        return found

    def close(self) -> None:
        pass
