"""What the machine is told, the events, and what it wants done, the actions."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.core.queue import ClientId, Ticket
from honed.daemon.store.compiled import CompiledFileInfo, Interface
from honed.daemon.store.store import EngineTimes, Manifest
from honed.protocol.errors import HonedError
from honed.protocol.results import (
    ComparedOutput,
    ModelChecked,
    ModelSettings,
    ModelVersion,
    OptimisationCheck,
)

from .model import ServedModel

# ---- What the machine is told ----
#
# Every event is a fact: it has happened when it is told. Those of every request are not frozen, as are its
# actions: that would make them slower to make.


class Event:
    """What has happened."""

    __slots__ = ()


@dataclass(slots=True)
class RequestArrived(Event):
    """A client asks for a run; refused by an exception where it cannot even wait."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ClientGaveUp(Event):
    """Nobody waits for a request any more."""

    request: int


@dataclass(frozen=True, slots=True)
class ClientGone(Event):
    """A connection ended."""

    client: ClientId


@dataclass(slots=True)
class RunSucceeded(Event):
    """The run of a request ended well; with `more` it has further runs to come."""

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
    """The engine's worker refused to run the request, or ended its run because nobody waits for it."""

    engine: str
    request: int
    error: HonedError


@dataclass(frozen=True, slots=True)
class RunLasts(Event):
    """The run of a request takes long: others need not wait for it."""

    engine: str
    request: int


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """The service stops: what is not answered by now is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(Event):
    """An engine has a worker, the `worker`th, without models, on the device `spec`.

    `fingerprint` tells the device with its driver from others, or the CPU engine.
    """

    engine: str
    worker: int
    spec: str
    family: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """An engine's worker ended, and every call to it has failed; a run not told of yet never began.

    `from_outside`: another program killed it, or memory ran out. `failed`: no worker starts.
    """

    engine: str
    reason: str
    from_outside: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class ServerStopped(Event):
    """An engine that was to stop has no process any more."""

    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A compiled file is in worker number `worker` of `engine`, which compared it with its probes.

    `left` are the numbers of those probes that it was not compared with yet.
    """

    engine: str
    worker: int
    checked: ModelChecked
    left: tuple[int, ...] = ()
    interface: Interface | None = None  # Where the engine tells it


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """A Load ended well."""

    deployment: int
    key: str
    proof: LoadReport


@dataclass(frozen=True, slots=True)
class LoadRefused(Event):
    """The engine cannot run the model, whose file it may have loaded; it may be `short` of memory."""

    deployment: int
    engine: str
    key: str
    reason: str
    short: bool = False


@dataclass(frozen=True, slots=True)
class LoadCrashed(Event):
    """A process ended loading a model: the one that serves, or one `apart` that builds."""

    deployment: int
    reason: str
    apart: bool


@dataclass(frozen=True, slots=True)
class ProbePassed(Event):
    """A deployment answered the probe rightly; `outputs` tells how far off it was at worst."""

    deployment: int
    outputs: tuple[ComparedOutput, ...]


@dataclass(frozen=True, slots=True)
class ProbeFailed(Event):
    """A deployment gave a wrong answer for the probe."""

    deployment: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Added(Event):
    """A model is in the store, new or in another's place; with `proof` it is in a worker, too.

    `preferred_engine` is the device of its compiled form, which is None where there is none; with `cpu` the
    CPU engine serves it. A variant may be added to rest.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReasonChanged(Event):
    """The manifest of `model` says now why it is served as it is, and whether a compiler would help."""

    model: int
    why: str
    awaits_compiler: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged(Event):
    """The settings of `model` are others from now on."""

    model: int
    settings: ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChosen(Event):
    """The engine that `model` belongs to from now on, "gpu" or "cpu", by comparison or by hand, and why.

    `pinned` is the engine that is pinned, "" for none; None: as before. `interface` is told where it was not
    known, which a model must have for the CPU engine to serve it.
    """

    model: int
    engine: str
    why: str
    times: EngineTimes | None = None
    pinned: str | None = None
    interface: Interface | None = None


@dataclass(frozen=True, slots=True)
class OptimisationChecked(Event):
    """It was checked how far ONNX Runtime may optimise a source, and the CPU engines run it so."""

    source: str  # Its key
    found: OptimisationCheck


@dataclass(frozen=True, slots=True)
class EnginesNotCompared(Event):
    """A Compare could not be done."""

    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceTimed(Event):
    """A request for `model`, in the shapes it was compiled for, took `engine` so long."""

    model: int
    engine: str
    ms: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Some seconds have passed."""


@dataclass(frozen=True, slots=True)
class Removed(Event):
    """A model is in the store no more."""

    name: str


@dataclass(frozen=True, slots=True)
class SuspendRequested(Event):
    """A variant is to rest, as soon as nothing waits for it; nothing happens where something does."""

    name: str


@dataclass(frozen=True, slots=True)
class FileRetained(Event):
    """An engine is to keep a compiled file until it is let go of, whatever the models stand for."""

    engine: str
    key: str


