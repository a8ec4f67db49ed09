"""The serving state machine: events in, actions out. It alone changes a model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import changes, choices, events, failover, loads, requesting, trials
from .actions import Action
from .events import Event
from .shared import Core


class Machine(Core):
    """Which engine serves which version of which model, and which request runs next."""

    def cpu_for(self, owner: int | None) -> str | None:
        """The CPU engine for the own models of a user, None: of administrators; None where it is missing."""
        engine = self.cpu_of(owner)
        return engine.name if engine is not None else None

    def limit_queues(self, max_queue: int) -> None:
        """So many requests may wait from now on; what waits already keeps waiting."""
        self.max_queue = max_queue
        for engine in self.engines.values():
            engine.queue.limit = max_queue

    def handle(self, event: Event, now: float, wall: float) -> list[Action]:
        """What is to be done about an event, at `now` of a monotonic clock, `wall` seconds since 1970.

        An event that is refused raises a HonedError and changes nothing.
        """
        self.now, self.wall = now, wall
        _HANDLERS[type(event)](self, event)
        return self.taken()


_HANDLERS: dict[type[Event], Callable[[Core, Any], None]] = {
    events.Asked: requesting.asked,
    events.Left: requesting.left,
    events.ClientGone: requesting.client_gone,
    events.Served: requesting.served,
    events.Broken: requesting.broken,
    events.Unfit: requesting.unfit,
    events.NotRun: requesting.not_run,
    events.Stopping: requesting.stopping,
    events.WorkerReady: choices.worker_ready,
    events.WorkerLost: failover.worker_lost,
    events.ServerStopped: failover.server_stopped,
    events.Loaded: loads.loaded,
    events.LoadRefused: loads.refused,
    events.LoadBroken: loads.broken,
    events.Proven: loads.proven,
    events.Disproved: loads.disproved,
    events.Kept: loads.kept,
    events.LetGo: loads.let_go,
    events.Added: changes.added,
    events.Damaged: changes.damaged,
    events.NotRestored: changes.not_restored,
    events.Removed: changes.gone,
    events.Rested: changes.rested,
    events.Explained: changes.explained,
    events.SettingsChanged: changes.settings_changed,
    events.EngineChosen: choices.chosen,
    events.OptimisationChecked: choices.optimisation_checked,
    events.NotCompared: choices.not_compared,
    events.InferenceTimed: choices.timed,
    events.Passed: failover.passed,
    events.SuccessorReady: trials.successor_ready,
    events.VersionChosen: trials.version_chosen,
    events.TurnedAway: trials.turned_away,
    events.Pinned: trials.pinned,
    events.Judged: trials.judged,
    events.JudgingBroken: trials.judging_broken,
    events.Inspected: trials.inspected,
}
