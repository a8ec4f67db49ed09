"""Engines that are lost: another serves their models until they are back.

The compiled files stay as they are: a file runs on any device within whose limits it is, and is served there
only if its probes are answered right (docs/format.md).
"""

from __future__ import annotations

from honed.protocol.errors import Unavailable
from honed.runtime.families import FAMILIES

from . import trials
from .actions import Back, HandOver, Refuse, StartServer, StaysAway, StopServer
from .core import Core
from .events import ServerStopped, WorkerLost, WorkerReady
from .scheduling import load_next
from .states import MAX_CRASHES_AN_HOUR, Engine, Phase, ServedModel, State

CPU = "cpu"  # as a device: the first CPU there is


def worker_ready(core: Core, event: WorkerReady) -> None:
    """Load what is to be served here, and what belongs here and is served elsewhere."""
    engine = core.engines[event.engine]
    engine.worker, engine.spec, engine.family = event.worker, event.spec, event.family
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
        trials.fault(core, suspect, event.reason)
        _count_crash(core, engine, suspect, event.reason)
    if engine.phase is Phase.FAILED:
        fail_over(core, engine)


def server_stopped(core: Core, event: ServerStopped) -> None:
    """A stand-in rests, unless it is needed again."""
    engine = core.engines[event.engine]
    engine.phase = Phase.RESTING
    _forget_loaded(core, engine)
    if core.models.of(engine.name):
        _start(core, engine)


def come_back(core: Core, model: ServedModel, engine: Engine) -> None:
    """The engine that a model belongs to has loaded it: it serves again."""
    left = core.engines[model.engine]
    del model.deployments[left.name]
    model.engine, model.away = engine.name, ""
    model.blame.crashes = 0
    core.move_waiting(model.name, left.name, engine.name)
    core.unload_unused(left.name, model.key)
    core.act(Back(model.name, engine.shown))
    dismiss(core, left)


def stay_away(core: Core, model: ServedModel, engine: Engine, reason: str) -> None:
    """The engine that a model belongs to is back and cannot run it."""
    del model.deployments[engine.name]
    stand_in = core.engines[model.engine].shown
    model.away = f"{stand_in} stands in for {engine.shown}, which fails: {reason}"
    core.act(StaysAway(model.name, stand_in, reason))


def dismiss(core: Core, engine: Engine) -> None:
    """Stop a stand-in that serves nothing any more, once what runs there has ended."""
    if not engine.stand_in or engine.running is not None or core.models.of(engine.name):
        return
    if engine.phase not in (Phase.RESTING, Phase.STOPPING):
        engine.phase = Phase.STOPPING
        core.act(StopServer(engine.name))


def fail_over(core: Core, engine: Engine) -> None:
    """Have another engine serve the models of one that is lost; where there is none, requests are told so."""
    _hand_over(core, engine)
    for ticket in engine.queue.drop_all():
        core.act(Refuse(ticket.number, Unavailable(f"the worker does not start ({engine.reason})")))


def _forget_loaded(core: Core, engine: Engine) -> None:
    engine.proving = None
    for model, deployment in core.on(engine):
        deployment.lost()
        if model.engine != engine.name:
            del model.deployments[engine.name]


def _count_crash(core: Core, engine: Engine, model: ServedModel, reason: str) -> None:
    """A model that ends workers now and then goes, before it costs the others more."""
    times = model.blame.crashed(core.now)
    here = core.served_by(model, engine) and model.state is not State.UNAVAILABLE
    if times > MAX_CRASHES_AN_HOUR and here:
        trials.give_up(core, model, f"{times} workers ended running it within an hour; last: {reason}")


def _hand_over(core: Core, engine: Engine) -> None:
    models = [model for model in core.models.of(engine.name) if model.state is not State.UNAVAILABLE]
    other = _stand_in_for(core, engine) if models else None
    if other is None or other.phase is Phase.FAILED:
        return
    away = f"{other.shown} stands in for {engine.shown}, which is lost: {engine.reason}"
    for model in models:
        del model.deployments[engine.name]
        core.deploy(model, other.name)
        model.engine, model.away = other.name, away
        core.move_waiting(model.name, engine.name, other.name)
    names = tuple(model.name for model in models)
    core.act(HandOver(engine.shown, other.shown, names, engine.reason))
    if other.phase is Phase.RESTING:
        _start(core, other)
    load_next(core, other)


def _start(core: Core, engine: Engine) -> None:
    engine.phase = Phase.STARTING
    core.act(StartServer(engine.name))


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
