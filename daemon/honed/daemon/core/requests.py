"""Requests: which runs next, where it goes when its worker fails, and when it is given up."""

from __future__ import annotations

from honed.daemon.core.queue import ATTEMPTS, Ticket, full, service_stops
from honed.protocol.errors import InvalidArgument, PreconditionBroken, Unavailable

from . import engines, versions
from .messages import (
    Answer,
    Asked,
    ClientGaveUp,
    ClientGone,
    Failed,
    Kill,
    Refuse,
    RequestRejected,
    Served,
    Stopping,
    WorkerFailed,
    WorkerLost,
)
from .model import MAX_CRASHES, Deployment, Engine, Phase, Running, ServedModel, State, is_cpu
from .scheduling import dismiss, load_next, run_next, wake
from .state import Core, removed

_MOST_EMPTY = 64  # ways in which inputs are empty, that are remembered of a model


def asked(core: Core, event: Asked) -> None:
    """Let a request wait.

    Raises NotFound, Unavailable, InvalidArgument where it is known to end the CPU engine, or
    ResourceExhausted where too many wait.
    """
    ticket = event.ticket
    model = core.models.get(ticket.model)
    engine = core.place(model, ticket)
    deployment = model.deployments.get(engine.name)
    if deployment is not None and deployment.state is State.UNAVAILABLE:
        raise Unavailable(f"model {model.name!r} cannot be used: {deployment.reason}")
    if engine.phase is Phase.FAILED:
        raise Unavailable(f"the worker does not start ({engine.reason}); 'hone doctor' may know why")
    if is_cpu(engine.name) and not model.blame.answers.get(ticket.empty, True):
        raise _deadly(ticket)
    victim = engine.queue.submit(ticket)
    if victim is not None:
        core.act(Refuse(victim.number, full(engine.queue.limit)))
    _used(core, model, engine)
    run_next(core, engine)


def _used(core: Core, model: ServedModel, engine: Engine) -> Deployment:
    """Return the deployment of a model that a request needs on an engine, loaded soon if it is not."""
    deployment = model.deployments.get(engine.name)
    if deployment is None:  # for values or shapes that are not the compiled form's
        deployment = core.deploy(model, engine.name)
        deployment.resting = True
    deployment.used = core.now
    if deployment.resting:
        deployment.resting = False
        wake(core, engine)
        load_next(core, engine)
    return deployment


def left(core: Core, event: ClientGaveUp) -> None:
    """Forget a request that waits; one that runs ends for nobody."""
    for engine in core.engines.values():
        engine.queue.cancel(event.request)
        if engine.running is not None and engine.running.ticket.number == event.request:
            engine.running.left = True


def client_gone(core: Core, event: ClientGone) -> None:
    """Forget a client that is gone; its requests have left before."""
    for engine in core.engines.values():
        engine.queue.forget_client(event.client)


def served(core: Core, event: Served) -> None:
    """Answer the request, or let it wait for its next run, which others come before."""
    engine = core.engines[event.engine]
    running = _ended(core, engine)
    current = core.served_by(running.model, engine)
    if current:
        running.model.blame.crashes = 0
    if running.ticket.empty and is_cpu(engine.name) and len(running.model.blame.answers) < _MOST_EMPTY:
        running.model.blame.answers[running.ticket.empty] = True
    if not running.left and event.more:
        running.ticket.attempts = 0  # it ran well
        _wait_again(core, running)
    elif not running.left:
        core.act(Answer(running.ticket.number))
        model = running.model
        if current and (model.trial is not None or not model.manifest.history.settled):
            versions.served(core, model)
    _go_on(core, engine)


def broken(core: Core, event: WorkerFailed) -> None:
    """Run the request once more in a new worker, or give up."""
    engine = core.engines[event.engine]
    running = _ended(core, engine)
    engine.worker_ends()
    core.act(Failed(running.model.name, running.ticket.attempts, event.reason))
    if event.device:
        core.act(Kill(engine.name, f"the device failed: {event.reason}"))  # its context may be broken
    ticket = running.ticket
    deadly = is_cpu(engine.name) and ticket.attempts >= ATTEMPTS and ticket.empty is not None
    if deadly and _end_by_being_empty(running):
        for other in engine.queue.drop_empty(ticket.model, ticket.empty):
            core.act(Refuse(other.number, _deadly(other)))
    elif core.models.serves(running.model) and engine.name in running.model.deployments:
        _blame(core, engine, running, event.reason)
    if deadly and not running.left:
        core.act(Refuse(ticket.number, _deadly(ticket)))
    elif not running.left:
        _retry(core, running, event.reason)
    _go_on(core, engine)


