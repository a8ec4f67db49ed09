"""Who pays for a worker that ended: the model that ran, a model that was being loaded, or nobody.

A run is charged, and a load only where nothing ran. On a device a model that ends workers again and again is
given up. In a CPU engine it is isolated for a while: the engine that isolates models begins one thing at a
time, so that the end of its process leaves no doubt, and harms no other model. The request that is suspected
of having ended the process of all models runs again there, too. That is the one that began last: others begin
only beside runs that have taken long.
"""

from __future__ import annotations

from honed.daemon.core.queue import ATTEMPTS, Ticket
from honed.protocol.errors import InvalidArgument, Unavailable

from . import versions
from .messages import Isolated, Refuse, Rejoined, WorkerLost
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
from .state import Core, removed

_MOST_SPARED = 2  # Ends of processes for which another run is to blame, before a request is suspected, too
_MOST_EMPTY = 64  # Ways in which inputs are empty, that are remembered of a model
_UNUSED_SECONDS = 40.0  # Without a request, after which no sequence is lost with an engine's process


def note_answered(running: RunningRequest, engine: Engine) -> None:
    """Remember that inputs which are empty in some places are answered."""
    answers = running.model.crash_record.answers
    if running.ticket.empty and is_cpu(engine.name) and len(answers) < _MOST_EMPTY:
        answers[running.ticket.empty] = True


def check(model: ServedModel, engine: Engine, ticket: Ticket) -> None:
    """Raise InvalidArgument where a request is known to end the CPU engine's process."""
    if is_cpu(engine.name) and not model.crash_record.answers.get(ticket.empty, True):
        raise _deadly(ticket, engine)


def suspects(engine: Engine, fallen: list[RunningRequest]) -> list[RunningRequest]:
    """Return the runs that may have ended a worker: in a CPU engine not those that had taken long by then."""
    found = [each for each in fallen if not each.long or each.ticket.spared >= _MOST_SPARED]
    return found if found and is_cpu(engine.name) else fallen


def spare(core: Core, running: RunningRequest) -> None:
    """Run a request again that is not to blame for the end of its worker."""
    if not running.abandoned:
        running.ticket.attempts -= 1
        running.ticket.spared += 1
        wait_again(core, running.ticket)


