"""Charges a worker's crash to the model that ran, to a model that was being loaded, or to none.

A run is charged; a load only if nothing ran. On a device, a model that crashes workers repeatedly is given
up. In a CPU engine it is isolated for a while: the isolating engine begins one run or load at a time, so that
the cause of a crash is certain, and no other model is harmed. The request suspected of a crash of the shared
process is also retried there. The suspect is the request that began last, because others begin only beside
runs that have taken long.
"""

from __future__ import annotations

from honed.daemon.core.queue import ATTEMPTS, Ticket
from honed.protocol.errors import InvalidArgument, Unavailable

from . import versions
from .messages import Log, Refuse, WorkerLost
from .model import (
    MAX_CRASHES,
    MAX_CRASHES_AN_HOUR,
    MAX_ISOLATED_CRASHES,
    MAX_SHARED_CRASHES,
    Deployment,
    Engine,
    Phase,
    RunningRequest,
    ServedModel,
    State,
    is_cpu,
)
from .scheduling import load_next, run_next, start_if_stopped, stop_if_unneeded
from .state import Core, removal_error, unusable

_MOST_SPARED = 2  # Crashes blamed on other runs before a long-running request is suspected, too
_MOST_EMPTY = 64  # Combinations of empty axes recorded for a model
_UNUSED_SECONDS = 40.0  # Time without a request after which a model with state may change process


def note_answered(running: RunningRequest, engine: Engine) -> None:
    """Record that the CPU engine answered inputs with these empty axes."""
    answers = running.model.crash_record.answers
    if is_cpu(engine.name) and len(answers) < _MOST_EMPTY:
        answers[running.ticket.empty] = True


def check(model: ServedModel, engine: Engine, ticket: Ticket) -> None:
    """Raise InvalidArgument if a request's empty inputs are known to crash the CPU engine."""
    if is_cpu(engine.name) and not model.crash_record.answers.get(ticket.empty, True):
        raise _deadly(ticket, engine)


def suspects(engine: Engine, fallen: list[RunningRequest]) -> list[RunningRequest]:
    """Return the runs that may have crashed a worker: in a CPU engine, those that had not taken long yet."""
    found = [each for each in fallen if not each.long or each.ticket.spared >= _MOST_SPARED]
    return found if found and is_cpu(engine.name) else fallen


def spare(core: Core, running: RunningRequest) -> None:
    """Retry a request that is not to blame for the crash, without counting the attempt."""
    if not running.abandoned:
        running.ticket.attempts -= 1
        running.ticket.spared += 1
        wait_again(core, running.ticket)


def run(core: Core, engine: Engine, running: RunningRequest, event: WorkerLost) -> None:
    """Charge a run for its worker's crash, unless that was ended from outside; retry or refuse the request.

    The caller has already handled the loss of the engine's worker.
    """
    ticket, reason, from_outside = running.ticket, event.reason, event.from_outside
    last = ticket.attempts >= ATTEMPTS or (engine.isolating and not from_outside)
    last = last or not running.model.crash_record.answers.get(ticket.empty, True)
    deadly = last and is_cpu(engine.name) and ticket.empty is not None and not from_outside
    if deadly and _end_by_being_empty(running):
        for each in core.engines.values():
            for other in each.queue.drop_empty(ticket.model, ticket.empty):
                core.act(Refuse(other.number, _deadly(other, engine, reason)))
    elif not from_outside:
        _charge(core, engine, running.model, reason)
    if running.abandoned:
        return
    if deadly:
        core.act(Refuse(ticket.number, _deadly(ticket, engine, reason)))
    elif last:
        sentence = f"the request failed in {ticket.attempts} workers; last: {reason}"
        core.act(Refuse(ticket.number, Unavailable(sentence)))
    else:
        # State that a held request needs lies in the process of its engine.
        ticket.isolated = is_cpu(engine.name) and not ticket.held and not from_outside
        running.model.statistics.count_retry()
        wait_again(core, ticket)


def wait_again(core: Core, ticket: Ticket) -> None:
    """Enqueue a request again on the engine that serves its model now; refuse it if none does."""
    model = core.models.find(ticket.model)
    if model is None:
        core.act(Refuse(ticket.number, removal_error(ticket.model)))
        return
    if ticket.isolated and not model.can_run_on_cpu:  # A model that needs a compiler replaced its own
        ticket.isolated = False
    engine = core.engine_for(model, ticket)
    deployment = model.deployments.get(engine.name)
    if deployment is None:
        deployment = core.deploy(model, engine.name)
    if deployment.state is State.UNAVAILABLE or engine.phase is Phase.FAILED:
        sentence = deployment.reason or engine.not_starting
        core.act(Refuse(ticket.number, unusable(model.name, sentence)))
        return
    engine.queue.retry(ticket)
    deployment.resting, deployment.used = False, core.now
    start_if_stopped(core, engine)
    load_next(core, engine)
    run_next(core, engine)


def loads(core: Core, engine: Engine, event: WorkerLost, *, ran: bool) -> None:
    """Charge the interrupted loads, unless a run is to blame or the worker was ended from outside."""
    fallen, engine.fallen_loads = engine.fallen_loads, []
    if ran or event.from_outside:
        return
    for number in fallen:
        if (found := core.find_deployment(number)) is not None:
            load(core, *found, event.reason)


def load(core: Core, model: ServedModel, deployment: Deployment, reason: str) -> None:
    """Count a crash while loading a model; from the second one on, refuse the model for a while."""
    engine = core.engines[deployment.engine]
    model.crash_record.load_crashes += 1
    if model.crash_record.load_crashes > 1:
        count = model.crash_record.load_crashes
        sentence = f"it ended the process of {engine.label} {count} times while it was loaded; last: {reason}"
        versions.give_up_on(core, model, engine, sentence, for_now=True)


