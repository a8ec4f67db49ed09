"""Handles the events of requests: arrival, end of a run, failure of a worker, loss of the client."""

from __future__ import annotations

from honed.daemon.core.queue import Ticket, full, service_stops
from honed.protocol.errors import NotLoaded, OutOfMemory, PreconditionBroken, Unavailable

from . import blame, engines, versions
from .messages import (
    Answer,
    ClientGaveUp,
    ClientGone,
    EndRun,
    Kill,
    Log,
    Refuse,
    RequestArrived,
    RequestRejected,
    RunLasts,
    RunSucceeded,
    Stopping,
    WorkerFailed,
    WorkerLost,
)
from .model import Engine, Phase, RunningRequest, State, is_cpu
from .scheduling import load_next, run_next, start_if_stopped, stop_if_unneeded
from .state import Core, unusable


def request_arrived(core: Core, event: RequestArrived) -> None:
    """Enqueue a request.

    Raises NotFound, Unavailable, InvalidArgument if it is known to crash the CPU engine, or Busy if too many
    requests wait.
    """
    ticket = event.ticket
    model = core.models.get(ticket.model)
    engine = core.engine_for(model, ticket)
    deployment = model.deployments.get(engine.name)
    if deployment is not None and deployment.due(core.now):
        blame.revive(core, deployment)
    if deployment is not None and deployment.state is State.UNAVAILABLE:
        raise unusable(model.name, deployment.reason)
    if engine.phase is Phase.FAILED:
        raise Unavailable(f"{engine.not_starting}; 'hone doctor' may know why")
    if ticket.empty:
        blame.check(model, engine, ticket)
    victim = engine.queue.submit(ticket)
    if victim is not None:
        core.act(Refuse(victim.number, full(engine.queue.limit)))
    if deployment is None:  # The values or shapes are not those of the compiled file
        deployment = core.deploy(model, engine.name)
        deployment.resting = True
    deployment.used = core.now
    if deployment.resting:
        deployment.resting = False
        start_if_stopped(core, engine)
        load_next(core, engine)
    run_next(core, engine)


def client_gave_up(core: Core, event: ClientGaveUp) -> None:
    """Cancel a waiting request, or have the run of a running one ended."""
    for engine in core.engines.values():
        engine.queue.cancel(event.request)
        if (running := engine.running.get(event.request)) is not None:
            running.abandoned = True
            core.act(EndRun(engine.name, event.request))
        for fallen in engine.fallen:
            if fallen.ticket.number == event.request:
                fallen.abandoned = True


def lasts(core: Core, event: RunLasts) -> None:
    """Mark a run as long, and begin others beside it."""
    engine = core.engines[event.engine]
    if (running := engine.running.get(event.request)) is not None:
        running.long = True
        _go_on(core, engine)


def client_gone(core: Core, event: ClientGone) -> None:
    """Forget a client that is gone; its requests were cancelled before."""
    for engine in core.engines.values():
        engine.queue.forget_client(event.client)


def run_succeeded(core: Core, event: RunSucceeded) -> None:
    """Answer the request, or enqueue it for its next run."""
    engine = core.engines[event.engine]
    running = _end_run(core, engine, event.request)
    current = core.models.serves(running.model)
    if current and (engine.isolating or is_cpu(engine.name) == running.model.on_cpu):
        running.model.crash_record.record_success()
    if running.ticket.empty:
        blame.note_answered(running, engine)
    if not running.abandoned and event.more:
        running.ticket.attempts = 0  # Attempts count for one run
        blame.wait_again(core, running.ticket)
    elif not running.abandoned:
        core.act(Answer(running.ticket.number))
        model = running.model
        at_home = current and model.engine == engine.name
        if at_home and (model.canary is not None or not model.manifest.history.settled):
            versions.count_request(core, model)
    _go_on(core, engine)


