"""Decides which engine serves a model: failover from a lost engine, and the choice between two engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from honed.protocol.errors import Unavailable
from honed.protocol.values import OrtSessionConfig

from . import blame, versions
from .messages import (
    CompareEngines,
    EngineChosen,
    EnginesNotCompared,
    InferenceTimed,
    Log,
    OptimisationChecked,
    Persist,
    ServerStopped,
    Tick,
    WorkerLost,
    WorkerReady,
)
from .model import DRIFT_SECONDS, Engine, Phase, ServedModel, State, is_cpu
from .scheduling import load_next, run_next, start_if_stopped, stop_if_unneeded, wake_for
from .state import Core

# ---- Failover: another engine serves the models of a lost engine until it is back ----
#
# Compiled files are not changed: a file runs on any device whose limits it respects, and is served there
# only if its outputs for the probes are right (docs/dev/format.md).

CPU = "cpu"  # Name of a fallback device: the first processor
LINGERING_SECONDS = 40.0  # Time that a CPU engine keeps an unused deployment


def worker_ready(core: Core, event: WorkerReady) -> None:
    """Load the models that the engine serves, and those that prefer it but are served elsewhere.

    Then reconsider choices, as the device, driver or ONNX Runtime may have changed.
    """
    engine = core.engines[event.engine]
    engine.worker, engine.spec, engine.family = event.worker, event.spec, event.family
    engine.fingerprint, engine.reason = event.fingerprint, ""
    _forget_checks(core, engine)
    if engine.phase is not Phase.STOPPING:
        engine.phase = Phase.READY
        for model in core.models.all():
            if core.awaits_failback(model, engine):
                core.deploy(model, engine.name)
        load_next(core, engine)
    reconsider(core, engine.name)


def _forget_checks(core: Core, engine: Engine) -> None:
    """Drop the optimisation checks of another version of ONNX Runtime: this one must be checked first."""
    for model in core.models.all():
        known = model.manifest.optimisation
        if known is not None and known.runtime != engine.fingerprint and model.cpu_engine == engine.name:
            model.manifest = dataclasses.replace(model.manifest, optimisation=None)


def worker_lost(core: Core, event: WorkerLost) -> None:
    """Mark the worker's deployments as lost; if no worker starts, fail over to another engine."""
    engine = core.engines[event.engine]
    if engine.phase is not Phase.STOPPING:
        engine.phase = Phase.FAILED if event.failed else Phase.STARTING
    engine.reason = event.reason
    _forget_loaded(core, engine)
    if engine.phase is Phase.FAILED:
        fail_over(core, engine)


def server_stopped(core: Core, event: ServerStopped) -> None:
    """Mark a stopped engine as resting, and start it if it is needed again."""
    engine = core.engines[event.engine]
    engine.phase = Phase.RESTING
    _forget_loaded(core, engine)
    if engine.stops_when_unused:
        wanted = engine.queue.models()
        for model, deployment in core.deployments_on(engine):
            deployment.resting = model.name not in wanted and not core.awaits_failback(model, engine)
    if core.is_needed(engine):
        start_if_stopped(core, engine)


def come_back(core: Core, model: ServedModel, engine: Engine) -> None:
    """Have a model's preferred engine, which has loaded it, serve it again."""
    left = core.engines[model.engine]
    model.engine, model.failover_reason = engine.name, ""
    model.crash_record.crashes = 0
    core.requeue(model.name, left.name, engine.name)
    core.undeploy(model, left)
    core.act(Log(f"model {model.name} is served by {engine.label} again", error=False))
    stop_if_unneeded(core, left)


def stay_away(core: Core, model: ServedModel, engine: Engine, reason: str) -> None:
    """Leave a model on the engine that it failed over to: its preferred one is back but cannot run it."""
    del model.deployments[engine.name]
    if is_cpu(engine.name):
        core.refuse_open(model, Unavailable(f"model {model.name!r} cannot be used so: {reason}"))
    stand_in = core.engines[model.engine].label
    model.failover_reason = f"{stand_in} stands in for {engine.label}, which fails: {reason}"
    core.act(Log(f"model {model.name} stays on {stand_in}: {reason}"))


