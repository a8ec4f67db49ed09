"""What the service says of its tuner: no more than it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from honed.daemon.transport.connection import Connection
from honed.daemon.tuning.process import TunerChild, TunerSettings
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import Gain, HintFigures, TunerReportParams, TuningFigures


class Peer:
    """In the place of a connection of process 7."""

    pid = 7

    def __init__(self, number: int) -> None:
        self.number, self.peer = number, self
        self.close: Callable[[], None] = lambda: None

    def when_closed(self, call: Callable[[], None]) -> None:
        self.close = call


def connection(number: int) -> tuple[Connection, Peer]:
    peer = Peer(number)
    return cast(Connection, peer), peer


def said(tuner: TunerChild) -> tuple[int, str]:
    status = tuner.status()
    return status.pid, status.text


def test_nothing_is_claimed_of_a_tuner_that_others_start(tmp_path: Path) -> None:
    tuner = TunerChild(TunerSettings(spawn=False), tmp_path / "s")
    assert said(tuner) == (0, "none is started here (tuner.spawn is false), and none has reported yet")


def test_a_report_counts_while_its_connection_lasts_and_is_dated_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("honed.daemon.tuning.process.time.monotonic", lambda: now)
    tuner = TunerChild(TunerSettings(spawn=False), tmp_path / "s")
    first, peer = connection(1)
    tuner.report(first, TunerReportParams(text="tuning m"))
    tuner.report(first, TunerReportParams(text="nothing is left to tune"))
    assert said(tuner) == (7, "nothing is left to tune")
    peer.close()
    now += 12
    assert said(tuner) == (0, "said 12 s ago: nothing is left to tune")
    tuner.report(connection(2)[0], TunerReportParams(text="tuning m again"))
    assert said(tuner)[1] == "tuning m again"


def test_figures_outlast_the_connection_that_told_them(tmp_path: Path) -> None:
    tuner = TunerChild(TunerSettings(spawn=False), tmp_path / "s")
    first, peer = connection(1)
    figures = TuningFigures(
        trials={"right": 3}, faults=1, gains={"m": Gain(before_seconds=0.9, now_seconds=0.3)}
    )
    tuner.report(first, TunerReportParams(text="tuning m", tuning=figures))
    tuner.report(first, TunerReportParams(text="nothing is left to tune"))
    peer.close()
    assert tuner.figures == figures


def test_figures_alone_are_no_tuner(tmp_path: Path) -> None:
    tuner = TunerChild(TunerSettings(spawn=False), tmp_path / "s")
    tuner.report(connection(1)[0], TunerReportParams(tuning=TuningFigures(trials={}, faults=0, gains={})))
    assert said(tuner)[1].startswith("none is started here")
    assert tuner.figures is not None


@pytest.mark.parametrize(
    "wrong",
    [
        TuningFigures(trials={"right": -1}, faults=0, gains={}),
        TuningFigures(trials={}, faults=-1, gains={}),
        TuningFigures(
            trials={},
            faults=0,
            gains={},
            hints={"attic": HintFigures(taken=-1, tried=0, failed=0, aside=False)},
        ),
        TuningFigures(trials={}, faults=0, gains={"m": Gain(before_seconds=1.0, now_seconds=float("nan"))}),
    ],
)
def test_figures_that_cannot_be_are_refused(tmp_path: Path, wrong: TuningFigures) -> None:
    tuner = TunerChild(TunerSettings(spawn=False), tmp_path / "s")
    with pytest.raises(InvalidArgument, match="cannot be"):
        tuner.report(connection(1)[0], TunerReportParams(tuning=wrong))
    assert tuner.figures is None


@pytest.mark.service
def test_a_process_that_has_not_reported_is_not_called_running(tmp_path: Path) -> None:
    async def go() -> tuple[int, str]:
        tuner = TunerChild(TunerSettings(memory_mib=0), tmp_path / "nobody-listens")
        running = asyncio.ensure_future(tuner.run())
        try:
            while not tuner.status().pid and not running.done():
                await asyncio.sleep(0.01)
            return said(tuner)
        finally:
            running.cancel()
            await asyncio.wait([running])

    told = asyncio.run(go())
    pid, text = told
    assert pid > 0
    assert text == "started, has not reported yet"


def test_the_daemon_opens_no_records() -> None:
    """They are the tuner's: results of tuning are reported, and jobs on records run in children."""
    daemon = Path(__file__).parents[3] / "daemon"
    assert [path for path in daemon.rglob("*.py") if "sqlite3" in path.read_text()] == []
