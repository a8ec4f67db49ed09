"""Handles the versions of a model: canaries, rollbacks, and versions that users choose.

The previous version stays loaded until the canary has served without a fault (`versions.trial_over`). A fault
of the canary puts the previous version back at once, in the machine first and then in the store.
"""

from __future__ import annotations

import dataclasses

from honed.daemon.store.store import version_file
from honed.daemon.store.versions import go_back, settle, trial_over
from honed.protocol.errors import AlreadyExists, Unavailable

from .messages import (
    CanaryCompared,
    CanaryComparisonCrashed,
    CompareCanary,
    Inspected,
    InspectFile,
    Log,
    Persist,
    SuccessorReady,
    VersionChosen,
)
from .model import Canary, Deployment, Engine, Phase, ServedModel, State, is_cpu, kind_of
from .scheduling import admit, load_next, load_now, run_next, stop_if_unneeded, wake_for
from .state import Core, unusable

_STRIKES = 2


def successor_ready(core: Core, event: SuccessorReady) -> None:
    """Serve a successor as a canary; raise AlreadyExists if another version or engine serves by now."""
    before = core.models.find_by_number(event.model)
    if before is None:
        raise AlreadyExists("the version it was compared with is not served any more; publish it again")
    if before.preferred_engine != before.device:
        raise AlreadyExists("the CPU engine serves the model by now; publish it again")
    successor = core.new_model(event.manifest, event.compiled, before.device)
    successor.canary = Canary(before=before, since=core.now)
    core.install(successor)
    end_trial(core, before)
    admit(core, successor, event.proof)


def version_chosen(core: Core, event: VersionChosen) -> None:
    """Serve the version that a user chose."""
    left = core.models.get(event.manifest.name)
    chosen = core.new_model(event.manifest, event.compiled, left.device)
    core.install(chosen)
    end_trial(core, left)
    admit(core, chosen, event.proof)
    core.unload_unused(left.engine, left.key_on(left.engine))


def version_inspected(core: Core, event: Inspected) -> None:
    """Store what the inspector read of the version that is served."""
    model = core.models.find_by_number(event.model)
    if model is not None:
        model.compiled = event.compiled


def count_request(core: Core, model: ServedModel) -> None:
    """Count a request of a version that is not settled; after enough of them compare it."""
    if not model.on_device:
        return
    trial = model.canary
    if trial is None:  # The service restarted during the canary; its probes passed again
        _settle(core, model)
        return
    if trial.judging:
        return
    trial.served += 1
    if trial_over(trial.served, core.now - trial.since):
        trial.judging = True
        core.act(CompareCanary(model, trial.before))


def canary_compared(core: Core, event: CanaryCompared) -> None:
    """Promote a canary, or roll it back if the comparison found it slower or wrong."""
    model = core.models.find_by_number(event.model)
    if model is None or model.canary is None:
        return
    if event.objection:
        _fall_back(core, model, model.canary.before, event.objection)
        return
    end_trial(core, model)
    _settle(core, model)
    number = model.manifest.history.current.number
    core.act(Log(f"model {model.name}: version {number} has served cleanly", error=False))


def canary_comparison_crashed(core: Core, event: CanaryComparisonCrashed) -> None:
    """Compare a canary again later, but roll it back when a second worker has ended."""
    model = core.models.find_by_number(event.model)
    if model is None or model.canary is None:
        return
    trial = model.canary
    trial.served, trial.judging = 0, False
    if model.on_device:  # A lost engine is not the version's fault
        trial.strikes += 1
    if trial.strikes >= _STRIKES:
        sentence = f"{trial.strikes} workers ended while it ran; last: {event.reason}"
        _fall_back(core, model, trial.before, sentence)


def fault(core: Core, model: ServedModel, engine: Engine, reason: str) -> None:
    """Roll back a canary when a worker crashes while it runs."""
    if model.canary is not None and model.on_device and core.is_served_by(model, engine):
        _fall_back(core, model, model.canary.before, f"the worker ended while it ran: {reason}")


def give_up(core: Core, model: ServedModel, reason: str, *, for_now: bool = False) -> None:
    """Give up on a version that cannot be served.

    An earlier version or another engine serves the model instead. Otherwise the model is unavailable, with
    `for_now` only for a while.
    """
    if model.on_device and model.manifest.compiled is not None:
        if model.canary is not None:
            _fall_back(core, model, model.canary.before, reason)
            return
        earlier = model.manifest.history.earlier()
        if earlier is not None:
            file = version_file(model.manifest, earlier)
            before = dataclasses.replace(model, manifest=dataclasses.replace(model.manifest, compiled=file))
            core.act(InspectFile(_fall_back(core, model, before, reason)))
            return
    if _switch_for_good(core, model, reason):
        return
    reason = f"{model.failover_reason}, and there {reason}" if model.failover_reason else reason
    if for_now:
        reason = _schedule_retry(core, model, model.deployment, reason)
    core.act(Log(f"model {model.name} is not served any more: {reason}"))
    fail(core, model, reason)


