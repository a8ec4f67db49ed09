"""Models that are added, replaced and removed."""

from __future__ import annotations

import dataclasses

from . import choices, failover, trials
from .events import Added, Damaged, Explained, NotRestored, Removed, Rested, SettingsChanged
from .scheduling import admit, dismiss, wake
from .shared import Core, removed
from .states import Deployment, Phase, ServedModel, State


def added(core: Core, event: Added) -> None:
    """Serve a model, in the place of another of its name."""
    if event.rests:
        _rest(core, core.new_model(event.manifest, event.compiled, event.home))
        return
    cpu = event.cpu or (event.manifest.compiled is None and event.manifest.interface is not None)
    if cpu and core.cpu is None:
        if event.compiled is None:
            _unable(core, event)
            return
        cpu = False
    home = core.cpu_of(event.manifest.owner) if cpu else None
    model = core.new_model(
        event.manifest, event.compiled, event.home, home=home.name if home is not None else None
    )
    replaced = core.enter(model)
    engine = core.engines[model.engine]
    asleep = engine.rests and engine.phase in (Phase.RESTING, Phase.STOPPING)
    if asleep and event.proof is None and model.name not in engine.queue.models():
        model.deployment.resting = True
    else:
        model.deployment.used = core.now
        wake(core, engine)
    if engine.phase is Phase.FAILED:
        failover.fail_over(core, engine)
    else:
        admit(core, model, event.proof)
    if replaced is not None:
        _forget(core, replaced)
    choices.reconsider_model(core, model)


def damaged(core: Core, event: Damaged) -> None:
    """A model that says why it cannot be run."""
    model = core.new_model(event.manifest, None, event.home)
    core.enter(model)
    trials.fail(core, model, event.reason)


def not_restored(core: Core, event: NotRestored) -> None:
    """A damaged model says why it stays so, where no engine serves it meanwhile."""
    model = core.models.find(event.name)
    if model is not None and model.compiled is None and not model.on_cpu:
        reason = f"{model.reason}, and it could not be compiled again: {event.reason}"
        trials.fail(core, model, reason)


def explained(core: Core, event: Explained) -> None:
    """Remember why a model is served as it is."""
    model = core.models.numbered(event.model)
    if model is not None:
        model.manifest = dataclasses.replace(
            model.manifest, why=event.why, awaits_compiler=event.awaits_compiler
        )


def settings_changed(core: Core, event: SettingsChanged) -> None:
    """Remember how a model is to be served."""
    model = core.models.numbered(event.model)
    if model is not None:
        model.manifest = dataclasses.replace(model.manifest, settings=event.settings)


def gone(core: Core, event: Removed) -> None:
    """Answer what waits for a model, and forget it."""
    if core.models.forget_resting(event.name):
        return
    model = core.models.pop(event.name)
    core.refuse_waiting(model, removed(model.name))
    core.refuse_open(model, removed(model.name))
    _forget(core, model)


def rested(core: Core, event: Rested) -> None:
    """Take a variant out of service, unless it has something to do."""
    model = core.models.find(event.name)
    if model is None or model.trial is not None:
        return
    if any(deployment.loading for deployment in model.deployments.values()):
        return
    for engine in core.engines.values():  # one that it has left may still be running it
        runs = engine.running is not None and engine.running.model is model
        if runs or model.name in engine.queue.models():
            return
    deployments = dict(model.deployments)
    core.models.pop(model.name)
    _rest(core, model)
    for name in deployments:
        core.unload_unused(name, model.key_on(name))
    for name in deployments:
        dismiss(core, core.engines[name])


def _rest(core: Core, model: ServedModel) -> None:
    """Keep a variant that nothing serves."""
    model.home = model.engine = model.device
    model.away = ""
    model.deployments = {
        model.device: Deployment(
            number=0, engine=model.device, state=State.UNAVAILABLE, reason="it rests until it is asked for"
        )
    }
    core.models.rest(model)


def _forget(core: Core, model: ServedModel) -> None:
    """What engines have of a model that is not served any more."""
    for engine in model.deployments:
        core.unload_unused(engine, model.key_on(engine))
    trials.end_trial(core, model)
    for engine in (*model.deployments, model.home):
        dismiss(core, core.engines[engine])


def _unable(core: Core, event: Added) -> None:
    """The CPU engine was removed, and the model has no other form."""
    model = core.new_model(event.manifest, None, event.home)
    core.enter(model)
    trials.fail(core, model, "only the CPU engine can run it, which is not installed; install honed-cpu")
