"""What the machine wants done. Those that take time end in an event."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.core.requests import Ticket
from honed.protocol.errors import HonedError

from .states import ServedModel


class Action:
    """What is to be done."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Run(Action):
    """Run a request on an engine; ends in Served, Broken, Unfit or NotRun."""

    engine: str
    ticket: Ticket
    model: ServedModel


@dataclass(frozen=True, slots=True)
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
class Prove(Action):
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
class Judge(Action):
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
class Inspect(Action):
    """Read the compiled file of a model anew; ends in Inspected."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class FallBack(Action):
    """Told: a version does wrong, and the one before serves again."""

    model: str
    left: int
    served: int
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp(Action):
    """Told: a model is not served any more."""

    model: str
    why: str


@dataclass(frozen=True, slots=True)
class Settled(Action):
    """Told: a successor has served cleanly."""

    model: str
    version: int


@dataclass(frozen=True, slots=True)
class HandOver(Action):
    """Told: an engine is lost, and another serves its models."""

    engine: str
    other: str
    models: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Back(Action):
    """Told: a model is served by the engine it belongs to again."""

    model: str
    engine: str


@dataclass(frozen=True, slots=True)
class StaysAway(Action):
    """Told: the engine a model belongs to is back and cannot run it."""

    model: str
    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class Switched(Action):
    """Told: an engine cannot serve a model, and another does from now on."""

    model: str
    engine: str
    other: str
    why: str


@dataclass(frozen=True, slots=True)
class Compare(Action):
    """Run a model on the device and on the CPU engine in turns; ends in EngineChosen or NotCompared."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class EngineChanged(Action):
    """Told: a model belongs to another engine from now on."""

    model: str
    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class Failed(Action):
    """Told: a run of a model failed with its worker."""

    model: str
    attempt: int
    why: str
