"""Handles the events of models: added, replaced, removed, loaded and verified."""

from __future__ import annotations

from dataclasses import replace

from . import blame, engines, versions
from .messages import (
    Added,
    Damaged,
    FileReleased,
    FileRetained,
    LoadCrashed,
    Loaded,
    LoadRefused,
    ManifestChanged,
    NotRestored,
    ProbeFailed,
    ProbePassed,
    Removed,
    SuspendRequested,
)
from .model import Deployment, Phase, ServedModel, State, is_cpu
from .scheduling import admit, is_here, load_next, run_next, start_if_stopped, stop_if_unneeded
from .state import Core, removal_error


def model_added(core: Core, event: Added) -> None:
    """Serve a model, which replaces another of its name."""
    if event.rests:
        _rest(core, core.new_model(event.manifest, event.compiled, event.preferred_engine))
        return
    cpu = event.cpu or (event.manifest.compiled is None and event.manifest.interface is not None)
    if cpu and core.cpu is None:
        if event.compiled is None:
            model = core.new_model(event.manifest, None, event.preferred_engine)
            core.install(model)
            why = "only the CPU engine can run it, which is not installed; install honed-cpu"
            versions.fail(core, model, why)
            return
        cpu = False
    home = core.cpu_of(event.manifest.owner) if cpu else None
    model = core.new_model(
        event.manifest, event.compiled, event.preferred_engine, home=home.name if home is not None else None
    )
    replaced = core.install(model)
    engine = core.engines[model.engine]
    if engine.stops_when_unused and event.proof is None and model.name not in engine.queue.models():
        model.deployment.resting = True
    else:
        model.deployment.used = core.now
        start_if_stopped(core, engine)
    if engine.phase is Phase.FAILED:
        engines.fail_over(core, engine)
    else:
        admit(core, model, event.proof)
    if replaced is not None:
        _forget(core, replaced)
    engines.reconsider_model(core, model)


def model_damaged(core: Core, event: Damaged) -> None:
    """Add a damaged model, unavailable with its reason."""
    model = core.new_model(event.manifest, None, event.preferred_engine)
    core.install(model)
    versions.fail(core, model, event.reason)


def not_restored(core: Core, event: NotRestored) -> None:
    """Report why a damaged model could not be compiled again, unless an engine serves it by now."""
    model = core.models.find(event.name)
    if model is not None and model.compiled is None and not model.on_cpu:
        reason = f"{model.reason}, and it could not be compiled again: {event.reason}"
        versions.fail(core, model, reason)


def manifest_changed(core: Core, event: ManifestChanged) -> None:
    """Take over a model's changed manifest."""
    model = core.models.find_by_number(event.model)
    if model is not None:
        model.manifest = event.manifest


def model_removed(core: Core, event: Removed) -> None:
    """Refuse the requests that wait for a removed model, and unload it."""
    if core.models.forget_resting(event.name):
        return
    model = core.models.pop(event.name)
    for engine in core.engines.values():
        core.refuse(engine.queue.drop_model(model.name), removal_error(model.name))
    _forget(core, model)


def suspend_requested(core: Core, event: SuspendRequested) -> None:
    """Suspend a variant unless it has work."""
    model = core.models.find(event.name)
    if model is None or model.canary is not None:
        return
    if any(deployment.loading for deployment in model.deployments.values()):
        return
    for engine in core.engines.values():  # An engine that it moved from may still be running it
        if engine.runs(model) or any(running.model is model for running in engine.fallen):
            return
        if model.name in engine.queue.models():
            return
    deployments = dict(model.deployments)
    core.models.pop(model.name)
    _rest(core, model)
    for name in deployments:
        core.unload_unused(name, model.key_on(name))
    for name in deployments:
        stop_if_unneeded(core, core.engines[name])


def _rest(core: Core, model: ServedModel) -> None:
    """Store a suspended variant, which no engine serves."""
    model.preferred_engine = model.engine = model.device
    model.failover_reason = ""
    model.deployments = {
        model.device: Deployment(
            number=0, engine=model.device, state=State.UNAVAILABLE, reason="it rests until it is asked for"
        )
    }
    core.models.suspend(model)


def _forget(core: Core, model: ServedModel) -> None:
    """Unload a model that is not served any more from all engines."""
    for engine in model.deployments:
        core.unload_unused(engine, model.key_on(engine))
    versions.end_trial(core, model)
    for engine in (*model.deployments, model.preferred_engine):
        stop_if_unneeded(core, core.engines[engine])


