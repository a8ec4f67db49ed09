"""Engines that are lost: another serves their models until they are back.

The compiled files stay as they are: a file runs on any device within whose limits it is, and is served there
only if its probes are answered right (docs/format.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from honed.machine.families import FAMILIES
from honed.protocol.errors import Unavailable

from . import trials
from .actions import Back, HandOver, Refuse, StaysAway
from .events import Passed, ServerStopped, WorkerLost, WorkerReady
from .scheduling import dismiss, load_next, run_next, wake
from .shared import Core
from .states import MAX_CRASHES_AN_HOUR, Engine, Phase, ServedModel, State, is_cpu

CPU = "cpu"  # as a device: the first CPU there is
LINGERING_SECONDS = 40.0  # that the CPU engine keeps what it does not serve


def worker_ready(core: Core, event: WorkerReady) -> None:
    """Load what is to be served here, and what belongs here and is served elsewhere."""
    engine = core.engines[event.engine]
    engine.worker, engine.spec, engine.family = event.worker, event.spec, event.family
    engine.fingerprint = event.fingerprint
    if engine.phase is Phase.STOPPING:
        return
    engine.phase, engine.reason = Phase.READY, ""
    for model in core.models.all():
        if model.home == engine.name and not model.at_home:
            core.deploy(model, engine.name)
    load_next(core, engine)


def worker_lost(core: Core, event: WorkerLost) -> None:
    """Everything that was loaded is gone; where no worker starts, so is the engine."""
    engine = core.engines[event.engine]
    if engine.phase is not Phase.STOPPING:
        engine.phase = Phase.FAILED if event.failed else Phase.STARTING
    engine.reason = event.reason
    _forget_loaded(core, engine)
    suspect, engine.suspect = engine.suspect, None
    if suspect is not None and not event.from_outside:
        trials.fault(core, suspect, engine, event.reason)
        _count_crash(core, engine, suspect, event.reason)
    if engine.phase is Phase.FAILED:
        fail_over(core, engine)
    dismiss(core, engine)


def server_stopped(core: Core, event: ServerStopped) -> None:
    """A stand-in rests, unless it is needed again."""
    engine = core.engines[event.engine]
    engine.phase = Phase.RESTING
    _forget_loaded(core, engine)
    if engine.rests:
        wanted = engine.queue.models()
        for model, deployment in core.on(engine):
            deployment.resting = model.name not in wanted and not core.comes_home(model, engine)
    if core.needed(engine):
        wake(core, engine)


def come_back(core: Core, model: ServedModel, engine: Engine) -> None:
    """The engine that a model belongs to has loaded it: it serves again."""
    left = core.engines[model.engine]
    model.engine, model.away = engine.name, ""
    model.blame.crashes = 0
    core.move_waiting(model.name, left.name, engine.name)
    core.leave(model, left)
    core.act(Back(model.name, engine.shown))
    dismiss(core, left)


def stay_away(core: Core, model: ServedModel, engine: Engine, reason: str) -> None:
    """The engine that a model belongs to is back and cannot run it."""
    del model.deployments[engine.name]
    if is_cpu(engine.name):
        core.refuse_open(model, Unavailable(f"model {model.name!r} cannot be used so: {reason}"))
    stand_in = core.engines[model.engine].shown
    model.away = f"{stand_in} stands in for {engine.shown}, which fails: {reason}"
    core.act(StaysAway(model.name, stand_in, reason))


def passed(core: Core, _: Passed) -> None:
    """Let go of what the CPU engine does not serve, and nobody asked for lately."""
    for engine in list(core.engines.values()):
        if is_cpu(engine.name):
            _let_go(core, engine)


def _let_go(core: Core, cpu: Engine) -> None:
    wanted = cpu.queue.models()
    for model, deployment in core.on(cpu):
        idle = core.now - deployment.used > LINGERING_SECONDS and model.name not in wanted
        if model.on_cpu or deployment.loading or not idle:
            continue
        if cpu.running is None or cpu.running.model is not model:
            core.leave(model, cpu)
    dismiss(core, cpu)


def fail_over(core: Core, engine: Engine) -> None:
    """Have another engine serve the models of one that is lost; where there is none, requests are told so."""
    _hand_over(core, engine)
    for ticket in engine.queue.drop_all():
        core.act(Refuse(ticket.number, Unavailable(f"the worker does not start ({engine.reason})")))


def _forget_loaded(core: Core, engine: Engine) -> None:
    engine.proving = None
    wanted = engine.queue.models()
    for model, deployment in core.on(engine):
        deployment.lost()
        if model.engine != engine.name and model.name not in wanted and not core.comes_home(model, engine):
            del model.deployments[engine.name]


def _count_crash(core: Core, engine: Engine, model: ServedModel, reason: str) -> None:
    """A model that ends workers now and then goes, before it costs the others more."""
    times = model.blame.crashed(core.now)
    deployment = model.deployments.get(engine.name) if core.models.serves(model) else None
    here = deployment is not None and deployment.state is not State.UNAVAILABLE
    if times > MAX_CRASHES_AN_HOUR and here:
        told = f"{times} workers ended running it within an hour; last: {reason}"
        trials.give_up_on(core, model, engine, told)


def _hand_over(core: Core, engine: Engine) -> None:
    moved: dict[str, list[ServedModel]] = {}
    for model in core.models.of(engine.name):
        other = _other_for(core, engine, model) if model.state is not State.UNAVAILABLE else None
        if other is not None and other.phase is not Phase.FAILED:
            moved.setdefault(other.name, []).append(model)
    for name, models in moved.items():
        _move(core, models, engine, core.engines[name])


def _move(core: Core, models: Sequence[ServedModel], engine: Engine, other: Engine) -> None:
    away = f"{other.shown} stands in for {engine.shown}, which is lost: {engine.reason}"
    for model in models:
        del model.deployments[engine.name]
        if other.name not in model.deployments:
            core.deploy(model, other.name)
        model.engine, model.away = other.name, away
        core.move_waiting(model.name, engine.name, other.name)
    names = tuple(model.name for model in models)
    core.act(HandOver(engine.shown, other.shown, names, engine.reason))
    wake(core, other)
    load_next(core, other)
    run_next(core, other)


def _other_for(core: Core, engine: Engine, model: ServedModel) -> Engine | None:
    """Who serves a model while an engine is lost: the CPU engine where it can, the device in its place."""
    other = core.other_for(model, engine)
    return other if other is not None or is_cpu(engine.name) else _stand_in_for(core, engine)


def _on_processor(engine: Engine) -> bool:
    family = FAMILIES.get(engine.family)  # "": no worker has told it yet
    return family is not None and family.processor


def _stand_in_for(core: Core, engine: Engine) -> Engine | None:
    """The fallback, unless that is the engine itself."""
    wanted = core.fallback.casefold()
    if not wanted or engine.name.casefold() == wanted or engine.stand_in:
        return None
    if wanted == CPU and _on_processor(engine):
        return None
    for other in core.engines.values():
        if other is not engine and (
            other.name.casefold() == wanted
            or (wanted == CPU and _on_processor(other) and other.phase is Phase.READY)
        ):
            return other
    return core.add_engine(core.fallback, stand_in=True)
