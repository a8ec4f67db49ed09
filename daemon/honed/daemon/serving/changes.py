"""Models that are added, replaced and removed."""

from __future__ import annotations

from . import failover, trials
from .core import Core, removed
from .events import Added, Damaged, NotRestored, Removed
from .scheduling import admit
from .states import Phase, ServedModel


def added(core: Core, event: Added) -> None:
    """Serve a model, in the place of another of its name."""
    model = core.new_model(event.manifest, event.compiled, event.home)
    replaced = core.enter(model)
    engine = core.engines[model.engine]
    if engine.phase is Phase.FAILED:
        failover.fail_over(core, engine)
    else:
        admit(core, model, event.proof)
    if replaced is not None:
        _forget(core, replaced)


def damaged(core: Core, event: Damaged) -> None:
    """A model that says why it cannot be run."""
    model = core.new_model(event.manifest, None, event.home)
    core.enter(model)
    trials.fail(core, model, event.reason)


def not_restored(core: Core, event: NotRestored) -> None:
    """A damaged model says why it stays so."""
    model = core.models.find(event.name)
    if model is not None and model.compiled is None:
        reason = f"{model.reason}, and it could not be compiled again: {event.reason}"
        trials.fail(core, model, reason)


def gone(core: Core, event: Removed) -> None:
    """Answer what waits for a model, and forget it."""
    model = core.models.pop(event.name)
    core.refuse_waiting(model, removed(model.name))
    _forget(core, model)


def _forget(core: Core, model: ServedModel) -> None:
    """What engines have of a model that is not served any more."""
    for engine in model.deployments:
        core.unload_unused(engine, model.key)
    trials.end_trial(core, model)
    failover.dismiss(core, core.engines[model.engine])
