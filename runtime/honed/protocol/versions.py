"""The results of the methods for versions of a model, as docs/protocol.md has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class ModelPublished:
    """Of ModelPublish; times in microseconds of one inference."""

    published: bool
    version: int
    sentence: str
    old_us: float | None
    new_us: float | None


@dataclass(slots=True, kw_only=True, eq=False)
class ModelVersion:
    """One compiled file of a model."""

    number: int
    sha256: str
    nbytes: int
    schedules: str
    made: float
    why: str
    old_us: float | None
    new_us: float | None
    settled: bool
    kept: bool
    quarantine: str


@dataclass(slots=True, kw_only=True, eq=False)
class Deployment:
    """When a version was served; `until` is None for the one that is."""

    number: int
    since: float
    until: float | None
    end: str


@dataclass(slots=True, kw_only=True, eq=False)
class LatencyPoint:
    """The median of `count` inferences of one span of time, in microseconds."""

    time: float
    version: int
    count: int
    us: float


@dataclass(slots=True, kw_only=True, eq=False)
class ModelHistory:
    """Of ModelHistory."""

    name: str
    version: int
    pinned: bool
    on_trial: bool
    versions: tuple[ModelVersion, ...]
    stints: tuple[Deployment, ...]
    latency: tuple[LatencyPoint, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class RolledBack:
    """Of ModelRollback."""

    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class Pinned:
    """Of ModelPin."""

    version: int
    pinned: bool
