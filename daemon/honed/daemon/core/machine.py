"""Provides the serving state machine: events in, actions out. Only it changes a model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import engines, messages, models, requests, versions
from .messages import Action, Event
from .state import Core


class Machine(Core):
    """A state machine that decides which engine serves which version, and which request runs next."""

    def limit_queues(self, max_queue: int) -> None:
        """Limit the requests that may wait on each engine; those that already wait stay."""
        self.max_queue = max_queue
        for engine in self.engines.values():
            engine.queue.limit = max_queue

    def handle(self, event: Event, now: float, wall: float) -> list[Action]:
        """Handle an event and return the actions to perform.

        `now` is in monotonic seconds, `wall` in seconds since 1970. A refused event raises a HonedError and
        changes nothing.
        """
        self.now, self.wall = now, wall
        _HANDLERS[type(event)](self, event)
        return self.drain_actions()


_HANDLERS: dict[type[Event], Callable[[Core, Any], None]] = {
    messages.RequestArrived: requests.request_arrived,
    messages.ClientGaveUp: requests.client_gave_up,
    messages.ClientGone: requests.client_gone,
    messages.RunLasts: requests.lasts,
    messages.RunSucceeded: requests.run_succeeded,
    messages.WorkerFailed: requests.worker_failed,
    messages.RequestRejected: requests.request_rejected,
    messages.Stopping: requests.stopping,
    messages.WorkerReady: engines.worker_ready,
    messages.WorkerLost: requests.worker_lost,
    messages.ServerStopped: engines.server_stopped,
    messages.Loaded: models.model_loaded,
    messages.LoadRefused: models.load_refused,
    messages.LoadCrashed: models.load_crashed,
    messages.ProbePassed: models.probe_passed,
    messages.ProbeFailed: models.probe_failed,
    messages.FileRetained: models.file_retained,
    messages.FileReleased: models.file_released,
    messages.Added: models.model_added,
    messages.Damaged: models.model_damaged,
    messages.NotRestored: models.not_restored,
    messages.Removed: models.model_removed,
    messages.SuspendRequested: models.suspend_requested,
    messages.ManifestChanged: models.manifest_changed,
    messages.EngineChosen: engines.engine_chosen,
    messages.OptimisationChecked: engines.optimisation_checked,
    messages.EnginesNotCompared: engines.engines_not_compared,
    messages.InferenceTimed: engines.inference_timed,
    messages.Tick: engines.tick,
    messages.SuccessorReady: versions.successor_ready,
    messages.VersionChosen: versions.version_chosen,
    messages.CanaryCompared: versions.canary_compared,
    messages.CanaryComparisonCrashed: versions.canary_comparison_crashed,
    messages.Inspected: versions.version_inspected,
}
