"""Runs one pass over a model: tunes it under the lease, and publishes faster versions.

Apart from the loop, which imports it with TVM only when there is something to tune.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

from honed.jobs import events
from honed.jobs.commands import Compile
from honed.protocol.errors import AlreadyExists
from honed.protocol.strict import Map
from honed.runtime.calling.files import ExportedFiles
from honed.runtime.calling.leaseclient import LeaseHolder
from honed.runtime.client import Client
from honed.runtime.compiled.model import ScheduleProvenance
from honed.tuner.measure.candidate import LEASED
from honed.tuner.measure.gate import LeaseGate
from honed.tuner.tune.children import Extract, compile_apart
from honed.tuner.tune.session import SearchBudget, SessionResources, on_device
from honed.tuner.tune.task import headroom, headrooms, loss_by_choices

from .choice import PassPlan, TuningHistory, after_pass
from .view import TunerView

# A search that had to wait so long for the lease ends, and gives its memory back.
_PATIENCE_SECONDS = 900.0
# A version is published when the estimate is so much better than at the last one, and not more often.
_WORTH, _LAST, _PUBLISH_SECONDS = 1.05, 1.02, 45.0
_REPORT_SECONDS = 20.0
_log = logging.getLogger(__name__)


class TuningPass:
    """A tuner of one model of the service: every candidate waits for the lease, and gains are published."""

    def __init__(
        self,
        client: Client,
        lease: LeaseHolder,
        view: TunerView,
        plan: PassPlan,
        files: ExportedFiles,
        folder: Path,
    ) -> None:
        """Save the model's files: `files` is the model as the service has it, with its sources.

        `folder` is a scratch folder.
        """
        self._client = client
        self._view = view
        self._device = view.devices[plan.name]
        self._plan = plan
        self._given = files
        self._folder = folder
        self._source = files.save_sources(folder / "source")
        self._existing_build = files.save_compiled(folder / "given.honed")
        self._serving = files.sha256  # The compiled file that a successor is made for
        self._gate = LeaseGate(lease, seconds=plan.seconds, patience=_PATIENCE_SECONDS)
        self._stopping = False
        self._opened: SessionResources | None = None
        self._estimate: float | None = None  # Estimated latency of the version served, in microseconds
        self._published_at = float("-inf")
        self._reported_at = float("-inf")

    def stop(self) -> None:
        """End after the candidate being measured; call this from a signal handler."""
        self._stopping = True
        self._gate.close()

    def run(self, history: TuningHistory) -> TuningHistory:
        """Tune, publish, and return the updated history.

        Raises HonedError where the service or a child fails.
        """
        with (
            self._gate,
            SessionResources(
                self._plan.name,
                partial(on_device, self._device, self._view.cache_dir, limits=LEASED),
                records=self._view.records,
                cache_dir=self._view.cache_dir,
                seed=history.passes,
                emit=self._handle,
                gate=self._gate,
                trust_defaults=True,
                hints=self._view.hints,
            ) as opened,
        ):
            self._opened = opened
            hints = opened.records.latest_hint(self._plan.name)
            session = opened.session
            call = Extract(
                path=self._source,
                shapes=dict(self._given.shapes),
                precision=self._given.precision,
                existing_build=self._existing_build,
            )
            session.run(lambda: opened.search.find_tasks(call), SearchBudget())
            self._publish(least=_LAST)
            if not session.tasks:
                return history
            return after_pass(
                history,
                finished=not (session.stopped or self._stopping),
                headroom=headroom(session.tasks),
                tasks=headrooms(session.tasks),
                hints=hints,
            )

    def _handle(self, event: events.News) -> None:
        """Handle an event of the working session, which waits until this returns."""
        match event:
            case (
                events.Note(text=text)
                | events.SearchCrashed(reason=text)
                | events.CandidateCondemned(reason=text)
            ):
                _log.warning("%s: %s", self._plan.name, text)
            case events.TasksFound() if self._estimate is None:
                # The served version already has the recorded schedules, or default ones.
                kernels = self._client.show(self._plan.name)["kernels"]
                tuned = any(ScheduleProvenance.parse(kernel["schedule"]).tried for kernel in kernels)
                lost = loss_by_choices(event.forms, {kernel["task"] for kernel in kernels})
                self._estimate = event.model.now_us + lost if tuned else event.model.before_us
            case events.Round():
                self._report(event)
                if time.monotonic() - self._published_at >= _PUBLISH_SECONDS:
                    self._publish(least=_WORTH)

    def _report(self, event: events.Round) -> None:
        if time.monotonic() - self._reported_at < _REPORT_SECONDS:
            return
        self._reported_at = time.monotonic()
        before, now = event.model.before_us / 1e3, event.model.now_us / 1e3
        text = (
            f"{self._plan.name}: {event.trials} trials, estimated {now:.3g} ms an inference, "
            f"{before:.3g} ms with default schedules"
        )
        _log.info("%s", text)
        assert self._opened is not None
        self._client.report(f"tuning {text}", self._opened.records.figures())

    def _publish(self, *, least: float) -> None:
        """Have the service take the best version found so far, if its estimate is `least` times better."""
        assert self._opened is not None
        session = self._opened.session
        now = session.table().model.now_us
        better = self._estimate is not None and now and self._estimate >= least * now
        if self._stopping or not (better and session.trials and session.improved):
            return
        self._published_at = time.monotonic()
        self._gate.leave()
        why = f"idle tuning: {session.trials} trials in {self._gate.held:.0f} s"
        answer = self._offer(why)
        if answer is None:
            session.stop()
            return
        self._estimate = now
        _log.info("%s: %s", self._plan.name, answer["sentence"])
        if answer["published"]:
            session.records.add_version(self._plan.name, why, answer["new_us"] * 1e-6)
        with self._client.export(self._plan.name) as served:
            self._serving = served.sha256

    def _offer(self, why: str) -> Map | None:
        """Compile with the schedules found and publish that.

        Return None if the service replaced the model meanwhile.
        """
        tuned = self._folder / "tuned.honed"
        compile_apart(
            Compile(
                file=self._source,
                output=tuned,
                device=self._device,
                precision=self._given.precision,
                shapes=self._given.shapes,
                records=self._view.records,
                existing_build=self._existing_build,
            )
        )
        try:
            return self._client.publish(self._plan.name, tuned, expected=self._serving, why=why)
        except AlreadyExists as error:
            _log.info("%s: %s", self._plan.name, error)
            return None
        finally:
            tuned.unlink(missing_ok=True)