@dataclass(frozen=True, slots=True)
class FileReleased(Event):
    """The end of one Kept."""

    engine: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessorReady(Event):
    """A better version of `model` is stored and loaded; refused by an exception where that is not served."""

    model: int
    manifest: Manifest
    compiled: CompiledFileInfo
    proof: LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChosen(Event):
    """An earlier version was chosen by hand; it is stored as the one served, and loaded."""

    manifest: Manifest
    compiled: CompiledFileInfo
    proof: LoadReport


@dataclass(frozen=True, slots=True)
class SuccessorRejected(Event):
    """A successor of `model` was not taken and goes into quarantine."""

    model: int
    version: ModelVersion


@dataclass(frozen=True, slots=True)
class Pinned(Event):
    """No version takes the place of `model`, or that is allowed again."""

    model: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class CanaryCompared(Event):
    """A successor was compared once more with the version before; an `objection` says why it must go."""

    model: int
    objection: str


@dataclass(frozen=True, slots=True)
class CanaryComparisonCrashed(Event):
    """The worker ended meanwhile."""

    model: int
    reason: str


@dataclass(frozen=True, slots=True)
class Inspected(Event):
    """The file of a version that was gone back to was read."""

    model: int
    compiled: CompiledFileInfo


# ---- What the machine wants done ----
#
# Those that take time end in an event.


class Action:
    """What is to be done."""

    __slots__ = ()


@dataclass(slots=True)
class Run(Action):
    """Run a request on an engine; ends in Served, WorkerFailed or RequestRejected.

    Where the worker has ended before the run begins, it ends with WorkerLost.
    """

    engine: str
    ticket: Ticket
    model: ServedModel


@dataclass(frozen=True, slots=True)
class EndRun(Action):
    """Have the run of a request for which nobody waits any more end soon, as a Run ends."""

    engine: str
    request: int


@dataclass(slots=True)
class Answer(Action):
    """Give a request what its runs brought."""

    request: int


@dataclass(frozen=True, slots=True)
class Refuse(Action):
    """Tell a request why it is not served."""

    request: int
    error: HonedError


@dataclass(frozen=True, slots=True)
class Load(Action):
    """Load and prove a model; `awaited` where requests may wait for it.

    Ends in Loaded, LoadRefused or LoadBroken, or with the engine's worker.
    """

    engine: str
    deployment: int
    model: ServedModel
    awaited: bool


@dataclass(frozen=True, slots=True)
class VerifyProbe(Action):
    """Compare a deployment with a probe that is left; ends in Proven or Disproved, or with the worker."""

    engine: str
    deployment: int
    model: ServedModel
    probe: int


@dataclass(frozen=True, slots=True)
class Unload(Action):
    """Have an engine's worker forget a compiled file."""

    engine: str
    key: str


@dataclass(frozen=True, slots=True)
class Kill(Action):
    """End an engine's worker."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartServer(Action):
    """Keep a worker on an engine from now on."""

    engine: str


@dataclass(frozen=True, slots=True)
class StopServer(Action):
    """End an engine's processes; ends in ServerStopped."""

    engine: str


@dataclass(frozen=True, slots=True)
class CompareCanary(Action):
    """Compare a successor with the version before, on what clients sent since.

    Ends in Judged or JudgingBroken.
    """

    model: ServedModel
    before: ServedModel


@dataclass(frozen=True, slots=True)
class Persist(Action):
    """Store the manifest of a model, for as long as that model is served."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class InspectFile(Action):
    """Read the compiled file of a model anew; ends in Inspected."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class VersionRolledBack(Action):
    """Told: a version does wrong, and the one before serves again."""

    model: str
    left: int
    served: int
    why: str


@dataclass(frozen=True, slots=True)
class ModelUnavailable(Action):
    """Told: a model is not served any more."""

    model: str
    why: str


@dataclass(frozen=True, slots=True)
class CanaryPromoted(Action):
    """Told: a successor has served cleanly."""

    model: str
    version: int


@dataclass(frozen=True, slots=True)
class FailedOver(Action):
    """Told: an engine is lost, and another serves its models."""

    engine: str
    other: str
    models: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class FailedBack(Action):
    """Told: a model is served by the engine it belongs to again."""

    model: str
    engine: str


@dataclass(frozen=True, slots=True)
class FailbackRefused(Action):
    """Told: the engine a model belongs to is back and cannot run it."""

    model: str
    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class EngineReplaced(Action):
    """Told: an engine cannot serve a model, and another does from now on."""

    model: str
    engine: str
    other: str
    why: str


@dataclass(frozen=True, slots=True)
class Isolated(Action):
    """Told: ONNX Runtime runs a model apart from the others from now on."""

    model: str
    why: str


@dataclass(frozen=True, slots=True)
class Rejoined(Action):
    """Told: ONNX Runtime runs a model among the others again."""

    model: str


@dataclass(frozen=True, slots=True)
class CompareEngines(Action):
    """Run a model on the device and on the CPU engine in turns; ends in EngineChosen or NotCompared."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class EngineChanged(Action):
    """Told: a model belongs to another engine from now on."""

    model: str
    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class AttemptFailed(Action):
    """Told: a run of a model failed with its worker."""

    model: str
    attempt: int
    why: str
