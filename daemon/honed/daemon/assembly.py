"""Builds the components of the service; `service.py` starts them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.machine.processors import first_placement, half_arithmetic, processors
from honed.protocol.service import ServicePlaces

from .aio import in_thread
from .background import Background
from .changes.add import ModelInstaller
from .changes.change import Changes, StoreWriter
from .changes.publish import Publisher
from .config import Config, Reloader
from .core.state import Registry
from .feature import Feature
from .features.batching import Batcher
from .features.beside import Beside
from .features.decoders import Decoders
from .features.half import HalfForms
from .features.reselection import EngineReselection
from .features.sequences import SequenceFeature
from .features.sizes import SizeSpecialiser
from .features.user_models import QuotaFile, Receiver, UserModels
from .features.variants import ShapeVariants, VariantCompiler
from .idle.leasing import Leasing
from .listener import SocketServer
from .methods.methods import Api
from .methods.metrics import MetricsCollector
from .methods.pipeline import InferencePipeline
from .observe.kernelwatch import KernelWatch
from .observe.latencies import Keeper
from .observe.usage import UsageLog
from .serving.pool import EngineManager, EngineSettings
from .settings.places import records_in
from .store.inspector import Inspector
from .store.store import Store
from .transport.access import current_policy
from .tuning.process import TunerChild

if TYPE_CHECKING:
    from .tuning.runs import TunerRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedServices:
    """The services that components share: models, engines, changes, and usage."""

    config: Config
    started: float  # Start of the service (time.monotonic)
    store: Store
    registry: Registry
    curves: Keeper
    pool: EngineManager
    changes: Changes
    installer: ModelInstaller
    clients: SocketServer
    usage_log: UsageLog
    leasing: Leasing

    def apply_config(self, new: Config) -> None:
        """Apply a configuration that was read again."""
        self.usage_log.change(new.usage)
        self.leasing.change(new.idle)
        self.pool.limits_changed()
        self.clients.limits_changed()


async def build_shared_services(config: Config, store: Store, listening: socket.socket) -> SharedServices:
    """Build the shared services on a store; the caller adds the models next."""
    places, limits, policy = config.service, config.limits, config.serve.engine
    registry = Registry()
    commits, inspector = StoreWriter(store, registry), Inspector()
    curves = await in_thread(Keeper, places.state_dir / "latencies.json")
    ledger = await in_thread(
        UsageLog, places.state_dir / "usage.json", config.usage, clock=time.monotonic, wall=time.time
    )
    settings = EngineSettings(
        service=places, limits=limits, cpu=config.cpu, user_mib=config.apps.memory_mib, policy=policy
    )
    pool = EngineManager(settings, registry, store, commits.persist, inspector, curves.latencies)
    changes = Changes(limits, store, registry, pool, commits, inspector, records_in(places.state_dir))
    return SharedServices(
        config=config,
        started=time.monotonic(),
        store=store,
        registry=registry,
        curves=curves,
        pool=pool,
        changes=changes,
        installer=ModelInstaller(changes, policy, places.cache_dir),
        clients=SocketServer(listening, limits, pool),
        usage_log=ledger,
        leasing=Leasing(config.idle, lambda: pool.default.engine.state),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceComponents:
    """The components that serve clients and do background work."""

    base: SharedServices
    publisher: Publisher
    pipeline: InferencePipeline
    features: Sequence[Feature]
    background: Background
    tuner: TunerChild
    watch: KernelWatch

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the coroutines that run as long as the service; the last ones end first."""
        base = self.base
        return (
            base.usage_log.keep(),
            base.curves.keep(),
            base.pool.run(),
            base.leasing.run(),
            self.watch.run(),
            self.tuner.run(),
            *(feature.run() for feature in self.features),
            self.background.run(),
        )


async def assemble(base: SharedServices, reloader: Reloader) -> ServiceComponents:
    """Build the components that depend on `base`."""
    publisher = Publisher(
        changes=base.changes,
        registry=base.registry,
        pool=base.pool,
        latencies=base.curves.latencies,
        policy=base.config.serve.engine,
    )
    pipeline = InferencePipeline(
        limits=base.config.limits,
        registry=base.registry,
        pool=base.pool,
        leasing=base.leasing,
        usage_log=base.usage_log,
    )
    features = await _features(base, reloader, publisher, pipeline)
    pipeline.features = features
    base.pool.version_comparer = lambda entry: next(
        (found for each in features if (found := each.version_comparer(entry))), None
    )
    known = (base.curves.latencies.forget, base.usage_log.forget, base.leasing.forget)
    idly: list[Feature] = [
        *features,
        EngineReselection(changes=base.changes, registry=base.registry, leasing=base.leasing),
    ]
    if base.pool.cpu is not None and half_arithmetic(Path("/")):
        found = await in_thread(processors, Path("/"), os.sched_getaffinity(0))
        idly.append(
            HalfForms(
                changes=base.changes,
                registry=base.registry,
                leasing=base.leasing,
                store=base.store,
                placed=first_placement(found, base.config.cpu.threads),
            )
        )
    base.changes.forget = [*known, *(each.forget for each in idly)]
    return ServiceComponents(
        base=base,
        publisher=publisher,
        pipeline=pipeline,
        features=features,
        background=Background(leasing=base.leasing, jobs=base.changes.active, sources=tuple(idly)),
        tuner=TunerChild(base.config.tuner, base.config.service.socket),
        watch=KernelWatch(base.pool.workers),
    )


