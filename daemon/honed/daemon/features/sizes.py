"""Compiles partitions, in idle time, for sizes that depend on the data and occur often.

A partition whose rows are independent may run in a specialisation for more rows, at the cost of those rows:
a few well-chosen specialisations then suffice for all numbers of rows. Any other partition runs in a
specialisation for its exact sizes, or in the CPU engine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from honed.daemon.changes.add import failure
from honed.daemon.changes.change import Changes
from honed.daemon.changes.publish import Publisher
from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.state import Registry
from honed.daemon.feature import BackgroundTask, Feature, FeatureRequest, Infer
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving.pool import EngineManager
from honed.daemon.settings import places
from honed.daemon.settings.schema import VariantSettings
from honed.daemon.store.store import Manifest
from honed.protocol.errors import InvalidArgument, ModelRefused
from honed.protocol.strict import Map
from honed.protocol.values import ObservedSizes, PartitionInfo

Sizes = tuple[int, ...]
# Assumed cost of a row in the CPU engine, relative to a specialisation. It only ranks sizes: each
# specialisation is timed before it serves.
_CPU = 3.0
_BETTER = 1.25  # Ratio of the present cost to the possible one, above which compiling pays
_NEAR = 1.5  # Sizes within this ratio of a rejected one are not tried
_HOPELESS = 4  # Rejected sizes, without an accepted one, after which a partition is given up
_CANDIDATES = 48  # Sizes considered for a partition, the most frequent ones
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPartition:
    """A partition of a compiled file by number, with the sizes of its specialisations and rejected sizes."""

    number: int
    by_rows: bool
    forms: tuple[Sizes, ...]
    left_out: tuple[Sizes, ...]


def next_sizes(
    parts: Sequence[SizedPartition], counts: Mapping[ObservedSizes, float], requests: float, most: int
) -> tuple[ObservedSizes, ...] | None:
    """Return all sizes to compile the model for, or None if the present ones are good enough.

    There are at most `most` for each partition. New ones need `requests` requests that observed them.
    """
    chosen: list[ObservedSizes] = []
    better = False
    for part in parts:
        seen = {m.sizes: count for m, count in counts.items() if m.part == part.number}
        sizes = _better(part, seen, requests, most)
        better = better or sizes is not None
        chosen += [ObservedSizes(part=part.number, sizes=s) for s in (part.forms if sizes is None else sizes)]
    return tuple(chosen) if better else None


def best(counts: Mapping[Sizes, float], most: int, *, by_rows: bool) -> tuple[Sizes, ...]:
    """Return at most `most` of the observed sizes, those that minimise the cost of the observed load."""
    if not by_rows:
        ranked = sorted(counts, key=lambda sizes: (-counts[sizes] * math.prod(sizes), sizes))
        return tuple(sorted(ranked[:most]))
    rows = sorted(sizes[0] for sizes in counts)
    weights = {sizes[0]: count for sizes, count in counts.items()}
    width = len(next(iter(counts), ()))
    return tuple((n,) * width for n in _rows(rows, weights, most))


def cost(counts: Mapping[Sizes, float], forms: Collection[Sizes], *, by_rows: bool) -> float:
    """Return the cost of the observed sizes, in rows that specialisations compute; less is better."""
    return sum(count * _cost(sizes, forms, by_rows) for sizes, count in counts.items())


def _better(
    part: SizedPartition, counts: Mapping[Sizes, float], requests: float, most: int
) -> list[Sizes] | None:
    """Return sizes that are better than the present ones by _BETTER, or None."""
    by_rows = part.by_rows
    if by_rows:
        counts = {sizes: count for sizes, count in counts.items() if len(set(sizes)) == 1}
    if len(part.left_out) >= _HOPELESS and not part.forms:
        return None
    open_ = {sizes: count for sizes, count in counts.items() if not _was_rejected(part, sizes)}
    if sum(open_.values()) < requests:
        return None
    ranked = sorted(open_, key=lambda sizes: (-open_[sizes], sizes))[:_CANDIDATES]
    if not by_rows:
        ranked = [sizes for sizes in ranked if open_[sizes] >= requests]
    found = best({sizes: open_[sizes] for sizes in ranked}, most, by_rows=by_rows)
    new = set(found) - set(part.forms)
    if not new or cost(open_, found, by_rows=by_rows) * _BETTER > cost(open_, part.forms, by_rows=by_rows):
        return None
    return list(found)


def _was_rejected(part: SizedPartition, sizes: Sizes) -> bool:
    """Return whether these sizes, or ones within _NEAR of them, were rejected."""
    if not part.by_rows:
        return sizes in part.left_out
    return sizes not in part.forms and any(
        out[0] / _NEAR <= sizes[0] <= out[0] * _NEAR for out in part.left_out
    )


def _cost(sizes: Sizes, forms: Collection[Sizes], by_rows: bool) -> float:
    own = float(math.prod(sizes)) if not by_rows else float(sizes[0])
    fitting = [form[0] for form in forms if form[0] >= sizes[0]] if by_rows else []
    if sizes in forms:
        return own
    return min([_CPU * own, *fitting])


def _rows(rows: Sequence[int], weights: Mapping[int, float], most: int) -> list[int]:
    """Return at most `most` of `rows`, in ascending order, that minimise the cost of all.

    This is dynamic programming over the largest chosen one.
    """
    if not rows or most < 1:
        return []
    between = [[0.0] * len(rows) for _ in rows]  # Cost of rows i to j run by specialisation j
    for j, form in enumerate(rows):
        for i in range(j, -1, -1):
            before = between[i + 1][j] if i < j else 0.0
            between[i][j] = before + weights[rows[i]] * min(float(form), _CPU * rows[i])
    above = [sum(_CPU * n * weights[n] for n in rows[j + 1 :]) for j in range(len(rows))]
    # The minimum cost of all up to j if j is chosen, and the choice; one more is chosen in each round.
    ends: list[tuple[float, list[int]]] = [(between[0][j], [rows[j]]) for j in range(len(rows))]
    found = min((ends[j][0] + above[j], ends[j][1]) for j in range(len(rows)))
    for _ in range(min(most, len(rows)) - 1):
        ends = [
            min(
                [ends[j], *((ends[i][0] + between[i + 1][j], [*ends[i][1], rows[j]]) for i in range(j))],
                key=lambda each: (each[0], each[1]),
            )
            for j in range(len(rows))
        ]
        found = min(found, *((ends[j][0] + above[j], ends[j][1]) for j in range(len(rows))))
    return found[1]


@dataclass(slots=True, kw_only=True, eq=False)
class SizeSpecialiser(Feature):
    """A feature that compiles models for observed sizes; `policy` is serve.engine.

    `settings` returns those in force. `may_compile` and `compiled` are as in `ShapeVariants`.
    """

    changes: Changes
    registry: Registry
    pool: EngineManager
    publisher: Publisher
    usage_log: UsageLog
    leasing: Leasing
    policy: str
    settings: Callable[[], VariantSettings]
    may_compile: Callable[[Manifest], bool]
    compiled: Callable[[int, float], None]
    _failed: dict[str, str] = field(init=False, default_factory=dict)  # Keys of refused files by model

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Count the sizes that partitions of a model or its variants observe."""
        variants = entry.has_dynamic_inputs or self.registry.variants(entry.name)
        parts = specialisable_partitions(entry.compiled.parts) if entry.compiled is not None else []
        if not parts and not variants:
            return None

        def infer_counted(call: FeatureRequest) -> Awaitable[Map]:
            return infer(
                replace(call, answered=(*call.answered, lambda model, _, sizes: self.observe(model, sizes)))
            )

        return infer_counted

    def observe(self, model: ServedModel, sizes: Sequence[ObservedSizes]) -> None:
        """Count the sizes that a request for a model had inside."""
        if sizes and self.registry.serves(model):
            self.usage_log.observe(model.name, sizes)

    def forget(self, model: str) -> None:
        """Drop the record of failed compilation of a removed model."""
        self._failed.pop(model, None)

    def background(self, *, idle: bool) -> BackgroundTask | None:
        """Return the compilation of a model for its frequent sizes, if one is due."""
        wanted = self._next() if idle else None
        if wanted is None:
            return None
        entry, sizes = wanted
        return BackgroundTask(f"compiling {entry.name} for {text(sizes)}", partial(self._make, entry, sizes))

    def _next(self) -> tuple[ServedModel, tuple[ObservedSizes, ...]] | None:
        settings = self.settings()
        if not settings.sizes or not places.compiler():
            return None
        for entry in (*self.registry.models(), *self.registry.variants()):
            if self._may_change(entry) and entry.compiled is not None:
                counts = self.usage_log.size_counts(entry.name)
                parts = specialisable_partitions(entry.compiled.parts)
                if sizes := next_sizes(parts, counts, settings.requests, settings.sizes):
                    return entry, sizes
        return None

    def _may_change(self, entry: ServedModel) -> bool:
        manifest = entry.manifest
        at_home = entry.on_preferred_engine and self.pool.device_of(entry).ready
        free = self.may_compile(manifest) and not manifest.history.pinned and entry.canary is None
        ready = entry.state is State.READY and not self.registry.is_suspended(entry)
        return (
            bool(manifest.sources and at_home and free and ready)
            and self._failed.get(entry.name) != entry.key
        )

    async def _make(self, entry: ServedModel, sizes: tuple[ObservedSizes, ...]) -> None:
        """Compile the model with these sizes, publish it, and log the result."""
        from honed.daemon.changes.building import build

        shown, begun, manifest = text(sizes), time.monotonic(), entry.manifest
        assert manifest.compiled is not None
        keep_slower = manifest.engine_wanted(self.policy) == "gpu" and not manifest.for_app
        _log.info("compiling %s for sizes that its parts meet: %s", entry.name, shown)
        try:
            with self.leasing.adding(0, "a model is being compiled for sizes that it meets"):
                async with self.changes.begin(entry.name, owner=manifest.owner) as change:
                    staged = replace(
                        await change.sources(manifest),
                        existing_build=self.changes.store.object(manifest.compiled),
                        sizes=sizes,
                        keep_slower=keep_slower,
                        foreground=False,
                    )
                    made = await build(change, staged, [self.pool.device_of(entry)])
                    why = f"compiled for sizes that its parts meet: {shown}"
                    published = await self.publisher.publish_resized(
                        change, entry, made, why, keep_slower=keep_slower
                    )
        except (ModelRefused, InvalidArgument) as error:
            self._failed[entry.name] = entry.key
            _log.warning("%s is not compiled for %s: %s", entry.name, shown, failure(error))
        else:
            if not published.published:
                self._failed[entry.name] = entry.key
            _log.info("%s: %s", entry.name, published.sentence)
        finally:
            if manifest.owner is not None:
                self.compiled(manifest.owner, time.monotonic() - begun)


def specialisable_partitions(parts: tuple[PartitionInfo, ...]) -> list[SizedPartition]:
    """Return the partitions of a compiled file that may be specialised, by their numbers in it."""
    by_cpu = [part for part in parts if part.engine == "cpu"]
    return [
        SizedPartition(
            number=number,
            by_rows=part.by_rows,
            forms=tuple(form.sizes for form in part.forms if not form.why),
            left_out=tuple(form.sizes for form in part.forms if form.why),
        )
        for number, part in enumerate(by_cpu)
        if part.sized
    ]


def text(sizes: tuple[ObservedSizes, ...]) -> str:
    """Return sizes as text, such as "8x64, 16x64"."""
    return ", ".join("x".join(map(str, each.sizes)) for each in sizes)
