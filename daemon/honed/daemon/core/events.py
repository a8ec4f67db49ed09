"""What the machine is told. Every event is a fact: it has happened when it is told."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.core.requests import ClientId, Ticket
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.interface import Interface
from honed.daemon.store.store import EngineTimes, Manifest
from honed.protocol.errors import HonedError
from honed.protocol.results import ComparedOutput, ModelChecked, ModelSettings
from honed.protocol.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class Asked:
    """A client asks for a run; refused by an exception where it cannot even wait."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Left:
    """Nobody waits for a request any more."""

    request: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A connection ended."""

    client: ClientId


@dataclass(frozen=True, slots=True)
class Served:
    """The run of an engine's request ended well; with `more` it has further runs to come."""

    engine: str
    more: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine's worker, or with `device` the device, failed in a run."""

    engine: str
    reason: str
    device: bool


@dataclass(frozen=True, slots=True)
class Unfit:
    """The engine's worker refused to run the request."""

    engine: str
    error: HonedError


@dataclass(frozen=True, slots=True)
class NotRun:
    """The engine's worker was gone before the run began."""

    engine: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """The service stops: what is not answered by now is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """An engine has a worker, the `worker`th, without models, on the device `spec`.

    `fingerprint` tells the device with its driver from others, or the CPU engine.
    """

    engine: str
    worker: int
    spec: str
    family: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """An engine's worker ended, and every call to it has failed.

    `from_outside`: somebody else killed it, or it was for want of memory. `failed`: no worker starts.
    """

    engine: str
    reason: str
    from_outside: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class ServerStopped:
    """An engine that was to stop has no process any more."""

    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProof:
    """A compiled file is in worker number `worker` of `engine`, which compared it with its probes.

    `left` are the numbers of those probes that it was not compared with yet.
    """

    engine: str
    worker: int
    checked: ModelChecked
    left: tuple[int, ...] = ()
    interface: Interface | None = None  # where the engine tells it


@dataclass(frozen=True, slots=True)
class Loaded:
    """A Load ended well."""

    deployment: int
    key: str
    proof: LoadedProof


@dataclass(frozen=True, slots=True)
class LoadRefused:
    """The engine cannot run the model."""

    deployment: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoadBroken:
    """A process ended loading a model: the one that serves, or one `apart` that builds."""

    deployment: int
    reason: str
    apart: bool


@dataclass(frozen=True, slots=True)
class Proven:
    """A deployment answered the probe rightly; `outputs` tells how far off it was at worst."""

    deployment: int
    outputs: tuple[ComparedOutput, ...]


@dataclass(frozen=True, slots=True)
class Disproved:
    """A deployment gave a wrong answer for the probe."""

    deployment: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A model is in the store, new or in another's place; with `proof` it is in a worker, too.

    `home` is the device of its compiled form, which is None where there is none; with `cpu` the CPU engine
    serves it. A variant may be added to rest.
    """

    manifest: Manifest
    compiled: Compiled | None
    home: str
    proof: LoadedProof | None
    cpu: bool = False
    rests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A stored model's compiled file cannot be used."""

    manifest: Manifest
    home: str
    reason: str


@dataclass(frozen=True, slots=True)
class NotRestored:
    """A damaged model could not be compiled again."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The manifest of `model` says now why it is served as it is, and whether a compiler would help."""

    model: int
    why: str
    awaits_compiler: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged:
    """The settings of `model` are others from now on."""

    model: int
    settings: ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChosen:
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
class NotCompared:
    """A Compare could not be done."""

    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceTimed:
    """A request for `model`, in the shapes it was compiled for, took `engine` so long."""

    model: int
    engine: str
    ms: float


@dataclass(frozen=True, slots=True)
class Passed:
    """Some seconds have passed."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A model is in the store no more."""

    name: str


@dataclass(frozen=True, slots=True)
class Rested:
    """A variant is to rest, as soon as nothing waits for it; nothing happens where something does."""

    name: str


@dataclass(frozen=True, slots=True)
class Kept:
    """An engine is to keep a compiled file until it is let go of, whatever the models stand for."""

    engine: str
    key: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """The end of one Kept."""

    engine: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessorReady:
    """A better version of `model` is stored and loaded; refused by an exception where that is not served."""

    model: int
    manifest: Manifest
    compiled: Compiled
    proof: LoadedProof


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChosen:
    """An earlier version was chosen by hand; it is stored as the one served, and loaded."""

    manifest: Manifest
    compiled: Compiled
    proof: LoadedProof


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A successor of `model` was not taken and goes into quarantine."""

    model: int
    version: ModelVersion


@dataclass(frozen=True, slots=True)
class Pinned:
    """No version takes the place of `model`, or that is allowed again."""

    model: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """A successor was compared once more with the version before; an `objection` says why it must go."""

    model: int
    objection: str


@dataclass(frozen=True, slots=True)
class JudgingBroken:
    """The worker ended meanwhile."""

    model: int
    reason: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """The file of a version that was gone back to was read."""

    model: int
    compiled: Compiled


Event = (
    Asked
    | Left
    | ClientGone
    | Served
    | Broken
    | Unfit
    | NotRun
    | Stopping
    | WorkerReady
    | WorkerLost
    | ServerStopped
    | Loaded
    | LoadRefused
    | LoadBroken
    | Proven
    | Disproved
    | Added
    | Damaged
    | NotRestored
    | Removed
    | Rested
    | Explained
    | SettingsChanged
    | EngineChosen
    | NotCompared
    | InferenceTimed
    | Passed
    | Kept
    | LetGo
    | SuccessorReady
    | VersionChosen
    | TurnedAway
    | Pinned
    | Judged
    | JudgingBroken
    | Inspected
)