# ---- Results of loading and verifying ----


def model_loaded(core: Core, event: Loaded) -> None:
    """Serve a loaded model if it is still deployed and the worker that loaded it still runs."""
    proof, engine = event.proof, core.engines[event.proof.engine]
    found = core.find_deployment(event.deployment)
    if found is None:
        core.unload_unused(proof.engine, event.key)  # The model was removed during the load
    else:
        model, deployment = found
        deployment.loading = False
        if is_here(engine, proof):
            deployment.ready(proof.checked, proof.left)
            model.crash_record.load_crashes = 0
            if core.awaits_failback(model, engine):
                engines.come_back(core, model, engine)
            run_next(core, engine)
    load_next(core, engine)
    engines.reconsider(core, engine.name)


def load_refused(core: Core, event: LoadRefused) -> None:
    """Give up on a model that an engine refused to load, or leave it on the engine it failed over to."""
    found = core.find_deployment(event.deployment)
    if found is None:
        core.unload_unused(event.engine, event.key)
        _load_all(core)
        return
    model, deployment = found
    engine = core.engines[event.engine]
    deployment.loading = False
    short = event.short and is_cpu(engine.name)  # The model is not to blame
    if short and not engine.isolating:
        blame.part(core, model, engine, event.reason)
    elif core.awaits_failback(model, engine):
        engines.stay_away(core, model, engine, event.reason)
    else:
        versions.give_up_on(core, model, engine, event.reason, for_now=short)
    core.unload_unused(event.engine, event.key)
    load_next(core, engine)


def load_crashed(core: Core, event: LoadCrashed) -> None:
    """Charge the crash of a builder; the load that a serving worker crashed in waits for its WorkerLost."""
    found = core.find_deployment(event.deployment)
    if found is None:
        if event.in_builder:  # Without a builder the worker is gone, and the next one loads its models
            _load_all(core)
        return
    model, deployment = found
    engine = core.engines[deployment.engine]
    deployment.loading = False
    if not event.in_builder:
        engine.worker_ends()
    comes_home = core.awaits_failback(model, engine)
    if not event.in_builder:
        engine.fallen_loads.append(event.deployment)
    elif comes_home:
        engines.stay_away(core, model, engine, event.reason)
    else:
        blame.load(core, model, deployment, event.reason)
    load_next(core, engine)


def probe_passed(core: Core, event: ProbePassed) -> None:
    """Remove the first of the unchecked probes, which was verified."""
    found = core.find_deployment(event.deployment)
    if found is not None:
        deployment = found[1]
        if deployment.checked is not None:
            deployment.checked = replace(deployment.checked, outputs=event.outputs)
        deployment.unchecked_probes = deployment.unchecked_probes[1:]
    _end_proving(core, event.deployment)


def probe_failed(core: Core, event: ProbeFailed) -> None:
    """Unload a file that failed a probe, and give up on the models that the engine serves with it."""
    found = core.find_deployment(event.deployment)
    if found is not None:
        engine = core.engines[found[1].engine]
        key = found[0].key_on(engine.name)
        for model, deployment in core.deployments_on(engine):
            if (
                model.key_on(engine.name) == key
                and core.is_served_by(model, engine)
                and deployment.state is State.READY
            ):
                versions.give_up(core, model, event.reason)
        core.unload_unused(engine.name, key)
    _end_proving(core, event.deployment)


def file_retained(core: Core, event: FileRetained) -> None:
    """Pin a file that no model has yet, such as that of a successor being compared."""
    engine = core.engines[event.engine]
    engine.kept[event.key] += 1
    start_if_stopped(core, engine)


def file_released(core: Core, event: FileReleased) -> None:
    """Release a key that `FileRetained` pinned, and unload it if nothing else uses it."""
    core.engines[event.engine].kept[event.key] -= 1
    core.unload_unused(event.engine, event.key)
    stop_if_unneeded(core, core.engines[event.engine])


def _load_all(core: Core) -> None:
    """Load the next model on each engine.

    Call it when a model was removed while it was loading: others may wait for its engine.
    """
    for engine in core.engines.values():
        load_next(core, engine)


def _end_proving(core: Core, deployment: int) -> None:
    for engine in core.engines.values():
        if engine.proving == deployment:
            engine.proving = None
            load_next(core, engine)
