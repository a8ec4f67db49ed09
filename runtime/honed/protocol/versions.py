"""The results of the methods for versions of a model, as docs/protocol.md has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class ModelPublished:
    """The result of ModelPublish; times in microseconds of one inference."""

    published: bool
    version: int
    sentence: str
    old_us: float | None
    new_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """One compiled file of a model.

    `schedules` tells its kernels apart from those of other versions. `old_us` and `new_us` are lower
    quartiles in microseconds of the version before and of this one, side by side in the serving worker when
    this one came; None where they were not compared. `quarantine` says why it is not served again, or "".
    `brought` are the measured schedules that the version before did not have, each as its task and the first
    12 digits of its trace's SHA-256, with a space between.
    """

    number: int
    sha256: str
    nbytes: int
    schedules: str
    made: float
    why: str
    old_us: float | None
    new_us: float | None
    settled: bool  # it served cleanly, or was put there by hand
    kept: bool  # its file is still there
    quarantine: str
    brought: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpan:
    """When a version was served; `until` is None for the one that is, and `end` says why it went."""

    number: int
    since: float
    until: float | None
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPoint:
    """The median of `count` inferences of one span of time, in microseconds.

    `time` is that of the first of them, in seconds since 1970.
    """

    time: float
    version: int
    count: int
    us: float


@dataclass(slots=True, kw_only=True, eq=False)
class ModelHistory:
    """The result of ModelHistory."""

    name: str
    version: int
    pinned: bool
    on_trial: bool
    versions: tuple[ModelVersion, ...]
    stints: tuple[DeploymentSpan, ...]
    latency: tuple[LatencyPoint, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class RolledBack:
    """The result of ModelRollback."""

    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class VersionPinned:
    """The result of ModelPin; `engine` is the one pinned, or ""."""

    version: int
    pinned: bool
    engine: str = ""