def give_up_on(core: Core, model: ServedModel, engine: Engine, reason: str, *, for_now: bool = False) -> None:
    """Give up on a model on an engine that cannot run it, with `for_now` only for a while.

    If another engine serves the model, only requests that need this engine are refused.
    """
    if core.is_served_by(model, engine):
        give_up(core, model, reason, for_now=for_now)
        return
    deployment = model.deployments.get(engine.name)
    if deployment is not None:
        if for_now:
            reason = _schedule_retry(core, model, deployment, reason)
        deployment.state, deployment.reason = State.UNAVAILABLE, reason
        core.refuse_open(model, unusable(model.name, reason))


def _schedule_retry(core: Core, model: ServedModel, deployment: Deployment, reason: str) -> str:
    """Schedule a retry of a deployment, and return `reason` with the time until then."""
    seconds = model.crash_record.count_refusal(isolated=core.engines[deployment.engine].isolating)
    deployment.again = core.now + seconds
    return f"{reason}; it is tried again after {seconds:g} s"


def _switch_for_good(core: Core, model: ServedModel, reason: str) -> bool:
    """Have the other engine serve a model for good; return False if that cannot, or has failed, too."""
    left = core.engines[model.engine]
    model.rejected_by |= {left.name, model.cpu_engine if is_cpu(left.name) else left.name}
    other = core.other_for(model, left)
    if other is None or other.phase is Phase.FAILED:
        return False
    why = f"{left.label} does not serve it: {reason}"
    model.manifest = model.manifest.with_decision(chosen=kind_of(other.name), reason=why)
    waits_here = model.deployments[left.name]
    waits_here.state, waits_here.reason = State.UNAVAILABLE, reason
    if is_cpu(left.name):
        core.refuse_open(model, Unavailable(f"model {model.name!r} cannot be used so: {reason}"))
    model.preferred_engine = model.engine = other.name
    model.failover_reason = ""
    core.requeue(model.name, left.name, other.name)
    core.undeploy(model, left)
    if other.name not in model.deployments or model.deployments[other.name].state is State.UNAVAILABLE:
        core.deploy(model, other.name)
    served = f"model {model.name} is served by {other.label} from now on"
    core.act(Log(f"{served}, and not by {left.label}: {reason}"))
    core.act(Persist(model))
    wake_for(core, other, model)
    stop_if_unneeded(core, left)
    load_next(core, other)
    run_next(core, other)
    return True


def fail(core: Core, model: ServedModel, reason: str) -> None:
    """Mark a model as unavailable, and refuse its waiting requests."""
    model.deployment.state, model.deployment.reason = State.UNAVAILABLE, reason
    waiting = core.engines[model.engine].queue.drop_model(model.name)
    core.refuse(waiting, unusable(model.name, reason))


def end_trial(core: Core, model: ServedModel) -> None:
    """End a canary, and unload the previous version if nothing else uses it."""
    trial, model.canary = model.canary, None
    if trial is not None:
        core.unload_unused(trial.before.engine, trial.before.key_on(trial.before.engine))


def _fall_back(core: Core, model: ServedModel, before: ServedModel, why: str) -> ServedModel:
    """Replace `model` by `before` at once, the store later; return the model that is served now."""
    history = model.manifest.history
    number = next(v.number for v in reversed(history.versions) if v.sha256 == before.key and v.kept)
    changed = settle(go_back(history, number, why, why, core.wall))
    manifest = dataclasses.replace(model.manifest, compiled=before.manifest.compiled, history=changed)
    earlier = core.new_model(
        manifest, before.compiled, model.device, home=model.preferred_engine, engine=model.engine
    )
    earlier.failover_reason = model.failover_reason
    left = f"model {model.name}: version {history.current.number}"
    core.act(Log(f"{left} is rolled back to {number} and not served again: {why}"))
    core.install(earlier)
    end_trial(core, model)
    core.unload_unused(model.engine, model.key_on(model.engine))
    load_now(core, earlier)
    core.act(Persist(earlier))
    return earlier


def _settle(core: Core, model: ServedModel) -> None:
    model.manifest = dataclasses.replace(model.manifest, history=settle(model.manifest.history))
    core.act(Persist(model))