def tick(core: Core, _: Tick) -> None:
    """Remove unused deployments from the CPU engines, and retry models whose pause is over."""
    blame.try_again(core)
    for cpu in [engine for engine in core.engines.values() if is_cpu(engine.name)]:
        wanted = cpu.queue.models()
        for model, deployment in core.deployments_on(cpu):
            idle = core.now - deployment.used > LINGERING_SECONDS and model.name not in wanted
            served = model.engine == cpu.name or core.awaits_failback(model, cpu)
            if idle and not (served or deployment.loading or cpu.runs(model)):
                core.undeploy(model, cpu)
        stop_if_unneeded(core, cpu)


def fail_over(core: Core, engine: Engine) -> None:
    """Have other engines serve the models of a lost one; refuse the requests that remain.

    A model moves to the engine of the other kind if that can run it, else from a device to the fallback one.
    """
    moved: dict[str, list[ServedModel]] = {}
    for model in core.models.of(engine.name):
        if model.state is State.UNAVAILABLE:
            continue
        other = core.other_for(model, engine)
        if other is None and not is_cpu(engine.name):
            other = _stand_in_for(core, engine)
        if other is not None and other.phase is not Phase.FAILED:
            moved.setdefault(other.name, []).append(model)
    for name, models in moved.items():
        _move(core, models, engine, core.engines[name])
    core.refuse(engine.queue.drop_all(), Unavailable(engine.not_starting))


def _forget_loaded(core: Core, engine: Engine) -> None:
    engine.proving = None
    wanted = engine.queue.models()
    for model, deployment in core.deployments_on(engine):
        deployment.mark_lost()
        deployment.resting |= engine.isolating and model.name not in wanted
        if (
            model.engine != engine.name
            and model.name not in wanted
            and not core.awaits_failback(model, engine)
        ):
            del model.deployments[engine.name]


def _move(core: Core, models: Sequence[ServedModel], engine: Engine, other: Engine) -> None:
    away = f"{other.label} stands in for {engine.label}, which is lost: {engine.reason}"
    for model in models:
        del model.deployments[engine.name]
        if other.name not in model.deployments:
            core.deploy(model, other.name)
        model.engine, model.failover_reason = other.name, away
        core.requeue(model.name, engine.name, other.name)
        wake_for(core, other, model)
    names, lost = ", ".join(model.name for model in models), f"{engine.label} is lost ({engine.reason})"
    core.act(Log(f"{lost}: {other.label} stands in for it and serves {names}"))
    load_next(core, other)
    run_next(core, other)


def _stand_in_for(core: Core, engine: Engine) -> Engine | None:
    """Return the fallback engine, added where needed; None if there is none or it is the engine itself."""
    wanted = core.fallback.casefold()
    if not wanted or engine.name.casefold() == wanted or engine.on_demand:
        return None
    if wanted == CPU and engine.on_processor:
        return None
    for other in core.engines.values():
        if other is not engine and (
            other.name.casefold() == wanted
            or (wanted == CPU and other.on_processor and other.phase is Phase.READY)
        ):
            return other
    return core.add_engine(core.fallback, stand_in=True)


# ---- The preferred engine: choosing, pinning and reconsidering it ----
#
# A choice is based on times of both engines, measured in turns. Both are compared again when the device, its
# driver or ONNX Runtime has changed, and when the latency has drifted. Times measured while other programs
# were busy are measured again when the machine is idle (`features/reselection.py`).


def inference_timed(core: Core, event: InferenceTimed) -> None:
    """Compare the engines again if the latency has drifted from that measured for the choice."""
    model = core.models.find_by_number(event.model)
    if model is None or model.manifest.decision.times is None or event.engine != model.engine:
        return
    times = model.manifest.decision.times
    if model.drift.note(event.engine, event.ms, times.cpu_ms if model.on_cpu else times.gpu_ms):
        _compare(core, model)


def reconsider(core: Core, engine: str) -> None:
    """Compare engines again for choices made with another device, driver or ONNX Runtime."""
    for model in core.models.all():
        if engine in (model.device, model.cpu_engine):
            reconsider_model(core, model)


