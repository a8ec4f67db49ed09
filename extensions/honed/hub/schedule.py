"""When honed-hub pulls and pushes by itself. No I/O, no clock: times are seconds since 1970 and passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from .memory import HubMemory
from .pushing import LASTS
from .settings import HubConfig

_NIGHT: Final = 20 * 3600.0  # between two pushes
_PATIENCE: Final = 4  # times the hours between pulls that a busy machine is waited for
_RETRY, _RETRY_MOST = 300.0, 6 * 3600.0  # after a failure at most, doubled each time
_SPREAD: Final = 0.2  # of the hours between pulls, so that not all machines come at once
_TOGETHER: Final = 1800.0  # within which machines pull that came on at the same moment


class Deed(StrEnum):
    """What is to be done."""

    PULL = "pull"
    PUSH = "push"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """The service as it is now; `trials` are all that tuning has made. It was looked at for `running_s`."""

    models: frozenset[str]
    trials: int
    idle: bool
    tuning: bool
    running_s: float


def due(settings: HubConfig, memory: HubMemory, view: ServiceView, now: float, chance: float) -> Deed | None:
    """What is to be done now; `chance` is a number from 0 to 1 that each machine has for itself."""
    if not settings.url or now < memory.retry_s <= now + _RETRY_MOST:  # beyond: the clock was set back
        return None
    if settings.pull and _pull_due(settings, memory, view, now, chance):
        return Deed.PULL
    if settings.push and _push_due(memory, view, now):
        return Deed.PUSH
    return None


def interval(hours: float, chance: float) -> float:
    """Seconds between two pulls of this machine."""
    return hours * 3600.0 * (1 + _SPREAD * (chance - 0.5))


def apart(hours: float, chance: float) -> float:
    """Seconds that it waits with a pull that was due when it came on, as others may have come on with it."""
    return chance * min(_TOGETHER, hours * 3600.0)


def failed(memory: HubMemory, problem: str, now: float, chance: float) -> None:
    """Leave the hub alone for a while: longer each time, up to six hours, and half to all of that, so that
    machines that found it away together come back one by one.
    """
    wait = min(_RETRY * 2.0 ** min(memory.failures, 20), _RETRY_MOST) * (1 + chance) / 2
    memory.failures, memory.retry_s, memory.problem = memory.failures + 1, now + wait, problem


def done(memory: HubMemory) -> None:
    """It went well."""
    memory.failures, memory.retry_s, memory.problem = 0, 0.0, ""


def _pull_due(settings: HubConfig, memory: HubMemory, view: ServiceView, now: float, chance: float) -> bool:
    if memory.pulled_s is None or now < memory.pulled_s or view.models - set(memory.models):
        return True
    waited, hours = now - memory.pulled_s, interval(settings.hours, chance)
    if waited < hours or view.running_s < apart(settings.hours, chance):
        return False
    return view.idle or waited >= _PATIENCE * hours


def _push_due(memory: HubMemory, view: ServiceView, now: float) -> bool:
    if view.tuning:
        return False  # when it has ended: then there is more to tell
    waited = float("inf") if memory.pushed_s is None or now < memory.pushed_s else now - memory.pushed_s
    if view.trials != memory.trials and waited >= _NIGHT:
        return True
    return memory.pushed_s is not None and waited > LASTS / 2  # or others would find it expired
