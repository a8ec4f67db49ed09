"""Records how long each model ran, and its requested shapes and sizes, as decaying counts in a file.

An amount added t seconds ago counts 2^(-t / h) of its value, with a half-life h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from honed.daemon.core.model import ServedModel
from honed.daemon.settings.schema import setting
from honed.daemon.store.names import Shapes
from honed.protocol import strict
from honed.protocol.service import TimeSpent
from honed.protocol.values import ObservedSizes, ProfiledRow

from .statefile import StateFile, save_at_intervals

MOST = 256  # Maximum shapes or sizes counted for a model; the smallest count is evicted
MAX_AWAY_HALF_LIVES = 10.0  # At 1/1024: after any jump of the clock, the ranking remains

K = TypeVar("K")
V = TypeVar("V")
FORMAT = 1
_DAY = 86_400.0


@dataclass(slots=True)
class DecayedUsage:
    """A decaying amount of seconds, as of the time `at` of the caller's clock."""

    seconds: float = 0.0
    at: float = 0.0

    def value(self, now: float, half_life: float) -> float:
        """Return the seconds after decay; they do not grow if the clock is set back."""
        return self.seconds * decay(now - self.at, half_life)

    def add(self, seconds: float, now: float, half_life: float) -> None:
        """Add seconds that were spent."""
        self.seconds, self.at = self.value(now, half_life) + seconds, max(self.at, now)

    def settle(self, now: float, half_life: float) -> None:
        """Apply the decay up to `now`, after which the half-life may change."""
        self.seconds, self.at = self.value(now, half_life), max(self.at, now)


def decay(elapsed: float, half_life: float) -> float:
    """Return the share that remains after `elapsed` seconds, in (0, 1]."""
    return float(2.0 ** (-max(0.0, elapsed) / half_life))


def away(saved: float, now: float, half_life: float) -> float:
    """Return the seconds of decay to count for a service that saved at `saved` and starts at `now`.

    Both are of the wall clock. Boards without a clock battery start in 1970 or in the past, and are set to
    the right time later: a negative span counts as 0, and a long one as `MAX_AWAY_HALF_LIVES`.
    """
    return min(max(0.0, now - saved), MAX_AWAY_HALF_LIVES * half_life)


def shares(microseconds: dict[str, float]) -> dict[str, float]:
    """Return the share of each task in the time of a profile; empty if the time is 0."""
    whole = sum(microseconds.values())
    return {task: us / whole for task, us in microseconds.items()} if whole > 0 else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeDemand:
    """Requested shapes of a model, and why they could not be compiled, or ""."""

    name: str
    model: str
    shapes: Shapes
    requests: float
    failed: str


