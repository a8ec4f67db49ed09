"""Records the versions of a model: when each was served, why it was replaced, and which may serve next.

A version is a compiled file; a deployment is a time in which it was served, so one that was gone back to
has two.
No I/O and no clock: times are seconds since 1970 and passed in.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from honed.protocol.errors import AlreadyExists, NotFound
from honed.protocol.results import DeploymentSpan, ModelVersion

KEPT = 3  # Compiled files stored for a model: the one served, and two for a rollback
REMEMBERED = 100  # Versions and deployments that are listed
# A successor must be GAIN times as fast to be accepted; a canary is rolled back above LOSS times the time.
GAIN, LOSS = 1.02, 1.05
# A canary is compared after this many requests, or after this time with at least one.
TRIAL_REQUESTS, TRIAL_SECONDS = 20, 60.0


@dataclass(frozen=True, kw_only=True)  # Cached properties need a __dict__, so there are no slots
class VersionHistory:
    """The history of a model: its versions and deployments."""

    versions: tuple[ModelVersion, ...]
    deployments: tuple[DeploymentSpan, ...] = field(metadata={"wire": "stints"})
    pinned: bool

    @cached_property
    def current(self) -> ModelVersion:
        """The version that is served when the device serves the model; raises NotFound if there is none."""
        return self.get(self.number)

    @cached_property
    def number(self) -> int:
        """The number of the current version; 0 if none was compiled."""
        return self.deployments[-1].number if self.deployments else 0

    @cached_property
    def settled(self) -> bool:
        """Return whether the canary of the current version has ended; True if none was compiled."""
        return not self.deployments or self.current.settled

    @property
    def next_number(self) -> int:
        """The number of the next version."""
        return max((v.number for v in self.versions), default=0) + 1

    def get(self, number: int) -> ModelVersion:
        """Return the version of that number; raise NotFound if there is none."""
        for version in self.versions:
            if version.number == number:
                return version
        raise NotFound(f"there is no version {number}; 'hone history' lists those there are")

    def earlier(self) -> ModelVersion | None:
        """Return the version served last, of those to which the model can be rolled back, or None."""
        served = [span.number for span in self.deployments]
        fit = [
            v for v in self.versions if v.kept and v.settled and not v.quarantine and v.number != self.number
        ]
        return max(fit, key=lambda v: len(served) - served[::-1].index(v.number), default=None)


NO_HISTORY = VersionHistory(versions=(), deployments=(), pinned=False)


def first(version: ModelVersion, now: float) -> VersionHistory:
    """Return the history of a new model."""
    span = DeploymentSpan(number=version.number, since=now, until=None, end="")
    return VersionHistory(versions=(version,), deployments=(span,), pinned=False)


def succeed(history: VersionHistory, version: ModelVersion, now: float, *, keep: bool) -> VersionHistory:
    """Return the history once `version` is served; with `keep` earlier files stay for a rollback."""
    earlier = tuple(v if keep else dataclasses.replace(v, kept=False) for v in history.versions)
    changed = dataclasses.replace(history, versions=(*earlier, version), pinned=history.pinned and keep)
    return _prune(_serve(changed, version.number, f"version {version.number} followed", now))


def go_back(history: VersionHistory, number: int, reason: str, quarantine: str, now: float) -> VersionHistory:
    """Return the history once version `number` is served again.

    The current version ends for `reason`, quarantined if `quarantine` says why.
    """
    changed = _with_current(history, quarantine=quarantine) if quarantine else history
    return _prune(_serve(changed, number, reason, now))


def settle(history: VersionHistory) -> VersionHistory:
    """Return the history with the current version marked as settled: its canary has ended."""
    return _with_current(history, settled=True)


def with_time(history: VersionHistory, us: float) -> VersionHistory:
    """Return the history with the microseconds that a run of the current version takes."""
    return _with_current(history, new_us=us)


def _with_current(history: VersionHistory, **changes: Any) -> VersionHistory:
    """Return the history with changed fields of the current version."""
    number = history.current.number
    versions = tuple(dataclasses.replace(v, **changes) if v.number == number else v for v in history.versions)
    return dataclasses.replace(history, versions=versions)


def check_new(history: VersionHistory, schedules: str) -> None:
    """Raise AlreadyExists if a version with these schedules must not be published."""
    if history.pinned:
        raise AlreadyExists(
            f"version {history.current.number} is pinned, so no other takes its place; "
            "'hone unpin M' allows that again"
        )
    for version in history.versions:
        if version.schedules == schedules and version.quarantine:
            raise AlreadyExists(
                f"these schedules are in quarantine since version {version.number}: {version.quarantine}"
            )
    if history.current.schedules == schedules:
        raise AlreadyExists("these schedules are served already")


def trial_over(served: int, seconds: float) -> bool:
    """Return whether a canary has served long enough to be compared."""
    return served >= TRIAL_REQUESTS or (served > 0 and seconds >= TRIAL_SECONDS)


def _serve(history: VersionHistory, number: int, reason: str, now: float) -> VersionHistory:
    *earlier, last = history.deployments
    spans = (
        *earlier,
        dataclasses.replace(last, until=now, end=reason),
        DeploymentSpan(number=number, since=now, until=None, end=""),
    )
    return dataclasses.replace(history, deployments=spans)


def _prune(history: VersionHistory) -> VersionHistory:
    """Return the history without files beyond KEPT and entries beyond REMEMBERED."""
    wanted = [history.current.number]
    for span in reversed(history.deployments):
        version = history.get(span.number)
        if version.kept and not version.quarantine and version.number not in wanted:
            wanted.append(version.number)
    keep = set(wanted[:KEPT])
    spans = history.deployments[-REMEMBERED:]
    listed = {span.number for span in spans} | keep
    quarantined = [v.number for v in history.versions if v.quarantine][-REMEMBERED:]
    return dataclasses.replace(
        history,
        versions=tuple(
            dataclasses.replace(v, kept=v.kept and v.number in keep)
            for v in history.versions
            if v.number in listed or v.number in quarantined
        ),
        deployments=spans,
    )
