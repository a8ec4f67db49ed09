"""Compiles models for further shapes that are often requested, and decides which variants are loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from honed.daemon.aio import cancel_all
from honed.daemon.changes.add import failure
from honed.daemon.changes.change import BUILT, Built, Change, Changes, Notify, same_source
from honed.daemon.core.messages import Added, LoadReport, SuspendRequested
from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.state import Registry
from honed.daemon.feature import BackgroundTask, Feature, FeatureRequest, Infer, MethodCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import ShapeDemand, UsageLog
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.pool import EngineManager
from honed.daemon.serving.selection import EngineChoice, compare, is_only_slower, is_unfinished
from honed.daemon.settings import places
from honed.daemon.settings.schema import VariantSettings
from honed.daemon.store.compiled import CompiledFileInfo, Interface
from honed.daemon.store.names import Shapes, model_of, variant_name
from honed.daemon.store.store import EngineDecision, Manifest, begin
from honed.daemon.store.versions import with_time
from honed.protocol import strict
from honed.protocol.errors import HonedError, InvalidArgument, ModelRefused, NotFound
from honed.protocol.params import LoadParams
from honed.protocol.results import ShownVariant
from honed.protocol.strict import Map
from honed.protocol.values import ENGINE_NAMES, ObservedSizes
from honed.runtime import HONED_VERSION

_log = logging.getLogger(__name__)
# A variant is evicted only for one requested this many times as often. Otherwise two that are requested in
# turns would be compiled again and again.
_BETTER = 1.5
_STAY_SECONDS = 60.0  # Time that a requested variant stays loaded at least, for the same reason
_MOST_NAMES = 256  # Cached names of a model's variants
HOPELESS: Final = 2  # Refused shapes, without an accepted one, after which a model is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantUsage:
    """A stored variant: its decaying number of `requests`, `nbytes` on disk and bytes `loaded` on the device.

    `used` is the time of its last request, in monotonic seconds.
    """

    name: str
    model: str
    requests: float
    by_hand: bool
    nbytes: int
    loaded: int
    used: float


def next_shapes(
    wishes: Iterable[ShapeDemand],
    kept: Sequence[VariantUsage],
    settings: VariantSettings,
    nbytes: dict[str, int],
) -> ShapeDemand | None:
    """Return the shapes to compile next: the most requested ones that would not be evicted, or None.

    `nbytes` is the size of a variant's file in bytes, by model.
    """
    wishes = list(wishes)
    there, with_variants = {each.name for each in kept}, {each.model for each in kept}
    failures = Counter(wish.model for wish in wishes if wish.failed)

    def is_due(wish: ShapeDemand) -> bool:
        hopeless = failures[wish.model] >= HOPELESS and wish.model not in with_variants
        often = round(wish.requests, 1) >= settings.requests and not wish.failed
        return often and wish.name not in there and not hopeless

    for wish in sorted(filter(is_due, wishes), key=lambda wish: (-wish.requests, wish.name)):
        new = strict.copy_fields(
            VariantUsage, wish, by_hand=False, nbytes=nbytes[wish.model], loaded=0, used=0.0
        )
        going = set(surplus((*kept, new), settings))
        asked_less = all(each.requests * _BETTER < wish.requests for each in kept if each.name in going)
        if wish.name not in going and asked_less:
            return wish
    return None


def surplus(kept: Sequence[VariantUsage], settings: VariantSettings) -> list[str]:
    """Return the variants to remove to respect the limits of number and disk, the least requested first.

    None of them was added by hand.
    """
    dropped: list[str] = []
    left = sorted(kept, key=lambda each: (each.requests, each.name))
    for one in list(left):
        of_model = sum(each.model == one.model for each in left)
        too_many = of_model > settings.per_model
        too_large = sum(each.nbytes for each in left) > settings.disk_bytes
        if not one.by_hand and (too_many or too_large):
            left.remove(one)
            dropped.append(one.name)
    return dropped


def variants_to_suspend(
    loaded: int, serving: Sequence[VariantUsage], settings: VariantSettings, now: float
) -> list[str] | None:
    """Return the variants to suspend so that another, of `loaded` bytes, fits the limit of memory.

    The least recently requested come first. Returns None if that would take ones requested recently.
    """
    resting: list[str] = []
    free = settings.memory_bytes - loaded - sum(each.loaded for each in serving)
    for one in sorted(serving, key=lambda each: each.used):
        if free >= 0:
            break
        if now - one.used < _STAY_SECONDS:
            return None
        resting.append(one.name)
        free += one.loaded
    return resting if free >= 0 else None


# Compares the file that a device has loaded under a key with a model in the CPU engine, by the runs that it
# will serve; returns None if plain runs do.
FormCompared = Callable[
    [ServedModel, Shapes, EngineServer, str, EngineServer], Awaitable[EngineChoice] | None
]


@dataclass(slots=True, kw_only=True, eq=False)
class VariantCompiler:
    """A compiler of variants, which also chooses their engines; `policy` is the setting serve.engine."""

    changes: Changes
    registry: Registry
    pool: EngineManager
    policy: str
    trial: FormCompared = field(init=False, default=lambda *_: None)

    async def make(
        self, model: ServedModel, shapes: Shapes, notify: Notify, *, by_hand: bool
    ) -> tuple[str, str]:
        """Compile `model` for `shapes`; return the variant's name, and why its engine serves it.

        Omitted shapes follow from the others, as with `hone add --shape`. Raises ModelRefused if it cannot be
        compiled or its outputs are wrong, NotFound if the model was removed or replaced meanwhile, and other
        errors of compilation.
        """
        from honed.daemon.changes.building import build

        name = variant_name(model.name, shapes, model.manifest.interface)
        async with self.changes.begin(name, notify, owner=model.manifest.owner) as change:
            home = model.manifest.compiled
            staged = replace(
                await change.sources(model.manifest),
                shapes=dict(shapes),
                existing_build=self.changes.store.object(home) if home is not None else None,
                foreground=by_hand,
            )
            made = await build(change, staged, [self.pool.device_of(model)])
            for_app = model.manifest.for_app
            us = await made.server.loader.own_us(made.file.sha256) if for_app else None
            whole = {tensor.name: tensor.shape for tensor in made.model.inputs} | dict(shapes)
            choice = await self._choice(change, model, whole, made.server, made.file.sha256, made.path)
            name = variant_name(model.name, whole, model.manifest.interface)
            variant = _manifest(name, model, made, whole, choice, by_hand=by_hand)
            if us is not None:
                variant = replace(variant, history=with_time(variant.history, us))
            added = partial(self._addition, model, variant, made.model, made.proof)
            await change.commit(added, [(made.file, made.path)])
        _log.info("model %s is compiled for other shapes, as %s. %s", model.name, name, choice.why)
        return name, choice.why

    async def choose_again(self, model: ServedModel, variant: ServedModel) -> EngineChoice:
        """Compare a stored variant of a model with the CPU engine again, and have the faster one serve."""
        manifest, server, compiled = variant.manifest, self.pool.device_of(variant), variant.compiled
        assert compiled is not None
        async with self.changes.begin(variant.name) as change:
            proof = await change.load_stored(server, manifest, variant.key)
            path = self.changes.store.form(manifest, variant.key)
            choice = await self._choice(change, model, manifest.shapes, server, variant.key, path)
            manifest = manifest.with_decision(chosen=choice.engine, reason=choice.why, times=choice.times)
            await change.commit(partial(self._addition, model, manifest, compiled, proof))
        _log.info("%s was compared again. %s", variant.name, choice.why)
        return choice

    async def _choice(
        self, change: Change, model: ServedModel, shapes: Shapes, server: EngineServer, key: str, path: Path
    ) -> EngineChoice:
        """Return the engine for these shapes; the device has loaded the file at `path` as `key`."""
        manifest, cpu = model.manifest, self.pool.cpu_for(model.manifest.owner)
        if cpu is None or manifest.interface is None:
            return EngineChoice("gpu", "")
        change.report("load", BUILT, "comparing engines")
        await change.load_stored(cpu, manifest, manifest.source_key)
        compared = self.trial(model, shapes, server, key, cpu)
        if compared is not None:
            return await compared
        if manifest.engine_wanted(self.policy) == "gpu":
            return EngineChoice("gpu", "")
        return await compare(server.loader, key, path, cpu.loader, manifest.source_key, manifest.owner)

    def is_for_device(self, model: ServedModel, variant: Manifest) -> bool:
        """Return whether the device serves a model by a variant: as chosen, or pinned and only slower."""
        pinned = model.manifest.engine_wanted(self.policy) == "gpu"
        return variant.decision.chosen != "cpu" or (pinned and is_only_slower(variant))

    def under(self, entry: ServedModel) -> str:
        """Return the conditions of compilation; refused shapes are retried when they change.

        They are a text of the source, precision, honed's version, the device with its driver, and a pin.
        """
        identity = self.pool.device_of(entry).identity
        device = f"{identity.name} {identity.driver_version}" if identity is not None else ""
        pinned = " pinned" if entry.manifest.engine_wanted(self.policy) == "gpu" else ""
        return f"{entry.manifest.source_key} {entry.manifest.precision} {HONED_VERSION} {device}{pinned}"

    def _addition(
        self, model: ServedModel, variant: Manifest, compiled: CompiledFileInfo, proof: LoadReport
    ) -> Added:
        now = self.registry.find(model.name)
        if now is None or not same_source(variant, now.manifest):
            raise NotFound(f"model {model.name!r} is another one by now, or none; nothing was kept of this")
        return Added(
            manifest=variant,
            compiled=compiled,
            preferred_engine=model.device,
            proof=proof,
            rests=not self.is_for_device(now, variant),
        )


def _manifest(
    name: str, model: ServedModel, build: Built, shapes: Shapes, choice: EngineChoice, *, by_hand: bool
) -> Manifest:
    now, why = time.time(), "asked for by hand" if by_hand else "compiled because it was asked for often"
    return Manifest(
        name=name,
        added=now,
        compiled=build.file,
        history=begin(build.file, schedules=build.model.schedules, why=why, now=now),
        sources=model.manifest.sources,
        shapes=dict(shapes),
        precision=model.manifest.precision,
        device=model.manifest.device,
        placement_reason=model.manifest.placement_reason,
        interface=model.manifest.interface,
        decision=EngineDecision(
            requested=model.manifest.decision.requested,
            chosen=choice.engine,
            reason=choice.why,
            times=choice.times,
        ),
        by_hand=by_hand,
        owner=model.manifest.owner,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class ShapeVariants(Feature):
    """A feature that serves requests by variants, and compiles them in idle time.

    `settings` returns those in force. `rewrap` has features wrap a model again. `may_compile` says whether
    further files of a model may be compiled, and `compiled` receives the seconds that were spent for a user.
    """

    makes_variants: ClassVar[bool] = True
    maker: VariantCompiler
    registry: Registry
    usage_log: UsageLog
    leasing: Leasing
    settings: Callable[[], VariantSettings]
    rewrap: Callable[[str], None]
    may_compile: Callable[[Manifest], bool]
    compiled: Callable[[int, float], None]
    _used: dict[str, float] = field(init=False, default_factory=dict)  # Last requests (monotonic seconds)
    # Cached names of requested variants by shapes, for each model with the interfaces that they depend on.
    _names: dict[
        str,
        tuple[CompiledFileInfo | None, Interface | None, dict[tuple[tuple[str, tuple[int, ...]], ...], str]],
    ] = field(init=False, default_factory=dict)
    _begun: bool = field(init=False, default=False)
    _by_hand: set[asyncio.Task[list[str]]] = field(init=False, default_factory=set)

    # Requests

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Have a model's variants answer requests in their shapes, and count the shapes of requests."""
        if not entry.has_dynamic_inputs and not self.registry.variants(entry.name):
            return None

        def infer_in_shapes(call: FeatureRequest) -> Awaitable[Map]:
            entry = call.entry

            def count_request(
                runner: ServedModel, plan: InferencePlan, sizes: Sequence[ObservedSizes]
            ) -> None:
                self.count_shapes(entry, plan)

            runner_of = partial(self.runner_of, entry)
            return infer(replace(call, runner_of=runner_of, answered=(*call.answered, count_request)))

        return infer_in_shapes

    def runner_of(self, entry: ServedModel, shapes: Shapes, name: str = "") -> ServedModel:
        """Return the model that answers for inputs of these shapes: a loaded variant, else the model.

        `name` is that of the variant, if it is known. A suspended variant that serves on the device is loaded
        for the next request.
        """
        name = name or self._variant_for(entry, shapes)
        variant = self.registry.variant(name) if name else None
        if variant is None or not same_source(variant.manifest, entry.manifest) or self._by_cpu(entry):
            return entry
        if not self.maker.is_for_device(entry, variant.manifest):
            return entry
        self._used[variant.name] = time.monotonic()
        only = entry.manifest.interface is None  # The model has no ONNX file that could answer instead
        if self.registry.is_suspended(variant):
            self._wake(variant, anyway=only)
            variant = self.registry.variant(name) or variant
        if self.registry.is_suspended(variant) or variant.on_cpu:
            return entry
        return variant if only or (variant.on_preferred_engine and variant.state is State.READY) else entry

    def count_shapes(self, entry: ServedModel, plan: InferencePlan) -> None:
        """Count the shapes of an answered request, if a variant could have them."""
        shapes = {tensor.name: tensor.shape or () for tensor, _ in plan.inputs}
        name = self._variant_for(entry, shapes)
        if name and self.registry.find(entry.name) is not None:
            self.usage_log.count_requests(entry.name, name, shapes)

    def _variant_for(self, entry: ServedModel, shapes: Shapes) -> str:
        """Return the cached result of `_variant_asked`: most requests have few different shapes."""
        compiled, interface, names = self._names.get(entry.name, (None, None, None))
        if names is None or compiled is not entry.compiled or interface is not entry.manifest.interface:
            names = {}
            self._names[entry.name] = entry.compiled, entry.manifest.interface, names
        asked = tuple(shapes.items())
        if asked not in names:
            if len(names) >= _MOST_NAMES:
                names.clear()
            names[asked] = _variant_asked(entry, shapes)
        return names[asked]

    def wish(self, entry: ServedModel, shapes: Shapes, requests: int) -> str:
        """Count an app's own runs in these shapes; return why these could not be compiled, or ""."""
        first = entry.manifest.shapes
        if first and all(shapes.get(name) == shape for name, shape in first.items()):
            return ""  # The model itself is compiled for these shapes
        name = self._variant_for(entry, shapes)
        if name:
            self.usage_log.count_requests(entry.name, name, shapes, requests)
        wishes = (
            wish for wish in self.usage_log.wishes(entry.name, self.maker.under(entry)) if wish.name == name
        )
        return next((wish.failed for wish in wishes), "")

    # Reports, and changes by users

    def show_fields(self, entry: ServedModel) -> Mapping[str, object]:
        """Return the variants of a model, including those that could not be compiled."""
        wishes = {wish.name: wish for wish in self.usage_log.wishes(entry.name, self.maker.under(entry))}
        kept = {variant.name: variant for variant in self.registry.variants(entry.name)}
        found = [
            _describe(
                variant, wishes.pop(name, None), by_cpu=not self.maker.is_for_device(entry, variant.manifest)
            )
            for name, variant in kept.items()
        ]
        failed = (_describe_failed(wish) for wish in wishes.values() if wish.failed and wish.requests)
        return {"variants": (*found, *failed)}

    def forget(self, model: str) -> None:
        """Drop the last use of a removed variant, and the cached names of a removed model."""
        self._used.pop(model, None)
        self._names.pop(model, None)

    async def on_added(self, call: MethodCall, params: LoadParams) -> Sequence[str]:
        """Compile an added model for the shapes requested with it, one after the other.

        Return a line for each, or none if the client does not wait: the work continues in the background.
        """
        options = params.parameters
        if options is None or not options.variants:
            return ()
        work = asyncio.ensure_future(self._make_all(params.model_name, options.variants, call.progress))
        self._by_hand.add(work)
        work.add_done_callback(self._by_hand.discard)
        return await work if options.wait is not False else ()

    # Background work

    async def close(self) -> None:
        """Cancel compilations that users requested."""
        await cancel_all(*self._by_hand)

    def background(self, *, idle: bool) -> BackgroundTask | None:
        """Return the compilation of a model for its most requested shapes, if one is due."""
        wish = self._next() if idle else None
        if wish is None:
            return None
        return BackgroundTask(f"compiling {wish.model} as {wish.name}", partial(self._make, wish))

    async def tidy(self) -> None:
        """Suspend variants of the CPU engine and those beyond the memory limit; remove surplus ones.

        Once, when a device is ready, load the variants that were requested before the service started.
        """
        await self._enforce_limits()
        if not self._begun and self.maker.pool.ready:
            self._begun = True
            for one in sorted(self._usage_of_all(), key=lambda each: -each.requests):
                variant, model = self.registry.variant(one.name), self.registry.find(one.model)
                if (
                    variant is not None
                    and model is not None
                    and self.maker.is_for_device(model, variant.manifest)
                ):
                    self._wake(variant)

    async def _enforce_limits(self) -> None:
        for variant in self.registry.variants():
            model = self.registry.find(model_of(variant.name))
            by_cpu = variant.on_cpu and variant.on_preferred_engine
            by_cpu |= model is not None and not self.maker.is_for_device(model, variant.manifest)
            if by_cpu and not self.registry.is_suspended(variant):
                self._rest(variant.name)
        for name in variants_to_suspend(0, self._usage_of_loaded(), self.settings(), float("inf")) or ():
            self._rest(name)
        going = set(surplus(self._usage_of_all(), self.settings()))
        # Variants of models that were removed or replaced just before the service ended go, too.
        for variant in self.registry.variants():
            of = self.registry.find(model_of(variant.name))
            if of is None or not same_source(variant.manifest, of.manifest):
                going.add(variant.name)
        if not going:
            return
        names = ", ".join(sorted(going))
        try:
            await self.maker.changes.remove_variants(sorted(going))
        except HonedError as error:
            _log.error("variants %s cannot be dropped, tried again later: %s", names, error)
            return
        _log.info("variants that were least asked for were dropped: %s", names)

    def _next(self) -> ShapeDemand | None:
        if not self.settings().per_model or not places.compiler():
            return None
        wishes: list[ShapeDemand] = []
        sizes: dict[str, int] = {}
        for entry in self.registry.models():
            if self._may_have_more(entry):
                wishes += self.usage_log.wishes(entry.name, self.maker.under(entry))
                files = [each.manifest.compiled for each in (entry, *self.registry.variants(entry.name))]
                known = [file.nbytes for file in files if file is not None]
                sources = sum(file.nbytes for file in entry.manifest.sources)
                sizes[entry.name] = max(known, default=sources)  # The expected size
        return next_shapes(wishes, self._usage_of_all(), self.settings(), sizes)

    def _may_have_more(self, entry: ServedModel) -> bool:
        manifest = entry.manifest
        ready = self.maker.pool.device_of(entry).ready and not entry.failover_reason
        compiled = not self._by_cpu(entry) and not is_unfinished(manifest, self.maker.policy)
        possible = bool(manifest.interface and manifest.sources and ready and compiled)
        return possible and self.may_compile(manifest)

    def _by_cpu(self, entry: ServedModel) -> bool:
        """Return whether the setting makes the CPU engine serve the model."""
        return entry.manifest.engine_wanted(self.maker.policy) == "cpu"

    async def _make(self, wish: ShapeDemand) -> None:
        entry = self.registry.find(wish.model)
        if entry is None:
            return
        _log.info("compiling %s for shapes it is often asked for, as %s", wish.model, wish.name)
        begun, owner = time.monotonic(), entry.manifest.owner
        try:
            with self.leasing.adding(0, "a model is being compiled for shapes it is often asked for"):
                await self.maker.make(entry, wish.shapes, lambda _: None, by_hand=False)
        except (ModelRefused, InvalidArgument) as error:
            reason = failure(error)
            _log.warning("%s cannot be compiled as %s: %s", wish.model, wish.name, reason)
            self.usage_log.record_failure(wish.model, wish.name, wish.shapes, reason, self.maker.under(entry))
        finally:
            if owner is not None:
                self.compiled(owner, time.monotonic() - begun)

    async def _make_all(self, model: str, sets: Sequence[Shapes], notify: Notify) -> list[str]:
        lines: list[str] = []
        for shapes in sets:
            sizes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            try:
                with self.leasing.adding(0):
                    entry = self.registry.get(model)
                    name, why = await self.maker.make(entry, shapes, notify, by_hand=True)
                self.rewrap(model)
            except HonedError as error:
                lines.append(f"not compiled for {sizes}: {failure(error)}")
                _log.warning("model %s is %s", model, lines[-1])
            else:
                lines.append(f"compiled for {sizes}, too, as {name}" + (f"; {why}" if why else ""))
        return lines

    # Loading and suspending

    def _wake(self, variant: ServedModel, *, anyway: bool = False) -> None:
        """Load a suspended variant if that displaces none requested recently, or `anyway`."""
        serving, now = self._usage_of_loaded(), float("inf") if anyway else time.monotonic()
        resting = variants_to_suspend(_loaded_bytes(variant), serving, self.settings(), now)
        if resting is None and not anyway:
            return
        for name in resting or ():
            self._rest(name)
        self.maker.pool.wake(variant.name, on_device=True)

    def _rest(self, name: str) -> None:
        if name not in self.maker.changes.active:  # A change may be replacing the variant
            self.maker.pool.handle(SuspendRequested(name))

    def _usage_of_loaded(self) -> list[VariantUsage]:
        """Return the variants in service; their `requests` are 0."""
        serving = (variant for variant in self.registry.variants() if not self.registry.is_suspended(variant))
        return [self._usage_of(variant, 0.0) for variant in serving]

    def _usage_of_all(self) -> list[VariantUsage]:
        asked = (wish for model in self.registry.models() for wish in self.usage_log.wishes(model.name, ""))
        requests = {wish.name: wish.requests for wish in asked}
        return [self._usage_of(each, requests.get(each.name, 0.0)) for each in self.registry.variants()]

    def _usage_of(self, variant: ServedModel, requests: float) -> VariantUsage:
        return VariantUsage(
            name=variant.name,
            model=model_of(variant.name),
            requests=requests,
            by_hand=variant.manifest.by_hand,
            nbytes=_stored_bytes(variant),
            loaded=_loaded_bytes(variant),
            used=self._used.get(variant.name, float("-inf")),
        )


