"""Which of two engines a model belongs to: choices that are made, pinned, and due to be made again.

A choice stands on times that both engines took in turns. It is made anew when the device, its driver or ONNX
Runtime is another than it was then, and when requests take longer than those times allow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from honed.runtime.engines import HIGHEST

from . import failover, trials
from .actions import Compare, EngineChanged, Persist
from .events import EngineChosen, InferenceTimed, NotCompared, OptimisationChecked, WorkerReady
from .scheduling import dismiss, load_next, run_next, wake
from .shared import Core
from .states import DRIFT_SECONDS, Engine, Phase, ServedModel, State


def timed(core: Core, event: InferenceTimed) -> None:
    """Compare again where requests take longer now than the engine took when it was chosen."""
    model = core.models.numbered(event.model)
    if model is None or model.manifest.times is None or event.engine != model.engine:
        return
    times = model.manifest.times
    if model.drift.note(event.engine, event.ms, times.cpu_ms if model.on_cpu else times.gpu_ms):
        _compare(core, model)


def worker_ready(core: Core, event: WorkerReady) -> None:
    """Load what is to be served; another device, driver or ONNX Runtime may make for other choices."""
    failover.worker_ready(core, event)
    reconsider(core, event.engine)


def reconsider(core: Core, engine: str) -> None:
    """Compare what stands on times of another device, driver or ONNX Runtime than `engine` has now."""
    for model in core.models.all():
        if engine in (model.device, model.cpu_engine):
            reconsider_model(core, model)


def reconsider_model(core: Core, model: ServedModel) -> None:
    """The same for one model, where what it needs is there."""
    if _outdated(core, model):
        _compare(core, model)


def _outdated(core: Core, model: ServedModel) -> bool:
    times = model.manifest.times
    if times is None:
        return True
    known = [(times.device, core.engines[model.device].fingerprint)]
    if model.cpu_engine in core.engines:
        known.append((times.runtime, core.engines[model.cpu_engine].fingerprint))
    return any(now and now != then for then, now in known)


def _compare(core: Core, model: ServedModel) -> None:
    """Where there is a choice, both engines can take part, and the last time was a while ago."""
    device = core.engines[model.device]
    free = model.manifest.engine_wanted(core.policy) == "fastest" and model.compiled is not None
    able = device.phase is Phase.READY and not model.failed and model.state is State.READY and model.at_home
    cpu = core.cpu_of(model.manifest.owner)
    if cpu is None or not (free and able and model.takes_open) or model.comparing:
        return
    if model.trial is None and core.now - model.compared >= DRIFT_SECONDS:
        model.comparing, model.compared = True, core.now
        core.act(Compare(model))


def optimisation_checked(core: Core, event: OptimisationChecked) -> None:
    """Remember it of all models of that source; at another level the CPU engine takes another time."""
    for model in core.models.all():
        before = model.manifest.optimisation
        if model.manifest.source_key != event.source or not model.takes_open or before == event.found:
            continue
        model.manifest = dataclasses.replace(model.manifest, optimisation=event.found)
        core.act(Persist(model))
        if event.found.level != (before.level if before is not None else HIGHEST):
            model.compared = float("-inf")
            if model.manifest.times is not None:
                _compare(core, model)


def not_compared(core: Core, event: NotCompared) -> None:
    """The choice stands as it was."""
    model = core.models.numbered(event.model)
    if model is not None:
        model.comparing = False


def chosen(core: Core, event: EngineChosen) -> None:
    """Have the engine serve that was chosen; the other one does until it has loaded the model."""
    model = core.models.numbered(event.model)
    if model is None:
        return
    if event.pinned is None:
        model.comparing = False
        if model.manifest.pinned_engine:  # by hand, while they were compared
            return
    changes: dict[str, Any] = {
        "chosen": event.engine,
        "why": event.why,
        "times": event.times or model.manifest.times,
        "pinned_engine": event.pinned or "",
        "interface": model.manifest.interface or event.interface,
    }
    model.manifest = dataclasses.replace(model.manifest, **changes)
    core.act(Persist(model))
    if event.pinned == "" and model.manifest.times is None:
        _compare(core, model)
    target = core.of_kind(model, event.engine)
    if target is not None and target.name != model.home:
        _move(core, model, target, event.why)


def _move(core: Core, model: ServedModel, target: Engine, why: str) -> None:
    """Make another engine the home of a model."""
    trials.end_trial(core, model)
    model.failed.discard(target.name)
    left, model.home = core.engines[model.home], target.name
    core.act(EngineChanged(model.name, target.shown, why))
    if left.name != model.engine and left.name in model.deployments:
        core.leave(model, left)
    dismiss(core, left)
    if model.engine == target.name:  # it stood in
        model.away = ""
        return
    deployment = model.deployments.get(target.name)
    if deployment is None or deployment.state is State.UNAVAILABLE:
        deployment = core.deploy(model, target.name)
    wake(core, target)
    if deployment.state is State.READY:
        failover.come_back(core, model, target)
        run_next(core, target)
    else:
        model.away = f"{target.shown} is to serve it, and has not loaded it yet"
        load_next(core, target)
