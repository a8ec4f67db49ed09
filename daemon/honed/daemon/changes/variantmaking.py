"""Compiles a model for other shapes: from its stored source to a variant that is stored and serves."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from honed.daemon.blocking import cleared_in_thread, in_thread, to_its_end
from honed.daemon.changes.add import Jobs, same_source
from honed.daemon.changes.compilation import BUILT, AddJob, Built, Notify, load
from honed.daemon.core.messages import Added
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.serving.commits import Commits
from honed.daemon.serving.pool import Pool
from honed.daemon.serving.selection import EngineChoice, compare
from honed.daemon.settings.schema import Limits
from honed.daemon.store.names import Shapes, variant_name
from honed.daemon.store.store import Manifest, Store, begin
from honed.protocol.errors import NotFound

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantMaker:
    """Makes variants. `policy` is the setting serve.engine."""

    limits: Limits
    store: Store
    registry: Registry
    pool: Pool
    jobs: Jobs
    commits: Commits
    policy: str

    async def make(
        self, model: ServedModel, shapes: Shapes, notify: Notify, *, by_hand: bool
    ) -> tuple[str, str]:
        """Compile `model` for `shapes`; gives the variant's name, and why it serves or not.

        Shapes of inputs that are left out follow from the others, as with `hone add --shape`. Raises
        ModelRefused where it cannot be compiled so or is not right, NotFound where the model was removed or
        replaced meanwhile, and what else compiling raises.
        """
        name = variant_name(model.name, shapes, model.manifest.interface)
        with self.jobs.job(name, True, notify) as job:
            async with cleared_in_thread(self.store.staging()) as folder:
                staged = await in_thread(self.jobs.stage_again, model.manifest, folder)
                home = model.manifest.compiled
                staged = replace(
                    staged,
                    shapes=dict(shapes),
                    like=self.store.object(home) if home is not None else None,
                    hurried=by_hand,
                )
                async with AsyncExitStack() as held:
                    server = self.pool.device_of(model)
                    made = await self.jobs.builder.build(job, staged, [server], held)
                    choice = await self._choice(job, model, made, held)
                    whole = {tensor.name: tensor.shape for tensor in made.model.inputs} | dict(shapes)
                    name = variant_name(model.name, whole, model.manifest.interface)
                    variant = _manifest(name, model, made, whole, choice, by_hand=by_hand)
                    await to_its_end(self._commit(model, variant, made))
        _log.info("model %s is compiled for other shapes, as %s. %s", model.name, name, choice.why)
        return name, choice.why

    async def _choice(
        self, job: AddJob, model: ServedModel, made: Built, held: AsyncExitStack
    ) -> EngineChoice:
        """Which engine is to serve these shapes."""
        manifest, cpu = model.manifest, self.pool.cpu_for(model.manifest.owner)
        if cpu is None or manifest.interface is None or manifest.engine_wanted(self.policy) == "gpu":
            return EngineChoice("gpu", "")
        key = manifest.source_key
        job.report("load", BUILT, "comparing engines")
        held.enter_context(self.pool.keeping(cpu, key))
        await load(cpu, key, self.store.form(manifest, key), self.limits)
        return await compare(made.server.loader, made.file.sha256, made.path, cpu.loader, key, manifest.owner)

    async def _commit(self, model: ServedModel, variant: Manifest, made: Built) -> None:
        async with self.commits.turn:
            now = self.registry.find(model.name)
            if now is None or not same_source(variant, now.manifest):
                raise NotFound(
                    f"model {model.name!r} is another one by now, or none; nothing was kept of this"
                )
            replaced = variant.name in {each.name for each in self.registry.variants(model.name)}
            await self.commits.commit(variant, [(made.file, made.path)])
            self.pool.handle(
                Added(
                    manifest=variant,
                    compiled=made.model,
                    home=model.device,
                    proof=made.proof,
                    rests=variant.chosen == "cpu",
                )
            )
            if replaced:
                await self.commits.sweep()


def _manifest(
    name: str, model: ServedModel, made: Built, shapes: Shapes, choice: EngineChoice, *, by_hand: bool
) -> Manifest:
    now, why = time.time(), "asked for by hand" if by_hand else "compiled because it was asked for often"
    return Manifest(
        name=name,
        added=now,
        compiled=made.file,
        history=begin(made.file, schedules=made.model.schedules, why=why, now=now),
        sources=model.manifest.sources,
        shapes=dict(shapes),
        precision=model.manifest.precision,
        device=model.manifest.device,
        placed=model.manifest.placed,
        interface=model.manifest.interface,
        chosen=choice.engine,
        why=choice.why,
        by_hand=by_hand,
        owner=model.manifest.owner,
    )