def _variant_asked(entry: ServedModel, shapes: Shapes) -> str:
    """Return the name of the variant for these shapes; "" if the model has them or accepts no others."""
    compiled, interface = entry.compiled, entry.manifest.interface
    if compiled is not None and all(shapes.get(t.name, t.shape) == t.shape for t in compiled.inputs):
        return ""
    if interface is not None and not entry.has_dynamic_inputs:
        return ""
    if any(size < 1 for shape in shapes.values() for size in shape):
        return ""
    return variant_name(entry.name, shapes, interface)


def _stored_bytes(variant: ServedModel) -> int:
    files = {v.sha256: v.nbytes for v in variant.manifest.history.versions if v.kept}
    return sum(files.values())


def _loaded_bytes(variant: ServedModel) -> int:
    return variant.compiled.device_bytes if variant.compiled is not None else 0


def _describe(variant: ServedModel, wish: ShapeDemand | None, *, by_cpu: bool) -> ShownVariant:
    manifest = variant.manifest
    engine = "cpu" if by_cpu else "gpu"
    return ShownVariant(
        name=variant.name,
        shapes=dict(manifest.shapes),
        requests=wish.requests if wish is not None else 0.0,
        state="RESTING" if variant.deployment.number == 0 else variant.state.value,
        engine=engine,
        engine_name=ENGINE_NAMES[engine],
        version=manifest.history.number,
        why=manifest.decision.reason,
        by_hand=manifest.by_hand,
        bytes=_stored_bytes(variant),
        loaded_bytes=_loaded_bytes(variant),
        answered=variant.statistics.served,
    )


def _describe_failed(wish: ShapeDemand) -> ShownVariant:
    return ShownVariant(
        name=wish.name,
        shapes=dict(wish.shapes),
        requests=wish.requests,
        state="FAILED",
        engine="cpu",
        engine_name=ENGINE_NAMES["cpu"],
        version=0,
        why=wish.failed,
        by_hand=False,
        bytes=0,
        loaded_bytes=0,
        answered=0,
    )