def reconsider_model(core: Core, model: ServedModel) -> None:
    """Compare the engines for a model again if its choice is outdated and both are available."""
    if _is_outdated(core, model):
        _compare(core, model)


def _is_outdated(core: Core, model: ServedModel) -> bool:
    times = model.manifest.decision.times
    if times is None:
        return True
    known = [(times.device, core.engines[model.device].fingerprint)]
    if model.cpu_engine in core.engines:
        known.append((times.runtime, core.engines[model.cpu_engine].fingerprint))
    return any(now and now != then for then, now in known)


def _compare(core: Core, model: ServedModel) -> None:
    """Compare the engines of a model if possible, and at most once in DRIFT_SECONDS."""
    if comparable(core, model) and core.now - model.compared >= DRIFT_SECONDS:
        model.comparing, model.compared = True, core.now
        core.act(CompareEngines(model))


def comparable(core: Core, model: ServedModel) -> bool:
    """Return whether a model's engine may be chosen by times, and both engines can be compared now."""
    if core.cpu_engine_of(model) is None or model.isolated or model.comparing or model.canary is not None:
        return False
    device = core.engines[model.device]
    there = device.phase is Phase.READY or device.is_inactive
    free = model.manifest.engine_wanted(core.policy) == "fastest" and model.compiled is not None
    able = there and not model.rejected_by and model.state is State.READY and model.on_preferred_engine
    return free and able and model.can_run_on_cpu


def optimisation_checked(core: Core, event: OptimisationChecked) -> None:
    """Store the check with all models of that source; compare engines again if the session changes."""
    for model in core.models.all():
        before = model.manifest.optimisation
        if model.manifest.source_key != event.source or not model.can_run_on_cpu or before == event.result:
            continue
        model.manifest = dataclasses.replace(model.manifest, optimisation=event.result)
        core.act(Persist(model))
        if event.result.session_config != (
            before.session_config if before is not None else OrtSessionConfig()
        ):
            model.compared = float("-inf")
            if model.manifest.decision.times is not None:
                _compare(core, model)


def engines_not_compared(core: Core, event: EnginesNotCompared) -> None:
    """Record that a comparison of engines failed; the choice stands."""
    model = core.models.find_by_number(event.model)
    if model is not None:
        model.comparing = False


def engine_chosen(core: Core, event: EngineChosen) -> None:
    """Move a model to the chosen engine; the other one serves it until the model is loaded."""
    model = core.models.find_by_number(event.model)
    if model is None:
        return
    if event.pinned is None:
        model.comparing = False
        if model.manifest.decision.pinned_engine:  # A user pinned it during the comparison
            return
    manifest = model.manifest.with_decision(
        chosen=event.engine,
        reason=event.why,
        times=event.times or model.manifest.decision.times,
        pinned_engine=event.pinned or "",
    )
    model.manifest = dataclasses.replace(manifest, interface=manifest.interface or event.interface)
    core.act(Persist(model))
    if event.pinned == "" and model.manifest.decision.times is None:
        _compare(core, model)
    target = core.of_kind(model, event.engine)
    if target is not None and target.name != model.preferred_engine:
        _move_as_chosen(core, model, target, event.why)


def _move_as_chosen(core: Core, model: ServedModel, target: Engine, why: str) -> None:
    """Make another engine the preferred one of a model."""
    versions.end_trial(core, model)
    model.rejected_by.discard(target.name)
    left, model.preferred_engine = core.engines[model.preferred_engine], target.name
    core.act(Log(f"model {model.name} is to be served by {target.label} from now on: {why}", error=False))
    if left.name != model.engine and left.name in model.deployments:
        core.undeploy(model, left)
    stop_if_unneeded(core, left)
    if model.engine == target.name:  # The model had failed over to it
        model.failover_reason = ""
        return
    deployment = model.deployments.get(target.name)
    if deployment is None or deployment.state is State.UNAVAILABLE:
        deployment = core.deploy(model, target.name)
    start_if_stopped(core, target)
    if deployment.state is State.READY:
        come_back(core, model, target)
        run_next(core, target)
    else:
        model.failover_reason = f"{target.label} is to serve it, and has not loaded it yet"
        load_next(core, target)