def try_again(core: Core) -> None:
    """Retry deployments and end isolations whose time is over."""
    for engine in list(core.engines.values()):
        for _, deployment in core.deployments_on(engine):
            if deployment.due(core.now):
                revive(core, deployment)
    for model in core.models.all():
        if model.isolated and core.now >= model.isolated_until:
            _rejoin(core, model)


def revive(core: Core, deployment: Deployment) -> None:
    """Load a deployment again that was refused for a while because it crashed processes."""
    deployment.state, deployment.reason, deployment.again = State.LOADING, "", float("inf")
    engine = core.engines[deployment.engine]
    start_if_stopped(core, engine)
    load_next(core, engine)


def _charge(core: Core, engine: Engine, model: ServedModel, reason: str) -> None:
    versions.fault(core, model, engine, reason)
    if not core.models.serves(model):
        return
    model.crash_record.crashes += 1
    crashes, within_an_hour = model.crash_record.crashes, model.crash_record.count_crash(core.now)
    often = within_an_hour > MAX_CRASHES_AN_HOUR
    if not is_cpu(engine.name):
        sentence = f"{crashes} workers in a row failed running it; last: {reason}"
        if crashes < MAX_CRASHES:
            sentence = f"{within_an_hour} workers ended running it within an hour; last: {reason}"
        if crashes >= MAX_CRASHES or often:
            versions.give_up_on(core, model, engine, sentence, for_now=True)
    elif not model.isolated:
        if engine.isolating or crashes >= MAX_SHARED_CRASHES or often:
            shared = core.cpu_of(model.manifest.owner)
            assert shared is not None
            _isolate(core, model, shared, f"a request to it ended the process of {shared.label} ({reason})")
    elif crashes >= MAX_ISOLATED_CRASHES:
        sentence = (
            f"its requests ended the process of {engine.label} {crashes} times in a row; last: {reason}"
        )
        versions.give_up_on(core, model, engine, sentence, for_now=True)


def part(core: Core, model: ServedModel, shared: Engine, reason: str) -> None:
    """Isolate a model for which the shared CPU engine has no memory beside other models."""
    _isolate(core, model, shared, f"{shared.label} has no memory for it beside other models ({reason})")


def _isolate(core: Core, model: ServedModel, shared: Engine, why: str) -> None:
    """Have ONNX Runtime run a model in a process apart for a while, longer each time."""
    seconds = model.crash_record.count_isolation()
    model.isolated = f"{why}; it runs in a process apart from the other models for {seconds:g} s"
    model.isolated_until = core.now + seconds
    core.act(Log(f"model {model.name}: {model.isolated}"))
    _change_process(core, model, shared)


def _rejoin(core: Core, model: ServedModel) -> None:
    """Have ONNX Runtime run a model in the shared process again, unless recent sequences would be lost."""
    apart = core.cpu_engine_of(model)
    assert apart is not None
    interface, deployment = model.manifest.interface, model.deployments.get(apart.name)
    keeps_state = bool(model.manifest.state) or (interface is not None and bool(interface.state))
    if keeps_state and deployment is not None and core.now - deployment.used < _UNUSED_SECONDS:
        return
    model.isolated = ""
    model.crash_record.crashes = 0
    core.act(Log(f"model {model.name} runs among the other models again", error=False))
    _change_process(core, model, apart)


def _change_process(core: Core, model: ServedModel, left: Engine) -> None:
    """Move a model and its waiting requests from a CPU engine to the one that may run it now."""
    other = core.cpu_engine_of(model)
    assert other is not None
    before = model.deployments.pop(left.name, None)
    if model.preferred_engine == left.name:
        model.preferred_engine = other.name
    if model.engine == left.name:
        model.engine = other.name
    waiting = left.queue.drop_model(model.name)
    needed = model.engine == other.name or model.preferred_engine == other.name or bool(waiting)
    if needed and other.name not in model.deployments:
        deployment = core.deploy(model, other.name)
        deployment.resting = other.stops_when_unused and not waiting
        deployment.used = core.now
        if before is not None and before.state is State.UNAVAILABLE:
            deployment.state, deployment.reason, deployment.again = before.state, before.reason, before.again
    for ticket in waiting:
        ticket.isolated &= other.isolating
        if other.phase is Phase.FAILED:
            core.act(Refuse(ticket.number, Unavailable(other.not_starting)))
        else:
            other.queue.retry(ticket)
    core.unload_unused(left.name, model.key_on(left.name))
    if other.name in model.deployments and not model.deployments[other.name].resting:
        start_if_stopped(core, other)
        load_next(core, other)
        run_next(core, other)
    stop_if_unneeded(core, left)


def _end_by_being_empty(running: RunningRequest) -> bool:
    """Return whether the request's empty axes are to blame: none with these was ever answered. Record that.

    The model is not run on such inputs any more, but serves all others.
    """
    blame, empty = running.model.crash_record, running.ticket.empty
    if not empty or blame.answers.get(empty) or len(blame.answers) >= _MOST_EMPTY:
        return False
    blame.answers[empty] = False
    blame.crashes = 0
    return True


def _deadly(ticket: Ticket, engine: Engine, reason: str = "") -> InvalidArgument:
    """Return the error for a request that crashed the CPU engine, or is known to do so."""
    where = ", ".join(f"{name!r} in axis {axes[0]}" for name, axes in ticket.empty or ())
    what = f"inputs that are empty ({where})" if where else "these inputs"
    how = f" ({reason})" if reason else ""
    return InvalidArgument(
        f"model {ticket.model!r} ends the process of {engine.label} on {what}{how}; give others"
    )
