"""What comes of loading and proving."""

from __future__ import annotations

from dataclasses import replace

from . import choices, failover, trials
from .actions import Unload
from .events import Disproved, Kept, LetGo, LoadBroken, Loaded, LoadRefused, Proven
from .scheduling import dismiss, is_here, load_next, run_next, wake
from .shared import Core
from .states import State


def loaded(core: Core, event: Loaded) -> None:
    """Serve what was loaded, if it is still wanted and in the present worker."""
    proof, engine = event.proof, core.engines[event.proof.engine]
    found = core.deployed(event.deployment)
    if found is None:
        core.unload_unused(proof.engine, event.key)  # it was removed meanwhile
    else:
        model, deployment = found
        deployment.loading = False
        if is_here(engine, proof):
            deployment.ready(proof.checked, proof.left)
            model.blame.load_crashes = 0
            if model.engine != engine.name and model.home == engine.name:
                failover.come_back(core, model, engine)
            run_next(core, engine)
    load_next(core, engine)
    choices.reconsider(core, engine.name)


def refused(core: Core, event: LoadRefused) -> None:
    """The model cannot be served here."""
    found = core.deployed(event.deployment)
    if found is None:
        _load_all(core)
        return
    model, deployment = found
    engine = core.engines[deployment.engine]
    deployment.loading = False
    if model.engine != engine.name and model.home == engine.name:
        failover.stay_away(core, model, engine, event.reason)
    else:
        trials.give_up_on(core, model, engine, event.reason)
    load_next(core, engine)


def broken(core: Core, event: LoadBroken) -> None:
    """A second process that ends loading a version is one too many."""
    found = core.deployed(event.deployment)
    if found is None:
        if event.apart:  # else the worker is gone with it, and the next one loads what there is
            _load_all(core)
        return
    model, deployment = found
    engine = core.engines[deployment.engine]
    deployment.loading = False
    if not event.apart:
        engine.worker_ends()
    comes_back = model.engine != engine.name and model.home == engine.name
    if comes_back and event.apart:
        failover.stay_away(core, model, engine, event.reason)
    elif comes_back and model.name not in engine.queue.models():
        del model.deployments[engine.name]  # the next worker's turn
    else:
        model.blame.load_crashes += 1
        if model.blame.load_crashes > 1:
            reason = f"{model.blame.load_crashes} workers failed loading it; last: {event.reason}"
            trials.give_up_on(core, model, engine, reason)
    load_next(core, engine)


def proven(core: Core, event: Proven) -> None:
    """One probe less is left."""
    found = core.deployed(event.deployment)
    if found is not None:
        deployment = found[1]
        if deployment.checked is not None:
            deployment.checked = replace(deployment.checked, outputs=event.outputs)
        deployment.left = deployment.left[1:]
    _end_proving(core, event.deployment)


def disproved(core: Core, event: Disproved) -> None:
    """Whatever serves this file here must go."""
    found = core.deployed(event.deployment)
    if found is not None:
        engine = core.engines[found[1].engine]
        key = found[0].key_on(engine.name)
        core.act(Unload(engine.name, key))
        for model, deployment in core.on(engine):
            if (
                model.key_on(engine.name) == key
                and core.served_by(model, engine)
                and deployment.state is State.READY
            ):
                trials.give_up(core, model, event.reason)
    _end_proving(core, event.deployment)


def kept(core: Core, event: Kept) -> None:
    """Something is done with a file that no model stands for yet."""
    engine = core.engines[event.engine]
    engine.kept[event.key] += 1
    wake(core, engine)


def let_go(core: Core, event: LetGo) -> None:
    """It ended."""
    core.engines[event.engine].kept[event.key] -= 1
    core.unload_unused(event.engine, event.key)
    dismiss(core, core.engines[event.engine])


def _load_all(core: Core) -> None:
    """What was loading was removed meanwhile, and others may wait for its engine."""
    for engine in core.engines.values():
        load_next(core, engine)


def _end_proving(core: Core, deployment: int) -> None:
    for engine in core.engines.values():
        if engine.proving == deployment:
            engine.proving = None
            load_next(core, engine)