def run(core: Core, engine: Engine, running: RunningRequest, event: WorkerLost) -> None:
    """Charge a run with which a worker ended, unless that was ended from outside; run it again or refuse it.

    The engine is known to have lost its worker.
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
        # State that a request needs is in the process of its engine, if anywhere.
        ticket.isolated = is_cpu(engine.name) and not ticket.held and not from_outside
        running.model.statistics.retried()
        wait_again(core, ticket)


def wait_again(core: Core, ticket: Ticket) -> None:
    """Have a request wait for its next run, where its model is served by now; refuse it where it is not."""
    model = core.models.find(ticket.model)
    if model is None:
        core.act(Refuse(ticket.number, removed(ticket.model)))
        return
    if ticket.isolated and not model.can_run_on_cpu:  # It was replaced by one that ONNX Runtime cannot run
        ticket.isolated = False
    engine = core.engine_for(model, ticket)
    deployment = model.deployments.get(engine.name)
    if deployment is None:
        deployment = core.deploy(model, engine.name)
    if deployment.state is State.UNAVAILABLE or engine.phase is Phase.FAILED:
        sentence = deployment.reason or f"the worker does not start ({engine.reason})"
        core.act(Refuse(ticket.number, Unavailable(f"model {model.name!r} cannot be used: {sentence}")))
        return
    engine.queue.retry(ticket)
    deployment.resting, deployment.used = False, core.now
    start_if_stopped(core, engine)
    load_next(core, engine)
    run_next(core, engine)


def loads(core: Core, engine: Engine, event: WorkerLost, *, ran: bool) -> None:
    """Charge the loads that were cut short, where nothing ran in the worker and nobody else ended it."""
    fallen, engine.fallen_loads = engine.fallen_loads, []
    if ran or event.from_outside:
        return
    for number in fallen:
        if (found := core.deployed(number)) is not None:
            load(core, *found, event.reason)


def load(core: Core, model: ServedModel, deployment: Deployment, reason: str) -> None:
    """Count a process that ended loading a model; refuse the model for a while after the second."""
    engine = core.engines[deployment.engine]
    model.crash_record.load_crashes += 1
    if model.crash_record.load_crashes > 1:
        count = model.crash_record.load_crashes
        sentence = f"it ended the process of {engine.shown} {count} times while it was loaded; last: {reason}"
        versions.give_up_on(core, model, engine, sentence, for_now=True)


def try_again(core: Core) -> None:
    """Try again what was refused for long enough, and end what was isolated for long enough."""
    for engine in list(core.engines.values()):
        for _, deployment in core.deployments_on(engine):
            if deployment.due(core.now):
                revive(core, deployment)
    for model in core.models.all():
        if model.isolated and core.now >= model.isolated_until:
            _rejoin(core, model)


def revive(core: Core, deployment: Deployment) -> None:
    """Have a deployment loaded that ended processes and was refused for long enough."""
    deployment.state, deployment.reason, deployment.again = State.LOADING, "", float("inf")
    engine = core.engines[deployment.engine]
    start_if_stopped(core, engine)
    load_next(core, engine)


def _charge(core: Core, engine: Engine, model: ServedModel, reason: str) -> None:
    versions.fault(core, model, engine, reason)
    if not core.models.serves(model):
        return
    model.crash_record.crashes += 1
    crashes, within_an_hour = model.crash_record.crashes, model.crash_record.crashed(core.now)
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
            _isolate(core, model, shared, f"a request to it ended the process of {shared.shown} ({reason})")
    elif crashes >= MAX_ISOLATED_CRASHES:
        sentence = (
            f"its requests ended the process of {engine.shown} {crashes} times in a row; last: {reason}"
        )
        versions.give_up_on(core, model, engine, sentence, for_now=True)


def part(core: Core, model: ServedModel, shared: Engine, reason: str) -> None:
    """Have ONNX Runtime run a model apart from others, beside which a CPU engine has no memory for it."""
    _isolate(core, model, shared, f"{shared.shown} has no memory for it beside other models ({reason})")


def _isolate(core: Core, model: ServedModel, shared: Engine, why: str) -> None:
    """Have ONNX Runtime run a model apart from the others for a while."""
    seconds = model.crash_record.isolated()
    model.isolated = f"{why}; it runs in a process apart from the other models for {seconds:g} s"
    model.isolated_until = core.now + seconds
    core.act(Isolated(model.name, model.isolated))
    _change_process(core, model, shared)


def _rejoin(core: Core, model: ServedModel) -> None:
    """Have ONNX Runtime run a model among the others again, unless sequences of it would be lost."""
    apart = core.cpu_engine_of(model)
    assert apart is not None
    interface, deployment = model.manifest.interface, model.deployments.get(apart.name)
    keeps_state = bool(model.manifest.state) or (interface is not None and bool(interface.state))
    if keeps_state and deployment is not None and core.now - deployment.used < _UNUSED_SECONDS:
        return
    model.isolated = ""
    model.crash_record.crashes = 0
    core.act(Rejoined(model.name))
    _change_process(core, model, apart)


def _change_process(core: Core, model: ServedModel, left: Engine) -> None:
    """Move a model from one CPU engine to the one that may run it now, with the requests that wait."""
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
            core.act(Refuse(ticket.number, Unavailable(f"the worker does not start ({other.reason})")))
        else:
            other.queue.retry(ticket)
    core.unload_unused(left.name, model.key_on(left.name))
    if other.name in model.deployments and not model.deployments[other.name].resting:
        start_if_stopped(core, other)
        load_next(core, other)
        run_next(core, other)
    stop_if_unneeded(core, left)


def _end_by_being_empty(running: RunningRequest) -> bool:
    """Return whether the CPU engine ends on inputs that are empty in this way: none were ever answered.

    The model is not run on such inputs any more, and goes on with all others.
    """
    blame, empty = running.model.crash_record, running.ticket.empty
    if not empty or blame.answers.get(empty) or len(blame.answers) >= _MOST_EMPTY:
        return False
    blame.answers[empty] = False
    blame.crashes = 0
    return True


def _deadly(ticket: Ticket, engine: Engine, reason: str = "") -> InvalidArgument:
    """Return the error for a request that ended the CPU engine's process, or is known to do so."""
    where = ", ".join(f"{name!r} in axis {axes[0]}" for name, axes in ticket.empty or ())
    what = f"inputs that are empty ({where})" if where else "these inputs"
    how = f" ({reason})" if reason else ""
    return InvalidArgument(
        f"model {ticket.model!r} ends the process of {engine.shown} on {what}{how}; give others"
    )
