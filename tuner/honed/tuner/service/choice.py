"""Chooses the model to tune next, and for how long, and the versions to profile first. No I/O, no clocks.

A model that is new gets a short first pass before any other is tuned further. After that the time goes where
most can be won: seconds really spent in served requests (decayed by the service), kernel by kernel, times the
share of each above its roofline. Models that were never used come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from honed.protocol.results import LatencyPoint
from honed.protocol.service import TimeSpent

FIRST_PASS_SECONDS = 120.0
SLICE_SECONDS = 600.0
# Assumed for a model whose tasks were never timed.
_UNKNOWN_HEADROOM = 0.9
# Seconds before a model is tried again after a failure: doubled each time, up to a day.
_RETRY_SECONDS, _RETRY_MOST = 300.0, 86_400.0
# Longest inference of a model that is profiled: a request that arrives meanwhile waits for the two runs.
LONGEST_SECONDS = 1.0
PROFILE_SECONDS = 5.0  # Limit of a profile, including the wait for earlier requests


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningHistory:
    """A model's record of tuning under its `key`, as `setup.tuning_key` returns it."""

    key: str
    passes: int = 0  # Number of passes that gave a result
    headroom: float = _UNKNOWN_HEADROOM  # Share of its time above the rooflines of its tasks, 0 to 1
    tasks: dict[str, float] | None = None  # Headroom of each task; None where they were never timed
    finished: bool = False  # True: nothing worth tuning is left
    failures: int = 0  # Failures in a row
    retry: float = 0.0  # Time of the next attempt in seconds since 1970
    reason: str = ""  # Reason of the last failure
    hints: int = 0  # Records.latest_hint at the start of the last pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningCandidate:
    """A model of the service; an `obstacle` forbids tuning it.

    `seconds` were spent on it in requests, and `tasks` says on which of its tasks; it is empty where that is
    not known.
    """

    name: str
    seconds: float
    obstacle: str
    history: TuningHistory
    tasks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unprofiled:
    """A version that the service is asked to profile, so that its use is known kernel by kernel."""

    model: str
    sha256: str  # SHA-256 of the compiled file


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """A decision to tune one model for `seconds` while the lease is held."""

    name: str
    seconds: float


def choose(models: Sequence[TuningCandidate], now: float) -> PassPlan | None:
    """Choose what to tune next; None where nothing is worth it. `now` is in seconds since 1970."""
    ready = [m for m in models if not m.obstacle and not m.history.finished and m.history.retry <= now]
    if not ready:
        return None
    new = [m for m in ready if not m.history.passes]
    seconds = FIRST_PASS_SECONDS if new else SLICE_SECONDS
    return PassPlan(name=max(new or ready, key=_use).name, seconds=seconds)


def after_failure(history: TuningHistory, reason: str, now: float) -> TuningHistory:
    """Return the history after a model could not be tuned: it is not retried for a while."""
    delay = min(_RETRY_SECONDS * 2.0 ** min(history.failures, 20), _RETRY_MOST)
    return replace(history, failures=history.failures + 1, retry=now + delay, reason=reason)


def after_pass(
    history: TuningHistory,
    *,
    finished: bool,
    headroom: float,
    tasks: Mapping[str, float] | None = None,
    hints: int = 0,
) -> TuningHistory:
    """Return the history after a pass has ended.

    `finished` says that nothing worth tuning is left. `hints` is what `Records.latest_hint` returned when the
    pass began.
    """
    return TuningHistory(
        key=history.key,
        passes=history.passes + 1,
        headroom=_share(headroom),
        tasks=None if tasks is None else {task: _share(share) for task, share in tasks.items()},
        finished=finished,
        hints=hints,
    )


def after_hints(history: TuningHistory, hints: int) -> TuningHistory:
    """Return the model as not finished where a hub may have added hints since, else unchanged."""
    return replace(history, finished=False, hints=hints) if hints > history.hints else history


def worth_profiling(version: Unprofiled, spent: TimeSpent, latency: Sequence[LatencyPoint]) -> bool:
    """Return whether a model's present version is used, not profiled yet, and fast enough to profile."""
    if not spent.seconds or spent.profiled == version.sha256:
        return False
    # The last point may be of the version before, which was slower if anything.
    return bool(latency) and latency[-1].us <= LONGEST_SECONDS * 1e6


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _use(model: TuningCandidate) -> tuple[float, float]:
    """Return a model's rank by what can be won; a model that was never used ranks by its headroom alone."""
    known = model.history
    if not model.tasks or known.tasks is None:
        return model.seconds * known.headroom, known.headroom
    # Time in no task (copies, host calls) cannot be won.
    won = sum(spent * known.tasks.get(task, known.headroom) for task, spent in model.tasks.items())
    return won, known.headroom
