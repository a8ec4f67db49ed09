"""Runs the tuner as a child of the service, if nothing else starts it (systemd has honed-tuner.service)."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from honed.daemon.settings import places
from honed.daemon.settings.schema import setting
from honed.process.aio import Child, RestartPolicy, spawn
from honed.process.children import ExitInfo, ResourceLimits, kill_group, python
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import TunerReportParams, TuningFigures
from honed.protocol.service import TunerStatus

if TYPE_CHECKING:
    from honed.daemon.transport.connection import Connection

_NICENESS = 19
_LEAST_DELAY_SECONDS = 1.0  # Minimum delay before a restart
_STOP_SECONDS = 5.0
_TEXT = 300  # Letters of a report
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """The [tuner] table, of the tuner that the service starts."""

    spawn: bool = setting(
        "Whether the service starts a tuner. false where honed-tuner.service does", True, effect="restart"
    )
    memory_mib: int = setting(
        "Memory of each process of this tuner. 0: no limit",
        share=lambda its: its.tuner,
        unit="MiB",
        minimum=0,
        effect="restart",
    )


class TunerChild:
    """A keeper of a tuner process, and of the reports of all tuners."""

    def __init__(self, settings: TunerSettings, socket: Path) -> None:
        self._settings = settings
        self._socket = socket
        self._process: Child | None = None
        self._reports: dict[int, tuple[int, str]] = {}  # Process id and report by connection
        self._last: tuple[float, str] | None = None  # The report of a connection that ended, and when
        self.figures: TuningFigures | None = None  # The last figures reported
        self._text = "none is started here (tuner.spawn is false), and none has reported yet"

    def status(self) -> TunerStatus:
        """Return the field `tuner` of ServerStatus.

        It has a tuner's present report, else its last one, else the state of its process.
        """
        for pid, text in self._reports.values():
            return TunerStatus(pid=pid, text=text)
        text = self._text
        if self._last is not None and (self._process or not self._settings.spawn):
            ended, said = self._last
            text = f"said {time.monotonic() - ended:.0f} s ago: {said}"
        return TunerStatus(pid=self._process.pid if self._process else 0, text=text)

    def report(self, connection: Connection, params: TunerReportParams) -> None:
        """Record a tuner's report, until its connection ends, and its figures.

        Raises InvalidArgument for impossible figures.
        """
        if params.tuning is not None:
            self.keep(params.tuning)
        if params.text:
            number = connection.number
            if number not in self._reports:
                connection.when_closed(lambda: self._forget(number))
            self._reports[number] = (connection.peer.pid, params.text[:_TEXT])

    def keep(self, figures: TuningFigures) -> None:
        """Record the figures of tuning; raise InvalidArgument for impossible ones."""
        seconds = [
            each for gain in figures.gains.values() for each in (gain.before_seconds, gain.now_seconds)
        ]
        counts = [n for each in figures.hints.values() for n in (each.taken, each.tried, each.failed)]
        for figure in (*figures.trials.values(), figures.faults, *seconds, *counts):
            if not (math.isfinite(figure) and figure >= 0):
                raise InvalidArgument(f"figures of tuning cannot be {figure}; give what the records have")
        self.figures = figures

    def _forget(self, number: int) -> None:
        self._last = time.monotonic(), self._reports.pop(number)[1]

    async def run(self) -> None:
        """Run tuners until cancelled; the tuner is gone when this returns."""
        if not self._settings.spawn:
            await asyncio.Event().wait()
        if not places.compiler():
            self._text = "the tuner is not installed; install honed-tuner (apt install honed-tuner)"
            _log.info("models are not tuned: %s", self._text)
            await asyncio.Event().wait()
        restarts = RestartPolicy(_LEAST_DELAY_SECONDS)
        while True:
            begun = time.monotonic()
            try:
                reason = str(await self._live_once())
            except OSError as error:
                reason = f"it cannot be started: {error}"
            delay = restarts.delay_after(lived=time.monotonic() - begun)
            self._text = f"it is started anew in {delay:.0f} s: {reason}"
            _log.warning("the tuner ended: %s; next start in %.0f s", reason, delay)
            await asyncio.sleep(delay)

    async def _live_once(self) -> ExitInfo:
        program = python("honed.tuner.service", f"--socket={self._socket}")
        bounds = ResourceLimits(memory_mib=self._settings.memory_mib, niceness=_NICENESS)
        process = self._process = await spawn(program, bounds)
        self._text, self._last = "started, has not reported yet", None
        try:
            return await process.wait()
        finally:
            await self._end(process)

    async def _end(self, process: Child) -> None:
        """Stop a tuner: ask it, which takes up to a candidate's time, then kill it."""
        self._process = None
        if process.running:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                pass
        kill_group(process.pid)
        await process.wait()
