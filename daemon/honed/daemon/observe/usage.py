"""How long each model ran, in which shapes and sizes it was asked for: counts that decay, kept in a file.

What was added t seconds ago counts 2^(-t / h) of what it was, by a half-life h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from honed.daemon.settings.schema import setting
from honed.daemon.store.names import Shapes
from honed.protocol import strict
from honed.protocol.results import ObservedSizes, ProfiledRow
from honed.protocol.service import TimeSpent

from .statefile import StateFile, save_at_intervals

MOST = 256  # Things of one model that are counted: the one that counts least goes
MAX_AWAY_HALF_LIVES = 10.0  # 1/1024: whatever the clock says, what was known still ranks

K = TypeVar("K")
V = TypeVar("V")
FORMAT = 1
_DAY = 86_400.0


@dataclass(slots=True)
class DecayedUsage:
    """A decaying amount of seconds, as it was at the moment `at` of a clock that the caller reads."""

    seconds: float = 0.0
    at: float = 0.0

    def value(self, now: float, half_life: float) -> float:
        """Return the seconds that are left after decay; a clock that went back does not make them grow."""
        return self.seconds * decay(now - self.at, half_life)

    def add(self, seconds: float, now: float, half_life: float) -> None:
        """Add seconds that were spent."""
        self.settle(now, half_life)
        self.seconds += seconds

    def settle(self, now: float, half_life: float) -> None:
        """Let it decay up to `now`; from here on another half-life may hold."""
        self.seconds, self.at = self.value(now, half_life), max(self.at, now)


def decay(elapsed: float, half_life: float) -> float:
    """Return the share left after `elapsed` seconds, in (0, 1]."""
    return float(2.0 ** (-max(0.0, elapsed) / half_life))


def away(saved: float, now: float, half_life: float) -> float:
    """Return the seconds of decay to count for a service that saved at `saved` and starts at `now`.

    Both are of the wall clock. Boards without a battery for their clock start in 1970 or in the past, and
    leap to the right time later: a span below zero counts as none, and a long one as `MAX_AWAY_HALF_LIVES`.
    """
    return min(max(0.0, now - saved), MAX_AWAY_HALF_LIVES * half_life)


def shares(microseconds: dict[str, float]) -> dict[str, float]:
    """Return the share of each task in the time of a profile; empty where nothing took time."""
    whole = sum(microseconds.values())
    return {task: us / whole for task, us in microseconds.items()} if whole > 0 else {}


def make_room(counted: dict[K, V], amount: Callable[[V], float]) -> None:
    """Have room for one more: where there are MOST, the one of the smallest amount goes."""
    if len(counted) >= MOST:
        del counted[min(counted, key=lambda key: amount(counted[key]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeDemand:
    """Shapes that a model is asked for, and why they cannot be compiled, or ""."""

    name: str
    model: str
    shapes: Shapes
    requests: float
    failed: str


@dataclass(slots=True, kw_only=True)
class AskedShapes:
    """Shapes of all inputs; `requests` decay.

    `failed` is why they could not be compiled, under what `under` says, or "".
    """

    shapes: Shapes
    requests: DecayedUsage = field(default_factory=DecayedUsage)
    failed: str = ""
    under: str = ""


class ShapeRequests:
    """What one model is asked for, by the name of the variant that it would be."""

    def __init__(self, known: Mapping[str, AskedShapes] | None = None) -> None:
        self.known = dict(known or {})

    def ask(self, name: str, shapes: Shapes, count: float, now: float, half_life: float) -> None:
        """Count requests."""
        self._get(name, shapes, now, half_life).requests.add(count, now, half_life)

    def fail(self, name: str, shapes: Shapes, reason: str, under: str, now: float, half_life: float) -> None:
        """Remember that they could not be compiled, and with what."""
        found = self._get(name, shapes, now, half_life)
        found.failed, found.under = reason, under

    def settle(self, now: float, half_life: float) -> None:
        """Let every count decay up to `now`; from here on another half-life may hold."""
        for each in self.known.values():
            each.requests.settle(now, half_life)

    def _get(self, name: str, shapes: Shapes, now: float, half_life: float) -> AskedShapes:
        found = self.known.get(name)
        if found is None:
            make_room(self.known, lambda each: each.requests.value(now, half_life))
            found = self.known[name] = AskedShapes(shapes=dict(shapes))
        return found


class SizeCounts:
    """What one model's parts were met in. Counts decay."""

    def __init__(self, known: Mapping[ObservedSizes, DecayedUsage] | None = None) -> None:
        self.known = dict(known or {})

    def add(self, sizes: Iterable[ObservedSizes], now: float, half_life: float) -> None:
        """Count those of a request; what no form can be for, as nothing at all, is passed over."""
        for observed in sizes:
            if not all(observed.sizes):
                continue
            if observed not in self.known:
                make_room(self.known, lambda each: each.value(now, half_life))
            self.known.setdefault(observed, DecayedUsage()).add(1.0, now, half_life)

    def settle(self, now: float, half_life: float) -> None:
        """Let every count decay up to `now`; from here on another half-life may hold."""
        for each in self.known.values():
            each.settle(now, half_life)

    def counts(self, now: float, half_life: float) -> dict[ObservedSizes, float]:
        """Return how often each of the sizes was observed, weighted by what counts now."""
        return {observed: usage.value(now, half_life) for observed, usage in self.known.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSettings:
    """The [usage] table.

    half_life_days: after so long, time spent counts half when it is decided what to tune.
    save_seconds: between two writes of the time spent; a crash loses no more than this.
    keep_inputs: whether workers keep, in memory, two of the last inputs of each model, to compare a faster
    version on them before it serves; without, versions are compared on inputs that came with the model.
    """

    half_life_days: float = setting(3.0, unit="days", minimum=0.01)
    save_seconds: float = setting(60.0, unit="s", minimum=0.1)
    keep_inputs: bool = setting(True)

    @property
    def half_life(self) -> float:
        """In seconds."""
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
    profiled: str | None  # Missing in files of before, as is what follows
    asked: dict[str, _SavedShapes] | None = None
    met: tuple[_SavedSizes, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """The file: seconds as they were when it was saved, at `saved` seconds since 1970."""

    format: int
    saved: float
    models: dict[str, _SavedModel]


@dataclass(slots=True)
class _Model:
    usage: DecayedUsage = field(default_factory=DecayedUsage)
    shares: dict[str, float] = field(default_factory=dict)  # Of its tasks, by its last profile
    profiled: str = ""  # The SHA-256 of the compiled file that had that profile
    asked: ShapeRequests = field(default_factory=ShapeRequests)
    observed: SizeCounts = field(default_factory=SizeCounts)


class UsageLog:
    """Seconds spent by model and task, and requests by shapes, and by sizes that parts met: what to tune.

    `clock` is monotonic, `wall` counts seconds since 1970.
    """

    def __init__(
        self, path: Path, settings: UsageSettings, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """Read what was kept; a file that is not readable is set aside and told in the log."""
        self.settings = settings
        self._file = StateFile(path, _Saved, "how much models were used", none_omitted=True)
        self._clock = clock
        self._wall = wall
        self._models: dict[str, _Model] = {}
        self._saved_wall = 0.0
        self._changed = False
        self._read()

    def ran(self, model: str, seconds: float) -> None:
        """Record that a request kept the device busy for so many seconds."""
        self._used(model).usage.add(seconds, self._clock(), self.settings.half_life)

    def profiled(self, model: str, sha256: str, rows: Iterable[ProfiledRow]) -> None:
        """Record by a profile how the time of a version divides among its tasks."""
        times: dict[str, float] = {}
        for row in rows:
            times[row.task] = times.get(row.task, 0.0) + row.us
        known = self._used(model)
        known.shares, known.profiled = shares(times), sha256

    def asked(self, model: str, variant: str, shapes: Shapes, count: float = 1.0) -> None:
        """Count requests for a model in shapes that are those of `variant`."""
        self._used(model).asked.ask(variant, shapes, count, self._clock(), self.settings.half_life)

    def observe(self, model: str, sizes: Iterable[ObservedSizes]) -> None:
        """Count the sizes of a request for a model that depend on the data."""
        self._used(model).observed.add(sizes, self._clock(), self.settings.half_life)

    def size_counts(self, model: str) -> dict[ObservedSizes, float]:
        """Return how often a model's partitions had which sizes, weighted by what counts now."""
        known = self._models.get(model)
        return known.observed.counts(self._clock(), self.settings.half_life) if known is not None else {}

    def failed(self, model: str, variant: str, shapes: Shapes, reason: str, under: str) -> None:
        """Record that a model could not be compiled for these shapes.

        `under` is what would have to change.
        """
        asked = self._used(model).asked
        asked.fail(variant, shapes, reason, under, self._clock(), self.settings.half_life)

    def wishes(self, model: str, under: str) -> list[ShapeDemand]:
        """Return the shapes that a model was asked for.

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
            for name, each in sorted(known.asked.known.items() if known is not None else ())
        ]

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self._changed = self._models.pop(model, None) is not None or self._changed

    def keep_only(self, models: Iterable[str]) -> None:
        """Forget all others."""
        for name in set(self._models) - set(models):
            self.forget(name)

    def change(self, settings: UsageSettings) -> None:
        """Apply these settings from now on; what was spent keeps its present value."""
        now = self._clock()
        for model in self._models.values():
            model.usage.settle(now, self.settings.half_life)
            model.asked.settle(now, self.settings.half_life)
            model.observed.settle(now, self.settings.half_life)
        self.settings = settings

    def usage(self) -> dict[str, TimeSpent]:
        """Return the usage of each model.

        That is `seconds` that count now, and `tasks`, the seconds of each of its tuning tasks. Time of copies
        and of partitions that the CPU engine runs is in no task. There are no tasks where no profile was
        made. `profiled` is the SHA-256 of the compiled file that was profiled, or "".
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
        """Write what changed since it was last written, if anything did."""
        await self._file.save(self._snapshot())

    def write(self) -> None:
        """Do what `save` does, in this thread."""
        self._file.write(self._snapshot())

    def _used(self, model: str) -> _Model:
        """Return what is known of a model, for the caller to change."""
        self._changed = True
        if (known := self._models.get(model)) is None:
            known = self._models[model] = _Model()
        return known

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
                    for variant, each in model.asked.known.items()
                },
                met=tuple(
                    strict.copy_fields(_SavedSizes, observed, requests=count)
                    for observed, count in model.observed.counts(now, half_life).items()
                ),
            )
            for name, model in sorted(self._models.items())
        }
        self._saved_wall = max(self._saved_wall, self._wall())  # Never back: see `away`
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
            self._models[name] = _Model(
                usage, dict(model.shares), model.profiled or "", ShapeRequests(asked), SizeCounts(observed)
            )


def _check(saved: _Saved) -> None:
    if saved.format != FORMAT:
        raise ValueError(f"it has format {saved.format} instead of {FORMAT}")
    amounts = [saved.saved, *(model.seconds for model in saved.models.values())]
    amounts += [each.requests for model in saved.models.values() for each in (model.asked or {}).values()]
    amounts += [each.requests for model in saved.models.values() for each in model.met or ()]
    amounts += [share for model in saved.models.values() for share in model.shares.values()]
    if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
        raise ValueError("an amount in it is below zero or not finite")
