"""Has models compiled anew, when the machine is idle, for sizes that their parts meet."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from honed.daemon.background import Work
from honed.daemon.blocking import cleared_in_thread, in_thread
from honed.daemon.changes.add import Jobs, failure
from honed.daemon.changes.publish import Publisher
from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.state import Registry
from honed.daemon.features.base import Infer, InferCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import Ledger
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.pool import Pool
from honed.daemon.settings import places
from honed.daemon.sizes.choice import SizedPart, next_sizes
from honed.daemon.store.store import Store
from honed.daemon.variants.settings import VariantSettings
from honed.protocol.errors import InvalidArgument, ModelRefused
from honed.protocol.results import Inferred, MetSizes, ShownPart

from .variantkeeper import may_have_variants

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class SizeKeeper:
    """The sizes of one service's models. `policy` is serve.engine, `settings` are those in force."""

    store: Store
    registry: Registry
    pool: Pool
    jobs: Jobs
    publisher: Publisher
    ledger: Ledger
    leasing: Leasing
    policy: str
    settings: Callable[[], VariantSettings]
    _failed: dict[str, str] = field(init=False, default_factory=dict)  # by model: its file that could not be

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Count the sizes that parts of a model meet, or those of its variants."""
        static = entry.compiled is not None and not sized_parts(entry.compiled.parts)
        if static and not may_have_variants(entry):
            return None

        def infer_counted(call: InferCall) -> Awaitable[Inferred]:
            return infer(replace(call, answered=(*call.answered, self._answered)))

        return infer_counted

    def _answered(self, model: ServedModel, plan: InferencePlan, sizes: Sequence[MetSizes]) -> None:
        self.met(model, sizes)

    def met(self, model: ServedModel, sizes: Sequence[MetSizes]) -> None:
        """A request for a model met sizes, which are counted."""
        if sizes and self.registry.serves(model):
            self.ledger.met(model.name, sizes)

    def forget(self, model: str) -> None:
        """Forget for which file of a model that was removed compiling failed."""
        self._failed.pop(model, None)

    async def tidy(self) -> None:
        """Nothing: compiled sizes go with their models."""

    def background(self) -> Work | None:
        """Compile a model for sizes that its parts often meet."""
        wanted = self._next()
        if wanted is None:
            return None
        entry, sizes = wanted
        return Work(f"compiling {entry.name} for {text(sizes)}", partial(self._make, entry, sizes))

    def _next(self) -> tuple[ServedModel, tuple[MetSizes, ...]] | None:
        settings = self.settings()
        if not settings.sizes or not places.compiler():
            return None
        for entry in (*self.registry.models(), *self.registry.variants()):
            if self._may_change(entry) and entry.compiled is not None:
                counts = self.ledger.counts_met(entry.name)
                parts = sized_parts(entry.compiled.parts)
                if sizes := next_sizes(parts, counts, settings.requests, settings.sizes):
                    return entry, sizes
        return None

    def _may_change(self, entry: ServedModel) -> bool:
        manifest = entry.manifest
        at_home = entry.at_home and self.pool.device_of(entry).state == "ready"
        free = manifest.owner is None and not manifest.history.pinned and entry.trial is None
        ready = entry.state is State.READY and not self.registry.rests(entry)
        return (
            bool(manifest.sources and at_home and free and ready)
            and self._failed.get(entry.name) != entry.key
        )

    async def _make(self, entry: ServedModel, sizes: tuple[MetSizes, ...]) -> None:
        told = text(sizes)
        _log.info("compiling %s for sizes that its parts meet: %s", entry.name, told)
        try:
            with self.leasing.adding(0, "a model is being compiled for sizes that it meets"):
                sentence = await self._made(entry, sizes)
        except (ModelRefused, InvalidArgument) as error:
            self._failed[entry.name] = entry.key
            _log.warning("%s is not compiled for %s: %s", entry.name, told, failure(error))
        else:
            _log.info("%s: %s", entry.name, sentence)

    async def _made(self, entry: ServedModel, sizes: tuple[MetSizes, ...]) -> str:
        """Compile the model with these sizes, and have it served; what came of that."""
        manifest = entry.manifest
        assert manifest.compiled is not None
        slower_too = manifest.engine_wanted(self.policy) == "gpu"
        with self.jobs.job(entry.name, True, lambda _: None) as job:
            async with cleared_in_thread(self.store.staging()) as folder, AsyncExitStack() as held:
                staged = replace(
                    await in_thread(self.jobs.stage_again, manifest, folder),
                    like=self.store.object(manifest.compiled),
                    sizes=sizes,
                    slower_too=slower_too,
                    hurried=False,
                )
                made = await self.jobs.builder.build(job, staged, [self.pool.device_of(entry)], held)
                why = f"compiled for sizes that its parts meet: {text(sizes)}"
                published = await self.publisher.resized(entry, made, why, slower_too=slower_too)
        if not published.published:
            self._failed[entry.name] = entry.key
        return published.sentence


def sized_parts(parts: tuple[ShownPart, ...]) -> list[SizedPart]:
    """Those of a compiled file that may be compiled for sizes, by their numbers there."""
    by_cpu = [part for part in parts if part.engine == "cpu"]
    return [
        SizedPart(
            number=number,
            by_rows=part.by_rows,
            forms=tuple(form.sizes for form in part.forms if not form.why),
            left_out=tuple(form.sizes for form in part.forms if form.why),
        )
        for number, part in enumerate(by_cpu)
        if part.sized
    ]


def text(sizes: tuple[MetSizes, ...]) -> str:
    """Sizes in a sentence."""
    return ", ".join("x".join(map(str, met.sizes)) for met in sizes)