def worker_failed(core: Core, event: WorkerFailed) -> None:
    """Keep a request whose worker failed until the worker's end is reported."""
    engine = core.engines[event.engine]
    running = _end_run(core, engine, event.request)
    engine.worker_ends()
    engine.fallen.append(running)
    core.act(_failed_attempt(running, event.reason))
    if event.device:
        # The worker's device context may be broken.
        core.act(Kill(engine.name, f"the device failed: {event.reason}"))


def request_rejected(core: Core, event: RequestRejected) -> None:
    """Refuse a request that the worker rejected, or run it where it can succeed.

    ONNX Runtime may accept values that the compiled file does not. A process apart may have memory that the
    shared one lacks. A model that was evicted for others is loaded again.
    """
    engine = core.engines[event.engine]
    running = _end_run(core, engine, event.request)
    ticket = running.ticket
    if isinstance(event.error, NotLoaded):
        core.mark_unloaded(engine, running.model.key_on(engine.name))
        if not is_cpu(engine.name):  # CPU engines evict models as a rule
            core.act(_failed_attempt(running, event.error))
    alone = ticket.empty is not None  # Features that join requests or keep state retry by themselves
    if isinstance(event.error, PreconditionBroken) and not ticket.needs_cpu_engine:
        running.model.statistics.count_precondition()
        ticket.needs_cpu_engine = alone and _takes_open(core, ticket)
    again = isinstance(event.error, NotLoaded) or (ticket.needs_cpu_engine and not is_cpu(engine.name))
    if isinstance(event.error, OutOfMemory) and is_cpu(engine.name):
        # State that a request needs is in the process of its engine, if anywhere.
        again = ticket.isolated = not (engine.isolating or ticket.held)
    if again and not running.abandoned:
        ticket.attempts = 0
        blame.wait_again(core, ticket)
    elif not running.abandoned:
        core.act(Refuse(ticket.number, event.error))
    _go_on(core, engine)


def _failed_attempt(running: RunningRequest, reason: object) -> Log:
    return Log(f"model {running.model.name}: attempt {running.ticket.attempts} failed: {reason}")


def _takes_open(core: Core, ticket: Ticket) -> bool:
    """Return whether the CPU engine can run a request's model."""
    model = core.models.find(ticket.model)
    return model is not None and model.can_run_on_cpu and core.cpu_engine_of(model) is not None


def worker_lost(core: Core, event: WorkerLost) -> None:
    """Retry or refuse the requests that failed with the worker, and charge the models to blame.

    A request that the worker did not begin, or that did not fail with it, waits for the next worker, and its
    attempt is not counted.
    """
    engine = core.engines[event.engine]
    engine.worker_ends()
    fallen, engine.fallen = engine.fallen, []
    cut_short = [running.ticket for running in engine.running.values() if not running.abandoned]
    engine.running.clear()
    engines.worker_lost(core, event)
    guilty = blame.suspects(engine, fallen)
    for running in fallen:
        if running in guilty:
            blame.run(core, engine, running, event)
        else:
            blame.spare(core, running)
    blame.loads(core, engine, event, ran=bool(fallen))
    for ticket in cut_short:
        ticket.attempts -= 1
        blame.wait_again(core, ticket)
    stop_if_unneeded(core, engine)


def stopping(core: Core, _: Stopping) -> None:
    """Refuse all requests that are not answered."""
    error = service_stops()
    for engine in core.engines.values():
        core.refuse(engine.queue.drop_all(), error)
        for running in (*engine.running.values(), *engine.fallen):
            if not running.abandoned:
                running.abandoned = True
                core.act(Refuse(running.ticket.number, error))


def _end_run(core: Core, engine: Engine, request: int) -> RunningRequest:
    """Remove and return a run, and unload its file if nothing else uses it."""
    engine.ended = core.now
    running = engine.running.pop(request)
    model = running.model
    if not core.models.serves(model) or engine.name not in model.deployments:
        core.unload_unused(engine.name, model.key_on(engine.name))
    return running


def _go_on(core: Core, engine: Engine) -> None:
    run_next(core, engine)
    if engine.isolating:
        load_next(core, engine)
    stop_if_unneeded(core, engine)
