"""The chains of a service: what apps are told of them, and their requests."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from honed.daemon.apps.names import is_own
from honed.daemon.blocking import in_thread, to_its_end
from honed.daemon.changes.jobs import Jobs
from honed.daemon.core.registry import Registry
from honed.daemon.core.states import ServedModel, State
from honed.daemon.core.statistics import ServedInference, Statistics
from honed.daemon.observe.counting import counted
from honed.daemon.serving import inference
from honed.daemon.serving.sequencing import key_of
from honed.daemon.settings.limits import Limits
from honed.daemon.store.interface import Interface
from honed.daemon.worker.regions import RegionLookup
from honed.protocol.errors import (
    AlreadyExists,
    HonedError,
    InvalidArgument,
    ModelRefused,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from honed.protocol.methods import check_name
from honed.protocol.params import ChainParams, InferParams
from honed.protocol.results import ChainAdded, Inferred

from .between import BetweenMemory
from .definition import Chain, TensorSource, chained
from .fitting import interface
from .running import ChainRun, RunsModel, interface_for
from .stored import ChainStore

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class ServedChain:
    """A chain as it is served. `sizes` are bytes by step and output, as they were seen."""

    chain: Chain
    statistics: Statistics = field(default_factory=Statistics)
    sizes: dict[TensorSource, int] = field(default_factory=dict)
    _of: tuple[object, ...] = ()  # what the interface was found for
    _found: Interface | None = None

    def interface(self, registry: Registry) -> Interface:
        """What it takes and gives as its models are now; raises Unavailable where they cannot be a chain."""
        models = {step.model: _model(registry, step.name, step.model) for step in self.chain.steps}
        of = tuple(each for model in models.values() for each in (model.manifest, model.compiled))
        known = len(of) == len(self._of) and all(a is b for a, b in zip(of, self._of, strict=True))
        if self._found is None or not known:
            shown = {name: _shown(model) for name, model in models.items()}
            try:
                self._found = interface(self.chain, shown)
            except InvalidArgument as error:
                raise Unavailable(f"its models do not fit each other any more: {error}") from error
            self._of = of
        return self._found

    def state(self, registry: Registry) -> tuple[State, str]:
        """Whether it can be run, and why not, or ""."""
        try:
            self.interface(registry)
        except Unavailable as error:
            return State.UNAVAILABLE, str(error)
        states = {step.name: registry.model(step.model) for step in self.chain.steps}
        for name, model in states.items():
            if model.state is State.UNAVAILABLE:
                return (
                    State.UNAVAILABLE,
                    f"step {name!r}: model {model.name!r} is not available: {model.reason}",
                )
        loading = any(model.state is State.LOADING for model in states.values())
        return (State.LOADING if loading else State.READY), ""

    def engine(self, registry: Registry) -> str:
        """What its answers are told to be of: that of all steps, or "gpu+cpu" where they differ."""
        found = (registry.find(model) for model in self.chain.models)
        kinds = {model.kind for model in found if model is not None}
        return kinds.pop() if len(kinds) == 1 else "gpu+cpu"


@dataclass(slots=True, kw_only=True, eq=False)
class Chains:
    """Those of one service."""

    registry: Registry
    jobs: Jobs
    limits: Limits
    store: ChainStore
    memory: BetweenMemory
    _served: dict[str, ServedChain] = field(init=False, default_factory=dict)
    _changing: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def restore(self) -> list[str]:
        """Serve what was stored; gives a sentence for each that was damaged."""
        chains, damaged = await in_thread(self.store.read)
        self._served = {chain.name: ServedChain(chain=chain) for chain in chains}
        for sentence in damaged:
            _log.error("damaged: %s", sentence)
        return damaged

    def find(self, name: str) -> ServedChain | None:
        """The chain of that name, or None."""
        return self._served.get(name)

    def all(self) -> list[ServedChain]:
        """Every chain, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def needing(self, model: str) -> list[str]:
        """The chains that have a step of this model."""
        return [each.chain.name for each in self.all() if model in each.chain.models]

    # Changes

    async def add(self, params: ChainParams) -> ChainAdded:
        """Serve a chain; raises HonedError where it cannot be one, and then nothing has changed."""
        name = check_name(params.model_name)
        chain = chained(name, time.time(), params.steps, params.outputs)
        async with self._changing:
            self._check_name(name, bool(params.replace))
            fits = self._fits(chain)
            await to_its_end(self._keep(chain))
        return ChainAdded(
            model_name=name,
            steps=chain.steps,
            inputs=tuple(map(inference.describe, fits.inputs)),
            outputs=tuple(map(inference.describe, fits.outputs)),
        )

    async def remove(self, name: str) -> None:
        """Serve a chain no more; raises NotFound."""
        async with self._changing:
            await to_its_end(self._forget(name))

    async def remove_needing(self, model: str, *, allowed: bool) -> None:
        """Remove the chains with steps of a model that is to be removed; raises ModelRefused where not
        `allowed` and there are some.
        """
        async with self._changing:
            needing = self.needing(model)
            if needing and not allowed:
                raise _needed(model, needing)
            for name in needing:
                await to_its_end(self._forget(name))

    async def _keep(self, chain: Chain) -> None:
        """Store and serve one; whoever has it done has the lock."""
        await in_thread(self.store.write, chain)
        before = self._served.get(chain.name)
        self._served[chain.name] = ServedChain(chain=chain)
        if before is not None:
            self._served[chain.name].statistics = before.statistics
        _log.info("serving chain %s of %s", chain.name, ", ".join(chain.models))

    async def _forget(self, name: str) -> None:
        """The opposite."""
        if name not in self._served:
            raise NotFound(f"there is no chain {name[:80]!r}; 'hone list' shows which there are")
        await in_thread(self.store.remove, name)
        del self._served[name]
        _log.info("removed chain %s", name)

    def check_free(self, name: str) -> None:
        """Raise AlreadyExists where a model cannot be called so, since a chain is."""
        if name in self._served:
            raise AlreadyExists(f"{name!r} is a chain; remove it first, or choose another name")

    def check_method(self, name: str, method: str) -> None:
        """Raise InvalidArgument where `name` is a chain: the method is for what has a file of its own."""
        if name in self._served:
            steps = ", ".join(self._served[name].chain.models)
            raise InvalidArgument(
                f"{name!r} is a chain of models, which has no {method}; ask for one of {steps}"
            )

    def _check_name(self, name: str, replace: bool) -> None:
        if is_own(name):
            raise InvalidArgument(
                f"{name!r} could only be a model that an app has brought; choose another name"
            )
        if self.registry.find(name) is not None or self.jobs.adds(name):
            raise AlreadyExists(f"there is a model {name!r} already; choose another name")
        if name in self._served:
            if not replace:
                raise AlreadyExists(f"there is a chain {name!r} already; remove it first, or replace it")
        elif len(self._served) >= self.limits.max_models:
            raise ResourceExhausted(
                f"there are {len(self._served)} chains already, and limits.max_models is as many; remove some"
            )

    def _fits(self, chain: Chain) -> Interface:
        """What it takes and gives, once all is known to be as it must."""
        models: dict[str, Interface] = {}
        for step in chain.steps:
            if step.model in self._served or step.model == chain.name:
                raise InvalidArgument(
                    f"step {step.name!r}: {step.model!r} is a chain, and chains are made of models; "
                    "give its steps instead"
                )
            try:
                model = _model(self.registry, step.name, step.model)
                if step.model in self.jobs.leaving:
                    raise Unavailable(f"step {step.name!r}: model {step.model!r} is being removed")
                models[step.model] = _shown(model)
            except Unavailable as error:
                raise ModelRefused(f"{error}; add models first, and then the chain") from error
        return interface(chain, models)

    # Requests

    async def infer(
        self, served: ServedChain, params: InferParams, user: int, regions: RegionLookup, run: RunsModel
    ) -> Inferred:
        """The result of ModelInfer; raises what went wrong."""
        name, begun = served.chain.name, time.monotonic()
        with counted(served.statistics):
            if key_of(user, params) is not None:
                raise InvalidArgument(
                    f"{name!r} is a chain, for which no state is kept; leave sequence_id out, or run the "
                    "model that has state by itself"
                )
            try:
                takes = served.interface(self.registry)
            except Unavailable as error:
                raise Unavailable(f"chain {name!r} cannot be used: {error}") from error
            plan = inference.check(
                params, None, takes, regions, max_bytes=self.limits.max_answer_bytes, keep=False
            )
            work = ChainRun(served.chain, params, plan, self.registry, self.memory, served.sizes)
            result = await work.answer(user, run)
        now, times = time.monotonic(), result.parameters
        served.statistics.served(
            ServedInference(
                queued=times.queue_us / 1e6,
                whole=now - begun,
                input_ns=0,
                infer_ns=times.compute_us * 1000,
                output_ns=0,
                launches=0,
            ),
            now,
            time.time_ns() // 1_000_000,
        )
        served.statistics.answered_by(times.engine)
        return result


def _needed(model: str, chains: list[str]) -> ModelRefused:
    named = " and chain ".join(map(repr, chains))
    return ModelRefused(f"model {model!r} is needed by chain {named}; remove that first, or use --chains")


def _model(registry: Registry, step: str, name: str) -> ServedModel:
    """The model of a step, one of administrators; raises Unavailable."""
    try:
        model = registry.model(name)
    except HonedError as error:
        raise Unavailable(f"step {step!r}: {error}") from error
    if model.manifest.owner is not None:
        raise Unavailable(f"step {step!r}: there is no model {name!r}; 'hone list' shows which there are")
    return model


def _shown(model: ServedModel) -> Interface:
    """What a model takes and gives in any shapes; raises Unavailable."""
    given = model.manifest.interface
    return given if given is not None else interface_for(model, None)