def unfit(core: Core, event: RequestRejected) -> None:
    """Tell the client what the worker says; values that a compiled form does not serve ONNX Runtime may."""
    engine = core.engines[event.engine]
    running = _ended(core, engine)
    ticket = running.ticket
    alone = ticket.empty is not None  # what runs several requests, or has state there, asks again itself
    if isinstance(event.error, PreconditionBroken) and not ticket.open:
        running.model.statistics.broke_precondition()
        ticket.open = alone and _takes_open(core, ticket)
    if ticket.open and not is_cpu(engine.name) and not running.left:
        ticket.attempts = 0
        _wait_again(core, running)
    elif not running.left:
        core.act(Refuse(ticket.number, event.error))
    _go_on(core, engine)


def _takes_open(core: Core, ticket: Ticket) -> bool:
    """Return whether the CPU engine may run a request."""
    model = core.models.find(ticket.model)
    return model is not None and model.takes_open and core.cpu_of(model.manifest.owner) is not None


def worker_lost(core: Core, event: WorkerLost) -> None:
    """Have a request that the worker did not begin wait for the next one, without counting an attempt."""
    engine = core.engines[event.engine]
    running, engine.running = engine.running, None
    engine.worker_ends()
    if running is not None and not running.left:
        running.ticket.attempts -= 1
        _wait_again(core, running)
    engines.worker_lost(core, event)


def stopping(core: Core, _: Stopping) -> None:
    """Refuse everything that is not answered."""
    error = service_stops()
    for engine in core.engines.values():
        for ticket in engine.queue.drop_all():
            core.act(Refuse(ticket.number, error))
        if engine.running is not None and not engine.running.left:
            engine.running.left = True
            core.act(Refuse(engine.running.ticket.number, error))


def _ended(core: Core, engine: Engine) -> Running:
    running, engine.running = engine.running, None
    assert running is not None
    engine.ended = core.now
    return running


def _go_on(core: Core, engine: Engine) -> None:
    run_next(core, engine)
    dismiss(core, engine)


def _wait_again(core: Core, running: Running) -> None:
    """Have a request wait for its next run, where its model is served by now; refuse it where it is not."""
    ticket, model = running.ticket, core.models.find(running.ticket.model)
    if model is None:
        core.act(Refuse(ticket.number, removed(ticket.model)))
        return
    other = core.place(model, ticket)
    deployment = _used(core, model, other)
    if deployment.state is State.UNAVAILABLE or other.phase is Phase.FAILED:
        sentence = deployment.reason or f"the worker does not start ({other.reason})"
        core.act(Refuse(ticket.number, Unavailable(f"model {model.name!r} cannot be used: {sentence}")))
    else:
        other.queue.retry(ticket)
        load_next(core, other)
        run_next(core, other)


def _blame(core: Core, engine: Engine, running: Running, reason: str) -> None:
    model = engine.suspect = running.model
    model.blame.crashes += 1
    if model.blame.crashes >= MAX_CRASHES:
        sentence = f"{model.blame.crashes} workers in a row failed running it; last: {reason}"
        versions.give_up_on(core, model, engine, sentence)


def _end_by_being_empty(running: Running) -> bool:
    """Return whether the CPU engine ends on inputs that are empty in this way: none were ever answered.

    The model is not run on such inputs any more, and goes on with all others.
    """
    blame, empty = running.model.blame, running.ticket.empty
    if not empty or blame.answers.get(empty) or len(blame.answers) >= _MOST_EMPTY:
        return False
    blame.answers[empty] = False
    blame.crashes = 0
    return True


def _deadly(ticket: Ticket) -> InvalidArgument:
    """Return the error for a request that ended the CPU engine at each attempt, or is known to do so."""
    where = ", ".join(f"{name!r} in axis {axes[0]}" for name, axes in ticket.empty or ())
    what = f"inputs that are empty ({where})" if where else "these inputs"
    return InvalidArgument(f"model {ticket.model!r} ends the CPU engine's process on {what}; give others")


def _retry(core: Core, running: Running, reason: str) -> None:
    ticket = running.ticket
    model = core.models.find(ticket.model)  # perhaps another version, or elsewhere by now
    if model is not None:
        engine = core.place(model, ticket)
        deployment = model.deployments.get(engine.name)
        usable = deployment is not None and deployment.state is not State.UNAVAILABLE
        if usable and engine.phase is not Phase.FAILED and engine.queue.retry(ticket):
            model.statistics.retried()
            run_next(core, engine)
            return
    sentence = f"the request failed in {ticket.attempts} workers; last: {reason}"
    core.act(Refuse(ticket.number, Unavailable(sentence)))
