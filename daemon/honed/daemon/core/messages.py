"""The messages of the serving machine: events that it receives, and actions that it requests."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.core.queue import ClientId, Ticket
from honed.daemon.store.compiled import CompiledFileInfo, Interface
from honed.daemon.store.store import EngineTimes, Manifest
from honed.protocol.errors import HonedError
from honed.protocol.results import ModelChecked
from honed.protocol.values import ComparedOutput, OptimisationCheck

from .model import ServedModel

# ---- Events ----
#
# An event is a fact that has already happened. The events and actions of every request are not frozen:
# frozen dataclasses are slower to construct.


class Event:
    """The base class of events."""

    __slots__ = ()


@dataclass(slots=True)
class RequestArrived(Event):
    """A client requested a run; an exception refuses it if it cannot even wait."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ClientGaveUp(Event):
    """The client of a request does not wait for it any more."""

    request: int


@dataclass(frozen=True, slots=True)
class ClientGone(Event):
    """A client's connection has ended."""

    client: ClientId


@dataclass(slots=True)
class RunSucceeded(Event):
    """The run of a request succeeded; with `more`, the request has further runs."""

    engine: str
    request: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class WorkerFailed(Event):
    """The engine's worker, or with `device` the device, failed in a run; WorkerLost follows."""

    engine: str
    request: int
    reason: str
    device: bool


@dataclass(frozen=True, slots=True)
class RequestRejected(Event):
    """The engine's worker refused to run the request, or ended its run because the client gave up."""

    engine: str
    request: int
    error: HonedError


@dataclass(frozen=True, slots=True)
class RunLasts(Event):
    """A run takes long, so that requests for other models may start beside it."""

    engine: str
    request: int


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """The service is stopping: requests that are not answered yet are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(Event):
    """An engine started its worker number `worker`, without models, on the device `spec`.

    `fingerprint` identifies the device with its driver, or the version of ONNX Runtime.
    """

    engine: str
    worker: int
    spec: str
    family: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """An engine's worker ended, and every call to it has failed; a run not reported yet never began.

    `from_outside`: another program killed it, or memory ran out. `failed`: workers do not start.
    """

    engine: str
    reason: str
    from_outside: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class ServerStopped(Event):
    """An engine that was stopped has no process any more."""

    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of loading: worker number `worker` of `engine` has the file, and compared it with probes.

    `left` holds the numbers of the probes that are not compared yet.
    """

    engine: str
    worker: int
    checked: ModelChecked
    left: tuple[int, ...] = ()
    interface: Interface | None = None  # The model's interface, if the engine reports it


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """A Load action has succeeded."""

    deployment: int
    key: str
    proof: LoadReport


@dataclass(frozen=True, slots=True)
class LoadRefused(Event):
    """The engine cannot run the model, though it may have loaded the file; `short`: for lack of memory."""

    deployment: int
    engine: str
    key: str
    reason: str
    short: bool = False


@dataclass(frozen=True, slots=True)
class LoadCrashed(Event):
    """A process crashed while it loaded a model: the serving worker, or with `in_builder` the builder."""

    deployment: int
    reason: str
    in_builder: bool


@dataclass(frozen=True, slots=True)
class ProbePassed(Event):
    """A deployment's outputs for a probe are right; `outputs` holds the largest differences so far."""

    deployment: int
    outputs: tuple[ComparedOutput, ...]


@dataclass(frozen=True, slots=True)
class ProbeFailed(Event):
    """A deployment's outputs for a probe are wrong."""

    deployment: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Added(Event):
    """A model was stored, new or in place of another; with `proof`, a worker has loaded it, too.

    `preferred_engine` is the device of the compiled file, present or future; `compiled` is None if there is
    none. With `cpu` the CPU engine serves the model. A variant with `rests` is added suspended.
    """

    manifest: Manifest
    compiled: CompiledFileInfo | None
    preferred_engine: str
    proof: LoadReport | None
    cpu: bool = False
    rests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged(Event):
    """A stored model's compiled file cannot be used."""

    manifest: Manifest
    preferred_engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class NotRestored(Event):
    """A damaged model could not be compiled again."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ManifestChanged(Event):
    """The manifest of `model` was changed, but neither its files nor its engine."""

    model: int
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChosen(Event):
    """An engine, "gpu" or "cpu", was chosen for `model`, by comparison or by a user; `why` says the reason.

    `pinned` is the engine that is pinned, "" for none; None keeps the pin. `interface` is set if the
    manifest had none, because the CPU engine serves only models whose interface is known.
    """

    model: int
    engine: str
    why: str
    times: EngineTimes | None = None
    pinned: str | None = None
    interface: Interface | None = None


@dataclass(frozen=True, slots=True)
class OptimisationChecked(Event):
    """A check found how far ONNX Runtime may optimise a source, and the CPU engines apply it."""

    source: str  # The source's key
    result: OptimisationCheck


@dataclass(frozen=True, slots=True)
class EnginesNotCompared(Event):
    """A CompareEngines action has failed."""

    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceTimed(Event):
    """`engine` ran a request for `model`, in the shapes it was compiled for, in `ms` milliseconds."""

    model: int
    engine: str
    ms: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Some seconds have passed."""


