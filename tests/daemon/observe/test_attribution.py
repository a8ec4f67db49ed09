"""Whose a fault of the GPU was: shown by `hone faults` and `hone status`, and held against nobody else."""

from __future__ import annotations

import pytest

from honed.daemon.observe.faults import (
    CANDIDATE,
    OTHER,
    SERVICE,
    UNKNOWN,
    WHOSE,
    ServiceProcesses,
    whose,
)
from honed.jobs.events import Quarantined
from honed.machine.kernellog.reader import Record
from honed.protocol.service import KernelFault

OURS = ServiceProcesses(workers=frozenset({11, 12}), since=1000.0)
FAULT = Record(
    message="mali fb000000.gpu: Unhandled Page fault in AS1 at VA 0x00007FE0DA65CB80\n"
    "exception type 0xC1: TRANSLATION_FAULT at level 1\npid: 1693",
    monotonic_s=100.0,
    realtime_s=1.7e9,
    genuine=True,
    device="fb000000.gpu",
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

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def read(self) -> list[Record]:
        found, self._records = self._records, []
        return found

    def close(self) -> None:
        pass
