"""What each user's own models may take: the bounds, which go for another, whose is compiled next. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from honed.daemon.observe.statefile import SAVE_SECONDS, StateFile, save_at_intervals
from honed.daemon.settings.schema import setting
from honed.protocol.errors import ResourceExhausted

IN_USE_SECONDS = 60.0  # since the last request for a model, which is then not removed for another
DAY = 86_400.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AppsSettings:
    """The [apps] table: whether members of the group honed may bring models of their own, and how many.

    enabled: false: none are taken; those there are stay.
    max_users: users who have models of their own at the same time.
    max_models: models of one user.
    disk_mib: what the files of one user's models may take, MiB.
    memory_mib: what the CPU engine of one user, and the process that tries models out for it, may each write,
        MiB; and what one user's models that are kept may take of memory, by the size of their files.
    compile_seconds: compiling one user's models within a day.
    """

    enabled: bool = setting(True)
    max_users: int = setting(16)
    max_models: int = setting(128)
    disk_mib: int = setting(4096, unit="MiB")
    memory_mib: int = setting(2048, unit="MiB", minimum=256, effect="restart")
    compile_seconds: float = setting(1800.0, unit="s", minimum=0)

    @property
    def disk_bytes(self) -> int:
        """disk_mib in bytes."""
        return self.disk_mib * _MIB

    @property
    def all_mib(self) -> int:
        """Memory of all users' processes, MiB: for each an engine, and one that tries models out."""
        return 2 * self.max_users * self.memory_mib

    @property
    def memory_bytes(self) -> int:
        """memory_mib in bytes."""
        return self.memory_mib * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A model that a user has. `nbytes` are its files on disk, `memory` what it takes of that; in bytes.

    `used` is when it was brought or asked for last, in seconds since 1970.
    """

    name: str
    user: int
    nbytes: int
    memory: int
    used: float


@dataclass(slots=True, kw_only=True)
class CompileUsage:
    """Seconds of compiling since the day began."""

    seconds: float
    since: float  # seconds since 1970


@dataclass(slots=True, kw_only=True)
class Shares:
    """What users have done with their shares, as it is stored: all that manifests do not tell.

    `used` is by model, `spent` by user (uid as text). Times are in seconds since 1970.
    """

    used: dict[str, float] = field(default_factory=dict)
    spent: dict[str, CompileUsage] = field(default_factory=dict)

    def use(self, name: str, now: float) -> None:
        """A model was brought, or asked for."""
        self.used[name] = now

    def keep_only(self, names: Iterable[str], now: float) -> None:
        """Forget models that are no more, and days that are over."""
        known = set(names)
        self.used = {name: at for name, at in self.used.items() if name in known}
        self.spent = {user: spent for user, spent in self.spent.items() if 0 <= now - spent.since < DAY}

    def compiled(self, user: int, seconds: float, now: float) -> None:
        """So much time went into compiling a user's model."""
        spent = self.spent.get(str(user))
        if spent is None or not 0 <= now - spent.since < DAY:
            spent = self.spent[str(user)] = CompileUsage(seconds=0.0, since=now)
        spent.seconds += seconds

    def seconds_spent(self, user: int, now: float) -> float:
        """What went into compiling a user's models today."""
        spent = self.spent.get(str(user))
        return spent.seconds if spent is not None and 0 <= now - spent.since < DAY else 0.0

    def seconds_left(self, user: int, settings: AppsSettings, now: float) -> float:
        """What is left of a user's day of compiling, at least 0."""
        return max(0.0, settings.compile_seconds - self.seconds_spent(user, now))


def going(new: OwnModel, kept: Sequence[OwnModel], settings: AppsSettings) -> tuple[str, ...]:
    """The models that go so that there is room for a new one, which was `used` now: first the first to go.

    `kept` are those of all users. They are the user's own, the longest unused first, and none in use. Raises
    ResourceExhausted, naming the quota, where that is not enough.
    """
    if new.nbytes > settings.disk_bytes or new.memory > settings.memory_bytes:
        setting = "disk_mib" if new.nbytes > settings.disk_bytes else "memory_mib"
        raise ResourceExhausted(
            f"the model takes {-(-new.nbytes >> 20)} MiB, which is more than a user's models may; "
            f"raise apps.{setting} in the configuration"
        )
    own = sorted((model for model in kept if model.user == new.user), key=lambda model: model.used)
    others = {model.user for model in kept} - {new.user}
    if not own and len(others) >= settings.max_users:
        raise ResourceExhausted(
            f"{settings.max_users} users have models of their own already; raise apps.max_users in the "
            "configuration"
        )
    left = list(own)
    gone: list[str] = []
    while quota := _exceeded([*left, new], settings):
        if not left or new.used - left[0].used < IN_USE_SECONDS:
            raise ResourceExhausted(
                f"your models take all that apps.{quota} allows, and those that are left were used within "
                "the last minute; remove one, or try again later"
            )
        gone.append(left.pop(0).name)
    return tuple(gone)


def _exceeded(models: Sequence[OwnModel], settings: AppsSettings) -> str:
    """The quota that one user's models are beyond; "" for none."""
    if len(models) > settings.max_models:
        return "max_models"
    if sum(model.nbytes for model in models) > settings.disk_bytes:
        return "disk_mib"
    if sum(model.memory for model in models) > settings.memory_bytes:
        return "memory_mib"
    return ""


def next_user(waiting: Mapping[int, float], shares: Shares, settings: AppsSettings, now: float) -> int | None:
    """Whose model is compiled next: the user who had least of it today, then who waits the longest.

    `waiting` is since when each user waits, in seconds since 1970. None where nobody has time left.
    """
    may = [user for user in waiting if shares.seconds_left(user, settings, now) > 0]
    return min(may, key=lambda user: (shares.seconds_spent(user, now), waiting[user], user), default=None)


# ---- Keeps what users did with their shares in a file, so that it outlasts the service ----


class SharesFile:
    """The shares of one service."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, Shares, "what apps used")
        self.shares = self._file.read() or Shares()

    async def keep(self) -> None:
        """Save at intervals, and when cancelled."""
        await save_at_intervals(lambda: self._file.save(self.shares), lambda: SAVE_SECONDS)