async def _features(
    base: SharedServices,
    reloader: Reloader,
    publisher: Publisher,
    pipeline: InferencePipeline,
) -> tuple[Feature, ...]:
    """Build the features; requests pass through them from the first to the last."""
    limits, policy = base.config.limits, base.config.serve.engine
    shares = await in_thread(QuotaFile, base.config.service.state_dir / "apps.json")
    user_models = UserModels(
        settings=lambda: reloader.config.apps,
        registry=base.registry,
        changes=base.changes,
        installer=base.installer,
        leasing=base.leasing,
        receiver=Receiver(limits.load_seconds),
        shares_file=shares,
        policy=policy,
    )
    maker = VariantCompiler(changes=base.changes, registry=base.registry, pool=base.pool, policy=policy)
    variants = ShapeVariants(
        maker=maker,
        registry=base.registry,
        usage_log=base.usage_log,
        leasing=base.leasing,
        settings=lambda: reloader.config.variants,
        rewrap=pipeline.rewrap,
        may_compile=user_models.may_compile,
        compiled=user_models.count_compile_seconds,
    )
    sequencer = SequenceFeature(lambda: reloader.config.sequences, base.registry)
    return (
        user_models,
        sequencer,
        variants,
        Beside(registry=base.registry, users=user_models, variants=variants, usage_log=base.usage_log),
        Decoders(
            sequencer=sequencer,
            registry=base.registry,
            pool=base.pool,
            leasing=base.leasing,
            usage_log=base.usage_log,
            limits=base.config.limits,
            maker=maker,
            settings=lambda: reloader.config.variants,
        ),
        SizeSpecialiser(
            changes=base.changes,
            registry=base.registry,
            pool=base.pool,
            publisher=publisher,
            usage_log=base.usage_log,
            leasing=base.leasing,
            policy=policy,
            settings=lambda: reloader.config.variants,
            may_compile=user_models.may_compile,
            compiled=user_models.count_compile_seconds,
        ),
        Batcher(base.pool, base.usage_log, base.leasing, pipeline.plan),
    )


def methods(parts: ServiceComponents, reloader: Reloader, damaged: Sequence[str]) -> Api:
    """Build the API that answers the methods of the socket.

    `damaged` are sentences about models that could not be read.
    """
    base, places = parts.base, parts.base.config.service
    limits = base.config.limits
    return Api(
        limits=limits,
        policy=current_policy(os.getuid()),
        places=ServicePlaces(
            socket=str(places.socket), state_dir=str(places.state_dir), cache_dir=str(places.cache_dir)
        ),
        registry=base.registry,
        engines=base.pool,
        changes=base.changes,
        installer=base.installer,
        publisher=parts.publisher,
        usage_log=base.usage_log,
        pipeline=parts.pipeline,
        metrics=MetricsCollector(
            started=base.started,
            registry=base.registry,
            pool=base.pool,
            usage_log=base.usage_log,
            tuner=parts.tuner,
            connections=lambda: base.clients.connections,
            lease=base.leasing.metrics,
            gpu_faults=parts.watch.figures,
        ),
        leasing=base.leasing,
        tuner=parts.tuner,
        tuner_runs=cache(partial(_tuner_runs, parts, reloader)),
        reloader=reloader,
        features=parts.features,
        connections=lambda: base.clients.connections,
        damaged=list(damaged),
    )


def _tuner_runs(parts: ServiceComponents, reloader: Reloader) -> TunerRuns:
    from .tuning.runs import TunerRuns

    base = parts.base
    return TunerRuns(
        limits=base.config.limits,
        store=base.store,
        registry=base.registry,
        engines=base.pool,
        publisher=parts.publisher,
        tuner=parts.tuner,
        records=records_in(base.config.service.state_dir),
        cache_dir=base.config.service.cache_dir,
        tuner_mib=base.config.tuner.memory_mib,
        hints=lambda: reloader.config.hub.trials,
    )
