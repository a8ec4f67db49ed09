"""Provides the state that the machine's modules share: engines, models by name, and pending actions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from honed.daemon.core.queue import ModelReplaced, Queue, Ticket
from honed.daemon.core.statistics import Statistics
from honed.daemon.store.compiled import CompiledFileInfo, Interface
from honed.daemon.store.names import EVERYTHING, Viewer, is_variant, model_of
from honed.daemon.store.store import Manifest
from honed.protocol.errors import HonedError, NotFound, Unavailable
from honed.protocol.values import OptimisationCheck, OrtSessionConfig

from .messages import Action, Refuse, Unload
from .model import (
    CPU_ENGINE,
    RESTING_SECONDS,
    Deployment,
    Engine,
    Phase,
    ServedModel,
    State,
    cpu_engine,
    is_cpu,
)


class Core:
    """The state of one machine: `models` at the version that is served, and `engines`, both by name.

    `cpu` is the shared CPU engine, None without one; users' CPU engines are created on demand.
    """

    def __init__(
        self,
        registry: Registry,
        engines: tuple[str, ...],
        fallback: str,
        max_queue: int,
        *,
        cpu: bool = False,
        policy: str = "fastest",
    ) -> None:
        """Initialise with the names of the `engines`; `fallback` names the one to fail over to, "" for none.

        `cpu` says whether ONNX Runtime is installed. `policy` is the setting serve.engine.
        """
        self.policy = policy
        self.models = registry
        self.fallback = fallback
        self.max_queue = max_queue
        self.engines: dict[str, Engine] = {}
        self.now = 0.0  # Time of the current event (monotonic seconds)
        self.wall = 0.0  # Time of the current event (seconds since 1970)
        self._actions: list[Action] = []
        self._numbers = itertools.count(1)
        for name in engines:
            self.add_engine(name)
        self.cpu = self.add_engine(CPU_ENGINE, stand_in=True) if cpu else None

    def act(self, action: Action) -> None:
        """Append an action to those to perform."""
        self._actions.append(action)

    def drain_actions(self) -> list[Action]:
        """Return the actions to perform, and clear them."""
        actions, self._actions = self._actions, []
        return actions

    def add_engine(self, name: str, *, stand_in: bool = False) -> Engine:
        """Add an engine, and return it; with `stand_in` it starts on demand."""
        phase = Phase.RESTING if stand_in else Phase.STARTING
        engine = Engine(name=name, queue=Queue(self.max_queue), on_demand=stand_in, phase=phase)
        self.engines[name] = engine
        return engine

    def cpu_of(self, owner: int | None, *, isolated: bool = False) -> Engine | None:
        """Return the CPU engine for a user's own models, created if needed; None without ONNX Runtime.

        `owner` None stands for the models of administrators; `isolated` selects the engine of isolated ones.
        """
        if self.cpu is None:
            return None
        name = cpu_engine(owner, isolated=isolated)
        engine = self.engines.get(name)
        if engine is None:
            engine = self.add_engine(name, stand_in=True)
            engine.owner, engine.isolating = owner, isolated
        return engine

    def cpu_engine_of(self, model: ServedModel) -> Engine | None:
        """Return the CPU engine that may run a model; None without ONNX Runtime."""
        return self.cpu_of(model.manifest.owner, isolated=bool(model.isolated))

    def of_kind(self, model: ServedModel, kind: str) -> Engine | None:
        """Return the engine of a kind, "gpu" or "cpu", that may run a model; None if it is missing."""
        return self.cpu_engine_of(model) if kind == "cpu" else self.engines[model.device]

    def other_for(self, model: ServedModel, engine: Engine) -> Engine | None:
        """Return the engine of the other kind that can serve a model instead of `engine`, or None.

        An engine in `rejected_by` does not count.
        """
        other = None
        if is_cpu(engine.name):
            other = self.of_kind(model, "gpu") if model.compiled is not None else None
        elif model.can_run_on_cpu:
            other = self.of_kind(model, "cpu")
        return other if other is not None and other.name not in model.rejected_by else None

    def new_model(
        self,
        manifest: Manifest,
        compiled: CompiledFileInfo | None,
        device: str,
        *,
        home: str | None = None,
        engine: str | None = None,
    ) -> ServedModel:
        """Return a version, not installed yet, to be served by `engine`, by default `home`, else `device`."""
        belongs = device if home is None else home
        serves = belongs if engine is None else engine
        model = ServedModel(
            number=next(self._numbers),
            manifest=manifest,
            compiled=compiled,
            device=device,
            preferred_engine=belongs,
            engine=serves,
        )
        self.deploy(model, serves)
        return model

    def install(self, model: ServedModel) -> ServedModel | None:
        """Serve a model from now on, and return the one that it replaces, whose requests now wait for it."""
        replaced = self.models.put(model)
        if replaced is not None:
            self._end_isolated(replaced)
            self._take_over(model, replaced)
            if replaced.engine != model.engine:
                self.requeue(model.name, replaced.engine, model.engine)
        return replaced

    def _end_isolated(self, model: ServedModel) -> None:
        """Refuse the requests that wait for a replaced model on the isolating engine, and unload it there."""
        engine = self.engines.get(cpu_engine(model.manifest.owner, isolated=True))
        if engine is not None:
            self.refuse(engine.queue.drop_model(model.name), replacement_error(model.name))
            if engine.name in model.deployments:
                self.unload_unused(engine.name, model.key_on(engine.name))

    def _take_over(self, model: ServedModel, replaced: ServedModel) -> None:
        """Take over the CPU engine's deployment of the replaced version if both have the same source.

        Otherwise refuse the requests that only that engine can run.
        """
        cpu = model.cpu_engine
        kept = replaced.deployments.get(cpu)
        if kept is not None and model.can_run_on_cpu and model.key_on(cpu) == replaced.key_on(cpu):
            model.deployments[cpu] = kept
            if kept.state is State.UNAVAILABLE:
                self.deploy(model, cpu)
            return
        self.refuse_open(model, replacement_error(model.name))

    def deploy(self, model: ServedModel, engine: str) -> Deployment:
        """Add and return a deployment of a model on an engine, not loaded yet."""
        deployment = model.deployments[engine] = Deployment(number=next(self._numbers), engine=engine)
        return deployment

    def find_deployment(self, number: int) -> tuple[ServedModel, Deployment] | None:
        """Return a served model and its deployment of that number; None if it is gone."""
        for model in self.models.all():
            for deployment in model.deployments.values():
                if deployment.number == number:
                    return model, deployment
        return None

    def deployments_on(self, engine: Engine) -> list[tuple[ServedModel, Deployment]]:
        """Return every deployment on an engine with its model, by the names of the models."""
        return [
            (model, model.deployments[engine.name])
            for model in self.models.all()
            if engine.name in model.deployments
        ]

    def is_served_by(self, model: ServedModel, engine: Engine) -> bool:
        """Return whether a model is the served version, and this engine serves it."""
        return model.engine == engine.name and self.models.serves(model)

    def refuse(self, tickets: Iterable[Ticket], error: HonedError) -> None:
        """Refuse requests that were taken from a queue."""
        for ticket in tickets:
            self.act(Refuse(ticket.number, error))

    def refuse_open(self, model: ServedModel, error: HonedError) -> None:
        """Refuse a model's waiting requests that only the CPU engine can run."""
        cpu = self.engines.get(model.cpu_engine)
        if cpu is not None:
            self.refuse(cpu.queue.drop_model(model.name, open_ones=True), error)

    def requeue(self, name: str, left: str, other: str) -> None:
        """Move a model's waiting requests to another engine, but not those that need the CPU engine."""
        for ticket in self.engines[left].queue.drop_model(name, open_ones=False):
            self.engines[other].queue.retry(ticket)

    def engine_for(self, model: ServedModel, ticket: Ticket) -> Engine:
        """Return the engine on which a request is to run."""
        cpu = None
        if ticket.isolated:
            cpu = self.cpu_of(model.manifest.owner, isolated=True)
        elif ticket.needs_cpu_engine:
            cpu = self.cpu_engine_of(model)
        return cpu or self.engines[model.engine]

    def undeploy(self, model: ServedModel, engine: Engine) -> None:
        """Remove the deployment on an engine that does not serve the model, unless requests wait there."""
        if model.name in engine.queue.models():
            model.deployments[engine.name].used = self.now
            return
        del model.deployments[engine.name]
        self.unload_unused(engine.name, model.key_on(engine.name))

    def is_needed(self, engine: Engine) -> bool:
        """Return whether an engine has models or requests that it must run for."""
        if engine.stops_when_unused:
            if any(self.awaits_failback(model, engine) for model, _ in self.deployments_on(engine)):
                return True
            return any(engine.kept.values()) or bool(engine.queue.models()) or self._was_used_lately(engine)
        for model in self.models.all_unordered():
            if model.preferred_engine == engine.name or engine.name in model.deployments:
                return True
        return any(engine.kept.values())

    def awaits_failback(self, model: ServedModel, engine: Engine) -> bool:
        """Return whether an engine is a model's preferred one while another engine serves it."""
        return model.preferred_engine == engine.name and model.engine != engine.name

    def _was_used_lately(self, engine: Engine) -> bool:
        """Return whether an engine is loading, or had a request within `RESTING_SECONDS`."""
        since = self.now - RESTING_SECONDS
        return any(each.used > since or each.loading for _, each in self.deployments_on(engine))

    def unload_unused(self, engine: str, key: str) -> None:
        """Unload a compiled file from an engine unless a model there uses it, or it is pinned or running.

        A run may not have reached the worker yet, so the file is unloaded when the run ends (`requests`).
        """
        place = self.engines[engine]
        if place.kept[key] or any(each.model.key_on(engine) == key for each in place.running.values()):
            return
        for model in self.models.all():
            before = model.canary.before if model.canary is not None else None
            if before is not None and (before.key_on(engine), before.engine) == (key, engine):
                return
            deployment = model.deployments.get(engine)
            if deployment is not None and deployment.used_there and model.key_on(engine) == key:
                return
        del place.kept[key]
        self.act(Unload(engine, key))

    def mark_unloaded(self, engine: Engine, key: str) -> None:
        """Note that an engine has dropped a file; the next request loads it again."""
        for model, deployment in self.deployments_on(engine):
            if model.key_on(engine.name) == key and deployment.state is State.READY:
                deployment.mark_lost()
                deployment.resting = model.name not in engine.queue.models()