@dataclass(frozen=True, slots=True)
class Removed(Event):
    """A model was removed from the store."""

    name: str


@dataclass(frozen=True, slots=True)
class SuspendRequested(Event):
    """A variant is to be suspended; ignored while it has work."""

    name: str


@dataclass(frozen=True, slots=True)
class FileRetained(Event):
    """A compiled file is pinned on an engine until a FileReleased, whether or not a model uses it."""

    engine: str
    key: str


@dataclass(frozen=True, slots=True)
class FileReleased(Event):
    """A pin set by a FileRetained was released."""

    engine: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessorReady(Event):
    """A better version of `model` is stored and loaded; an exception refuses it if `model` is not served."""

    model: int
    manifest: Manifest
    compiled: CompiledFileInfo
    proof: LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChosen(Event):
    """A user chose an earlier version; it is loaded, and stored as the one served."""

    manifest: Manifest
    compiled: CompiledFileInfo
    proof: LoadReport


@dataclass(frozen=True, slots=True)
class CanaryCompared(Event):
    """A canary was compared with the previous version; an `objection` says why to roll back, or is ""."""

    model: int
    objection: str


@dataclass(frozen=True, slots=True)
class CanaryComparisonCrashed(Event):
    """The worker ended during the comparison of a canary."""

    model: int
    reason: str


@dataclass(frozen=True, slots=True)
class Inspected(Event):
    """The compiled file of a version that serves again after a rollback was read."""

    model: int
    compiled: CompiledFileInfo


# ---- Actions ----
#
# An action that takes time ends with an event.


class Action:
    """The base class of actions."""

    __slots__ = ()


@dataclass(slots=True)
class Run(Action):
    """Run a request on an engine; ends with RunSucceeded, WorkerFailed or RequestRejected.

    If the worker ends before the run begins, the action ends with WorkerLost.
    """

    engine: str
    ticket: Ticket
    model: ServedModel


@dataclass(frozen=True, slots=True)
class EndRun(Action):
    """End the run of a request that its client abandoned; the run's own event follows."""

    engine: str
    request: int


@dataclass(slots=True)
class Answer(Action):
    """Complete a request with the results of its runs."""

    request: int


@dataclass(frozen=True, slots=True)
class Refuse(Action):
    """Fail a request with an error."""

    request: int
    error: HonedError


@dataclass(frozen=True, slots=True)
class Load(Action):
    """Load and verify a model; `awaited` if requests may wait for it.

    Ends with Loaded, LoadRefused or LoadCrashed, or with the engine's worker.
    """

    engine: str
    deployment: int
    model: ServedModel
    awaited: bool


@dataclass(frozen=True, slots=True)
class VerifyProbe(Action):
    """Verify an unchecked probe of a deployment; ends with ProbePassed, ProbeFailed, or the worker."""

    engine: str
    deployment: int
    model: ServedModel
    probe: int


@dataclass(frozen=True, slots=True)
class Unload(Action):
    """Unload a compiled file from an engine's worker."""

    engine: str
    key: str


@dataclass(frozen=True, slots=True)
class Kill(Action):
    """End an engine's worker."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartServer(Action):
    """Start an engine's worker, and restart it whenever it ends."""

    engine: str


@dataclass(frozen=True, slots=True)
class StopServer(Action):
    """End an engine's processes; ends with ServerStopped."""

    engine: str


@dataclass(frozen=True, slots=True)
class CompareCanary(Action):
    """Compare a canary with the previous version, on inputs that clients have sent since.

    Ends with CanaryCompared or CanaryComparisonCrashed.
    """

    model: ServedModel
    before: ServedModel


@dataclass(frozen=True, slots=True)
class Persist(Action):
    """Store the manifest of a model, unless it is not served any more."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class InspectFile(Action):
    """Read the compiled file of a model again; ends with Inspected."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class CompareEngines(Action):
    """Time a model on device and CPU engine in turns; ends with EngineChosen or EnginesNotCompared."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class Log(Action):
    """Log what the machine did: with `error` because of a failure, else for information."""

    sentence: str
    error: bool = True
