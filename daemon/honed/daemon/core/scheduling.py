"""Schedules an engine: which request runs next, and in which order its worker loads models."""

from __future__ import annotations

from .messages import Load, LoadReport, Run, StartServer, StopServer, VerifyProbe
from .model import Deployment, Engine, Phase, RunningRequest, ServedModel, State
from .state import Core


def run_next(core: Core, engine: Engine) -> None:
    """Start the next request if one may begin; an engine never runs a model twice at once."""
    if not len(engine.queue) or not engine.open_to_more or engine.phase is not Phase.READY:
        return
    if engine.isolating and _loading(core, engine):
        return

    def servable(name: str) -> bool:
        model = core.models.find(name)
        deployment = model.deployments.get(engine.name) if model is not None else None
        return (
            model is not None
            and deployment is not None
            and deployment.state is State.READY
            and not (engine.running and engine.runs(model))
        )

    ticket = engine.queue.take(core.now, servable)
    if ticket is not None:
        model = core.models.get(ticket.model)
        engine.running[ticket.number] = RunningRequest(ticket=ticket, model=model)
        core.act(Run(engine.name, ticket, model))


def _loading(core: Core, engine: Engine) -> bool:
    return any(deployment.loading for _, deployment in core.deployments_on(engine))


def start_if_stopped(core: Core, engine: Engine) -> None:
    """Start an engine that is resting."""
    if engine.phase is Phase.RESTING:
        engine.phase = Phase.STARTING
        core.act(StartServer(engine.name))


def wake_for(core: Core, engine: Engine, model: ServedModel) -> None:
    """Start an engine for a model that it now serves; one that stops when unused waits for a request."""
    if engine.stops_when_unused and model.name not in engine.queue.models():
        model.deployments[engine.name].resting = True
    else:
        start_if_stopped(core, engine)


def stop_if_unneeded(core: Core, engine: Engine) -> None:
    """Stop an on-demand engine that is not needed and runs nothing."""
    if not engine.on_demand or engine.running or engine.fallen or core.is_needed(engine):
        return
    if not engine.is_inactive:
        engine.phase = Phase.STOPPING
        core.act(StopServer(engine.name))


def load_next(core: Core, engine: Engine) -> None:
    """Load the next model on an engine, one at a time.

    Models that the engine serves, or that requests wait for, come first, in the order of the queue; then
    models that fail back to it; then the remaining probes are verified.
    """
    if engine.phase is not Phase.READY or _loading(core, engine):
        return
    if engine.isolating and not engine.all_long:
        return
    while (found := _next_to_serve(core, engine)) is not None:
        model, deployment = found
        twin = _twin(core, engine, model)
        if twin is None:
            _load(core, model, deployment, awaited=True)
            return
        deployment.ready(twin.checked)
        model.crash_record.load_crashes = 0
        run_next(core, engine)
    for model, deployment in core.deployments_on(engine):
        if model.engine != engine.name and deployment.state is State.LOADING:
            _load(core, model, deployment, awaited=False)
            return
    for model, deployment in core.deployments_on(engine) if engine.proving is None else ():
        if deployment.unchecked_probes and deployment.state is State.READY:
            engine.proving = deployment.number
            core.act(VerifyProbe(engine.name, deployment.number, model, deployment.unchecked_probes[0]))
            return


def load_now(core: Core, model: ServedModel) -> None:
    """Load a version that replaces another at once, even while another load is in progress."""
    engine = core.engines[model.engine]
    if engine.phase is Phase.READY:
        _load(core, model, model.deployment, awaited=True)


def admit(core: Core, model: ServedModel, proof: LoadReport | None) -> None:
    """Serve an installed model; if the worker that loaded it is gone, the present one loads it."""
    engine = core.engines[model.engine]
    if proof is not None and is_here(engine, proof):
        model.deployment.ready(proof.checked, proof.left)
        run_next(core, engine)
    load_next(core, engine)


def is_here(engine: Engine, proof: LoadReport) -> bool:
    """Return whether the worker that loaded a file still runs."""
    return engine.phase is Phase.READY and (engine.name, engine.worker) == (proof.engine, proof.worker)


def _load(core: Core, model: ServedModel, deployment: Deployment, *, awaited: bool) -> None:
    deployment.loading = True
    core.act(Load(deployment.engine, deployment.number, model, awaited))


def _next_to_serve(core: Core, engine: Engine) -> tuple[ServedModel, Deployment] | None:
    wanted = {name: turn for turn, name in enumerate(engine.queue.first_models())}
    waiting = [
        (model, deployment)
        for model, deployment in core.deployments_on(engine)
        if deployment.state is State.LOADING
        and not deployment.resting
        and (model.engine == engine.name or model.name in wanted)
    ]

    def turn(found: tuple[ServedModel, Deployment]) -> tuple[int, int, int]:
        """Return a model's rank: those that crashed processes come last, so that they delay no other."""
        model, blame = found[0], found[0].crash_record
        return blame.load_crashes, blame.crashes + blame.isolations, wanted.get(model.name, len(wanted))

    return min(waiting, key=turn, default=None)


def _twin(core: Core, engine: Engine, model: ServedModel) -> Deployment | None:
    """Return a ready deployment of the same compiled file under another model's name, or None."""
    for other, deployment in core.deployments_on(engine):
        same = other.key_on(engine.name) == model.key_on(engine.name)
        if other is not model and same and deployment.state is State.READY:
            return deployment
    return None