def replacement_error(name: str) -> ModelReplaced:
    """Return the error for a request that the model which replaced its own may not accept."""
    return ModelReplaced(f"model {name!r} was replaced while the request waited; send it again")


def unusable(model: str, reason: str) -> Unavailable:
    """Return the error for requests for a model that no engine can run."""
    return Unavailable(f"model {model!r} cannot be used: {reason}")


def removal_error(name: str) -> NotFound:
    """Return the error for requests whose model was removed while they waited."""
    return NotFound(f"model {name!r} was removed; 'hone list' shows which there are")


# ---- The models by name ----
#
# Only the machine adds and removes them; every module may read them.


class Registry:
    """A registry of all models at the version that is served, and of suspended variants.

    `all_statistics` counts the requests for all models, also removed and unknown ones; `shared_statistics`
    leaves out users' own models.
    """

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._resting: dict[str, ServedModel] = {}  # Suspended variants
        self.rechecked: dict[str, OptimisationCheck] = {}  # New checks of sources being reloaded, by key
        self.all_statistics = Statistics()
        self.shared_statistics = Statistics(parent=self.all_statistics)

    def put(self, model: ServedModel) -> ServedModel | None:
        """Add a model, and return the one that it replaces, whose statistics it continues."""
        replaced = self._models.get(model.name)
        self._count(model, replaced or self._resting.pop(model.name, None))
        self._models[model.name] = model
        return replaced

    def suspend(self, model: ServedModel) -> None:
        """Store a variant that no engine serves, in place of a suspended one of its name."""
        self._count(model, self._resting.get(model.name))
        self._resting[model.name] = model

    def forget_resting(self, name: str) -> bool:
        """Remove a suspended variant; return False if there is none of that name."""
        return self._resting.pop(name, None) is not None

    def _count(self, model: ServedModel, before: ServedModel | None) -> None:
        """Set a model's statistics: those of `before`, or new ones; a variant's also count for its model."""
        if before is not None:
            model.statistics = before.statistics
        elif model.statistics.parent is None:
            of = self._models.get(model_of(model.name))
            every = self.shared_statistics if model.manifest.owner is None else self.all_statistics
            model.statistics = Statistics(parent=of.statistics if of is not None else every)

    def pop(self, name: str) -> ServedModel:
        """Remove and return a model; raise NotFound if there is none."""
        model = self.get(name)
        del self._models[name]
        return model

    def get(self, name: str) -> ServedModel:
        """Return the model of that name; raise NotFound if there is none."""
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"there is no model {name[:80]!r}; 'hone list' shows which there are")
        return model

    def model(self, name: str) -> ServedModel:
        """Return the model of that name; raise NotFound if there is none, or it is a variant.

        Requests of apps use this, as apps do not know variants.
        """
        if is_variant(name):
            raise NotFound(
                f"{name[:80]!r} is a variant; ask its model, {model_of(name)[:80]!r}, in its shapes"
            )
        return self.get(name)

    def variant(self, name: str) -> ServedModel | None:
        """Return the variant of that name, served or suspended, or None."""
        return (self._resting.get(name) or self._models.get(name)) if is_variant(name) else None

    def entry(self, name: str) -> ServedModel:
        """Return a model, or a variant even if suspended; raise NotFound if there is none."""
        return self.variant(name) or self.get(name)

    def is_suspended(self, model: ServedModel) -> bool:
        """Return whether a model is a suspended variant."""
        return self._resting.get(model.name) is model

    def find(self, name: str) -> ServedModel | None:
        """Return the model of that name, or None."""
        return self._models.get(name)

    def serves(self, model: ServedModel) -> bool:
        """Return whether a model is the version that is served."""
        return self._models.get(model.name) is model

    def keeps(self, model: ServedModel) -> bool:
        """Return whether a model's manifest is that of the version served, or of a suspended variant."""
        kept = self._models.get(model.name) or self._resting.get(model.name)
        return kept is not None and kept.manifest is model.manifest

    def find_by_number(self, number: int) -> ServedModel | None:
        """Return the version of that number while it is served, or None."""
        return next((model for model in self._models.values() if model.number == number), None)

    def statistics(self, name: str) -> Statistics:
        """Return the statistics in which requests for that name are counted."""
        model = self._models.get(name)
        return model.statistics if model else self.shared_statistics

    def require_compiled(self, name: str) -> tuple[ServedModel, CompiledFileInfo]:
        """Return a model and its compiled file's info; raise NotFound, or Unavailable if it has none."""
        model = self.entry(name)
        if model.compiled is None and model.on_cpu:
            why = model.manifest.decision.reason or "it is being compiled"
            raise Unavailable(f"model {name!r} has no compiled form: {why}")
        if model.compiled is None:
            raise unusable(name, model.reason)
        return model, model.compiled

    def interfaces(self, model: ServedModel) -> tuple[Interface | None, Interface | None]:
        """Return the interfaces of the compiled file, and of the ONNX file if the CPU engine can run it.

        At least one is not None; raises Unavailable if neither exists.
        """
        compiled, given = model.compiled, model.manifest.interface
        if compiled is None and given is None:
            self.require_compiled(model.name)  # Raises the error that says why
        return compiled.interface if compiled is not None else None, given

    def all_unordered(self) -> Iterable[ServedModel]:
        """Return every model and variant that is served."""
        return self._models.values()

    def all(self) -> list[ServedModel]:
        """Return every model and variant that is served, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def models(self, viewer: Viewer = EVERYTHING) -> list[ServedModel]:
        """Return the models that `viewer` may see, by name, without variants."""
        models = (model for model in self.all() if not is_variant(model.name))
        return [model for model in models if viewer.sees(model.manifest.owner)]

    def own_names(self, viewer: Viewer) -> frozenset[str]:
        """Return the names of users' own models that `viewer` may see."""
        return frozenset(each.name for each in self.models(viewer) if each.manifest.owner is not None)

    def variants(self, model: str = "") -> list[ServedModel]:
        """Return the variants of a model, or with "" of all, by name, also suspended ones."""
        known = {name: each for name, each in self._models.items() if is_variant(name)} | self._resting
        return [each for name, each in sorted(known.items()) if model in ("", model_of(name))]

    def of(self, engine: str) -> list[ServedModel]:
        """Return every model that an engine serves, by name."""
        return [model for model in self.all() if model.engine == engine]

    def manifests(self) -> list[Manifest]:
        """Return the manifests of all models and variants: the files that the store must keep."""
        return [model.manifest for model in (*self.all(), *self._resting.values())]

    def optimisation(self, source: str) -> OptimisationCheck | None:
        """Return the check of the file with the key `source`; None if it has not been checked."""
        known = (m.optimisation for m in self.manifests() if m.optimisation and m.source_key == source)
        return next(known, None)

    def session_config(self, source: str) -> OrtSessionConfig:
        """Return the session configuration with which ONNX Runtime is to run the source with this key."""
        found = self.rechecked.get(source) or self.optimisation(source)
        return found.session_config if found is not None else OrtSessionConfig()

    def count(self, state: State, viewer: Viewer = EVERYTHING) -> int:
        """Return the number of models in a state that `viewer` may see, without variants."""
        return sum(model.state is state for model in self.models(viewer))
