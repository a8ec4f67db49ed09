"""Whose a fault of the GPU was: shown by `hone faults` and `hone status`, and held against nobody else."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable

import pytest

from honed.daemon.observe.faults import (
    CANDIDATE,
    OTHER,
    SERVICE,
    UNKNOWN,
    WHOSE,
    ServiceProcesses,
    ours,
    whose,
)
from honed.jobs.events import Quarantined
from honed.machine.kernellog import Record
from honed.protocol.methods import METRICS, SERVER_STATUS
from honed.protocol.params import MetricsParams, Nothing
from honed.protocol.service import KernelFault
from honed.runtime import Client
from honed.tool.main import main
from tests.daemon.running import Service

OURS = ServiceProcesses(workers=frozenset({11, 12}), since=1000.0)
FAULT = Record(
    message="mali fb000000.gpu: Unhandled Page fault in AS1 at VA 0x00007FE0DA65CB80\n"
    "exception type 0xC1: TRANSLATION_FAULT at level 1\npid: 1693",
    monotonic_s=100.0,
    realtime_s=1.7e9,
    priority=3,
    facility=0,
    device="fb000000.gpu",
    boot_id="0" * 32,
)


def fault(process: int | None, moment: float = 2000.0) -> KernelFault:
    return KernelFault(
        time=moment,
        driver="kbase",
        device=None,
        severity="context",
        code=None,
        meaning="",
        process=process,
        command=None,
        records=("mali: page fault at 0x1",),
    )


def quarantined(story: str | None) -> Quarantined:
    return Quarantined(
        candidate="",
        task="",
        name="",
        outcome=None,
        reason="",
        story=story,
        time=0.0,
        device="",
        driver_version="",
        measured_by="",
    )


@pytest.mark.parametrize(
    ("given", "service", "expected"),
    [
        (fault(12), OURS, SERVICE),
        (fault(13), OURS, OTHER),
        (fault(13, moment=999.0), OURS, UNKNOWN),  # a worker of the service before this one, perhaps
        (fault(None), OURS, UNKNOWN),
        (fault(12), None, UNKNOWN),
    ],
)
def test_whose_it_was(given: KernelFault, service: ServiceProcesses | None, expected: str) -> None:
    assert whose(given, service, []) == expected
    assert whose(given, service, [quarantined(None), quarantined("another")]) == expected
    told = [quarantined("it faulted:\nmali: page fault at 0x1")]
    assert whose(given, service, told) == CANDIDATE


def test_every_attribution_has_words() -> None:
    assert set(WHOSE) == {SERVICE, CANDIDATE, OTHER, UNKNOWN}


class Log:
    """A kernel log that holds these records: reading one really needs a GPU that faults."""

    lost = 0

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def read(self) -> list[Record]:
        found, self._records = self._records, []
        return found

    def close(self) -> None:
        pass


@pytest.mark.service
@pytest.mark.opencl
def test_faults_of_others_are_shown_and_not_blamed(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(service.socket))
    monkeypatch.setenv("COLUMNS", "200")
    worker = client.status()["worker"]["pid"]

    def record(process: int, moment: float) -> Record:
        message = FAULT.message.replace("1693", str(process))
        return dataclasses.replace(FAULT, message=message, realtime_s=time.time(), monotonic_s=moment)

    def log(**_: object) -> Log:
        return Log([record(worker, 100.0), record(4_000_001, 200.0)])

    monkeypatch.setattr("honed.machine.kernellog.open_reader", log)
    run: Callable[..., str] = lambda *words: (main(words), capsys.readouterr().out)[1]  # noqa: E731
    here = ("--state-dir", str(service.state))  # the log is read by the tool, not by the service
    listed = json.loads(run("faults", "--json", *here))["kernel_log"]["faults"]
    assert [(each["process"], each["whose"]) for each in listed] == [(worker, SERVICE), (4_000_001, OTHER)]
    text = run("faults", *here)
    assert f"process {worker}: a worker of the service" in text
    assert "process 4000001: another process, none of the service" in text
    text = run("status")
    assert "2 in the kernel log since the machine started, 1 of a worker of this service" in text
    assert client.status()["worker"]["restarts"] == 0
    metrics, status = client.ask(METRICS, MetricsParams()), client.ask(SERVER_STATUS, Nothing())
    assert ours(metrics, status).workers == {worker}