@dataclass(slots=True, kw_only=True)
class AskedShapes:
    """Requested shapes of all inputs; `requests` decay.

    `failed` is why they could not be compiled, or ""; `under` are the conditions of that.
    """

    shapes: Shapes
    requests: DecayedUsage = field(default_factory=DecayedUsage)
    failed: str = ""
    under: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSettings:
    """The [usage] table.

    Without `keep_inputs`, versions are compared on inputs that came with the model.
    """

    half_life_days: float = setting("Half-life of the time that models spent", 3.0, unit="days", minimum=0.01)
    save_seconds: float = setting(
        "Interval between two writes to disk. A crash loses no more than this", 60.0, unit="s", minimum=0.1
    )
    keep_inputs: bool = setting(
        "Keep two recent inputs of each model in memory, to compare a faster version on", True
    )

    @property
    def half_life(self) -> float:
        """The half-life in seconds."""
        return self.half_life_days * _DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedShapes:
    shapes: dict[str, tuple[int, ...]]
    requests: float
    failed: str
    under: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedSizes:
    part: int
    sizes: tuple[int, ...]
    requests: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedModel:
    seconds: float
    shares: dict[str, float]
    profiled: str | None  # Missing in files of earlier versions, like the next fields
    asked: dict[str, _SavedShapes] | None = None
    met: tuple[_SavedSizes, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """The contents of the file; amounts are as of `saved`, in seconds since 1970."""

    format: int
    saved: float
    models: dict[str, _SavedModel]


@dataclass(slots=True)
class _Model:
    usage: DecayedUsage = field(default_factory=DecayedUsage)
    shares: dict[str, float] = field(default_factory=dict)  # Shares of its tasks in the last profile
    profiled: str = ""  # The SHA-256 of the compiled file that had that profile
    asked: dict[str, AskedShapes] = field(default_factory=dict)  # Requested shapes by their variant's name
    observed: dict[ObservedSizes, DecayedUsage] = field(default_factory=dict)  # Counts of sizes


class UsageLog:
    """A log of use: seconds by model and task, and requests by shapes and by observed sizes.

    `clock` is monotonic, `wall` counts seconds since 1970.
    """

    def __init__(
        self, path: Path, settings: UsageSettings, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """Initialise from the file; an unreadable file is set aside and logged."""
        self.settings = settings
        self._file = StateFile(path, _Saved, "how much models were used", none_omitted=True)
        self._clock = clock
        self._wall = wall
        self._models: dict[str, _Model] = {}
        self._saved_wall = 0.0
        self._changed = False
        self._read()

    def count_seconds(self, model: str, seconds: float) -> None:
        """Record that a request occupied the device for `seconds`."""
        self._entry(model).usage.add(seconds, self._clock(), self.settings.half_life)

    def count_run(self, runner: ServedModel, infer_ns: float, *, fits: bool) -> None:
        """Record a run of a request, unless another engine stood in for the one that is tuned.

        `fits`: a compiled file accepts the inputs; without one, the CPU engine's runs count.
        """
        if not runner.failover_reason and (fits or runner.compiled is None):
            self.count_seconds(runner.name, infer_ns / 1e9)

    def record_profile(self, model: str, sha256: str, rows: Iterable[ProfiledRow]) -> None:
        """Record each task's share in the time of a version, from a profile."""
        times: dict[str, float] = {}
        for row in rows:
            times[row.task] = times.get(row.task, 0.0) + row.us
        known = self._entry(model)
        known.shares, known.profiled = shares(times), sha256

    def count_requests(self, model: str, variant: str, shapes: Shapes, count: float = 1.0) -> None:
        """Count requests for a model in shapes that are those of `variant`."""
        self._asked(model, variant, shapes).requests.add(count, self._clock(), self.settings.half_life)

    def observe(self, model: str, sizes: Iterable[ObservedSizes]) -> None:
        """Count the sizes of a request that depend on the data; skip a 0, which cannot be compiled."""
        known, now = self._entry(model).observed, self._clock()
        for each in filter(lambda each: all(each.sizes), sizes):
            if each not in known:
                self._make_room(known, lambda usage: usage)
            known.setdefault(each, DecayedUsage()).add(1.0, now, self.settings.half_life)

    def size_counts(self, model: str) -> dict[ObservedSizes, float]:
        """Return the decayed counts of sizes that a model's partitions observed."""
        known, now = self._models.get(model), self._clock()
        counted = known.observed.items() if known is not None else ()
        return {sizes: usage.value(now, self.settings.half_life) for sizes, usage in counted}

    def record_failure(self, model: str, variant: str, shapes: Shapes, reason: str, under: str) -> None:
        """Record that a model could not be compiled for these shapes.

        `under` are the conditions that would have to change.
        """
        asked = self._asked(model, variant, shapes)
        asked.failed, asked.under = reason, under

    def wishes(self, model: str, under: str) -> list[ShapeDemand]:
        """Return the requested shapes of a model.

        A failure counts only if it happened under the same conditions, `under`.
        """
        known = self._models.get(model)
        now, half_life = self._clock(), self.settings.half_life
        return [
            ShapeDemand(
                name=name,
                model=model,
                shapes=each.shapes,
                requests=each.requests.value(now, half_life),
                failed=each.failed if each.under == under else "",
            )
            for name, each in sorted(known.asked.items() if known is not None else ())
        ]

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self._changed = self._models.pop(model, None) is not None or self._changed

    def keep_only(self, models: Iterable[str]) -> None:
        """Drop all models except `models`."""
        for name in set(self._models) - set(models):
            self.forget(name)

    def change(self, settings: UsageSettings) -> None:
        """Apply new settings; present amounts keep their values."""
        now = self._clock()
        for model in self._models.values():
            requests = (each.requests for each in model.asked.values())
            for usage in (model.usage, *requests, *model.observed.values()):
                usage.settle(now, self.settings.half_life)
        self.settings = settings

    def usage(self) -> dict[str, TimeSpent]:
        """Return the usage of each model.

        That is the decayed `seconds`, and `tasks`, the seconds of each of its tuning tasks. Time of copies
        and of CPU partitions is in no task. Without a profile there are no tasks. `record_profile` is the
        SHA-256 of the compiled file that was profiled, or "".
        """
        now, half_life = self._clock(), self.settings.half_life
        spent: dict[str, TimeSpent] = {}
        for name, model in sorted(self._models.items()):
            seconds = model.usage.value(now, half_life)
            tasks = {task: seconds * share for task, share in model.shares.items() if task}
            spent[name] = TimeSpent(seconds=seconds, tasks=tasks, profiled=model.profiled)
        return spent

    async def keep(self) -> None:
        """Save at intervals, and when cancelled."""
        await save_at_intervals(self.save, lambda: self.settings.save_seconds)

    async def save(self) -> None:
        """Write the log if it has changed since the last write."""
        await self._file.save(self._snapshot())

    def _entry(self, model: str) -> _Model:
        """Return a model's entry, created if needed, for the caller to change."""
        self._changed = True
        if (known := self._models.get(model)) is None:
            known = self._models[model] = _Model()
        return known

    def _asked(self, model: str, variant: str, shapes: Shapes) -> AskedShapes:
        """Return a model's entry of requested shapes, created if needed."""
        known = self._entry(model).asked
        if variant not in known:
            self._make_room(known, lambda each: each.requests)
            known[variant] = AskedShapes(shapes=dict(shapes))
        return known[variant]

    def _make_room(self, counted: dict[K, V], usage: Callable[[V], DecayedUsage]) -> None:
        """Evict the entry of the smallest amount if there are MOST."""
        now, half_life = self._clock(), self.settings.half_life
        if len(counted) >= MOST:
            del counted[min(counted, key=lambda key: usage(counted[key]).value(now, half_life))]

    def _snapshot(self) -> _Saved | None:
        if not self._changed:
            return None
        self._changed = False
        now, half_life = self._clock(), self.settings.half_life
        models = {
            name: _SavedModel(
                seconds=model.usage.value(now, half_life),
                shares=dict(model.shares),
                profiled=model.profiled,
                asked={
                    variant: strict.copy_fields(
                        _SavedShapes, each, requests=each.requests.value(now, half_life)
                    )
                    for variant, each in model.asked.items()
                },
                met=tuple(
                    strict.copy_fields(_SavedSizes, observed, requests=usage.value(now, half_life))
                    for observed, usage in model.observed.items()
                ),
            )
            for name, model in sorted(self._models.items())
        }
        self._saved_wall = max(self._saved_wall, self._wall())  # Monotonic: see `away`
        return _Saved(format=FORMAT, saved=self._saved_wall, models=models)

    def _read(self) -> None:
        saved = self._file.read(_check)
        if saved is None:
            return
        left = decay(away(saved.saved, self._wall(), self.settings.half_life), self.settings.half_life)
        self._saved_wall = saved.saved
        now = self._clock()
        for name, model in saved.models.items():
            usage = DecayedUsage(model.seconds * left, now)
            asked = {
                variant: strict.copy_fields(
                    AskedShapes, each, requests=DecayedUsage(each.requests * left, now)
                )
                for variant, each in (model.asked or {}).items()
            }
            observed = {
                strict.copy_fields(ObservedSizes, each): DecayedUsage(each.requests * left, now)
                for each in model.met or ()
            }
            self._models[name] = _Model(usage, dict(model.shares), model.profiled or "", asked, observed)


def _check(saved: _Saved) -> None:
    if saved.format != FORMAT:
        raise ValueError(f"it has format {saved.format} instead of {FORMAT}")
    amounts = [saved.saved, *(model.seconds for model in saved.models.values())]
    amounts += [each.requests for model in saved.models.values() for each in (model.asked or {}).values()]
    amounts += [each.requests for model in saved.models.values() for each in model.met or ()]
    amounts += [share for model in saved.models.values() for share in model.shares.values()]
    if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
        raise ValueError("an amount in it is below zero or not finite")
