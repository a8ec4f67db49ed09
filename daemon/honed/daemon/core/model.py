"""What the machine knows: engines, the models they serve, and how each model does."""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from honed.daemon.core.queue import EmptyAxes, Queue, Ticket
from honed.daemon.core.statistics import Statistics
from honed.daemon.store.compiled import CompiledFileInfo
from honed.daemon.store.store import Manifest
from honed.machine.families import FAMILIES
from honed.protocol.results import ModelChecked

CPU_ENGINE = "ONNX Runtime/CPU"  # The engine that runs models as they were given
RESTING_SECONDS = 60.0  # Without a request, after which a user's CPU engine rests
MAX_CRASHES_AN_HOUR = 6  # Of workers that ran one model and that nobody else ended
MAX_CRASHES = 4  # In a row, of workers that ran one model: two requests with two attempts each
MAX_SHARED_CRASHES = 2  # In a row, of a CPU engine's process that ran one model among others: it is isolated
MAX_ISOLATED_CRASHES = 6  # In a row, with those before: the requests of one that is isolated are refused
RUNS_AT_ONCE = 4  # Of different models in one CPU engine, each begun when those before it had taken long
_FIRST_PAUSE_SECONDS = 60.0  # For which a model is isolated, or refused, the first time
_FIRST_ISOLATED_PAUSE_SECONDS = 2.0  # For which one is refused that is isolated, and harms no other
_LONGEST_PAUSE_SECONDS = 3600.0
_HOUR = 3600.0
DRIFT = 1.25  # Times as long, or as short, as when the engine was chosen
DRIFT_RUNS = 20  # Requests in a row that tell how long they take now
DRIFT_SECONDS = 600.0  # Between two comparisons for such a difference


def cpu_engine(owner: int | None, *, isolated: bool = False) -> str:
    """Return the CPU engine that runs a user's own models, None: those of administrators.

    `isolated`: the one for models that ended its process.
    """
    name = CPU_ENGINE if owner is None else f"{CPU_ENGINE} {owner}"
    return f"{name} isolated" if isolated else name


def is_cpu(engine: str) -> bool:
    """Return whether an engine is the CPU engine, or that of a user."""
    return engine.startswith(CPU_ENGINE)


def kind_of(engine: str) -> Literal["gpu", "cpu"]:
    """Return the kind that answers report: "cpu" for the CPU engine, "gpu" for compiled forms on a device."""
    return "cpu" if is_cpu(engine) else "gpu"


class State(enum.Enum):
    """Whether a model can be run; the values are the protocol's."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


class Phase(enum.Enum):
    """What an engine's worker is doing."""

    RESTING = "resting"  # A stand-in that is not needed
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"  # It ended twice in a row before it was ready, and is started again
    STOPPING = "stopping"  # A stand-in that is not needed any more


@dataclass(slots=True, kw_only=True)
class Deployment:
    """A version of a model on one engine.

    `checked` is the engine's comparison with the probes, of which those in `unchecked_probes` are to follow.
    One that is `resting` is loaded when it is asked for. One that is UNAVAILABLE because it ended processes
    is tried `again` at that time, in monotonic seconds.
    """

    number: int
    engine: str
    state: State = State.LOADING
    reason: str = ""
    checked: ModelChecked | None = None
    unchecked_probes: tuple[int, ...] = ()
    loading: bool = False  # A Load is under way
    used: float = float("-inf")  # When a request came for it last, in monotonic seconds
    resting: bool = False
    again: float = float("inf")

    def ready(self, checked: ModelChecked | None, left: tuple[int, ...] = ()) -> None:
        """Mark the deployment as ready: the engine has loaded and checked it."""
        self.state, self.reason, self.checked, self.unchecked_probes = State.READY, "", checked, left

    @property
    def used_there(self) -> bool:
        """Whether the engine needs its file: not where it was given up."""
        return self.loading or self.state is not State.UNAVAILABLE

    def due(self, now: float) -> bool:
        """Return whether it is to be tried again by now."""
        return self.state is State.UNAVAILABLE and self.again <= now

    def lost(self) -> None:
        """Mark the deployment as lost with the engine's worker and all that it had loaded."""
        self.loading, self.unchecked_probes = False, ()
        if self.state is State.READY:
            self.state = State.LOADING


@dataclass(slots=True)
class CrashRecord:
    """Workers that ended with a version: in a row while it ran, while it was loaded, and within an hour.

    `refusals` counts how often in a row it was refused for a while for that, `isolations` how often it was
    isolated. Of inputs that are empty somewhere `answers` says whether they are answered, or end the CPU
    engine.
    """

    crashes: int = 0
    load_crashes: int = 0
    refusals: int = 0
    isolations: int = 0
    times: tuple[float, ...] = ()
    answers: dict[EmptyAxes, bool] = field(default_factory=dict)

    def crashed(self, now: float) -> int:
        """Count a crash of a worker that ran the model, and return how many there were within an hour."""
        self.times = (*(t for t in self.times if now - t < _HOUR), now)
        return len(self.times)

    def ran_well(self) -> None:
        """Record that a worker ran the model to its end."""
        self.crashes = self.refusals = 0

    def refused(self, *, isolated: bool) -> float:
        """Return for how many seconds the model is not tried again; longer each time in a row."""
        self.refusals += 1
        return _longer(_FIRST_ISOLATED_PAUSE_SECONDS if isolated else _FIRST_PAUSE_SECONDS, self.refusals)

    def isolated(self) -> float:
        """Return for how many seconds the model is isolated; longer each time."""
        self.isolations += 1
        return _longer(_FIRST_PAUSE_SECONDS, self.isolations)


def _longer(first: float, times: int) -> float:
    """Return a pause that doubles each time, up to an hour."""
    return min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** min(times - 1, 20))


class LatencyDrift:
    """What the latest requests for a model took on one engine, in milliseconds."""

    def __init__(self) -> None:
        self._engine = ""
        self._latest: deque[float] = deque(maxlen=DRIFT_RUNS)

    def note(self, engine: str, ms: float, chosen_ms: float) -> bool:
        """Count a request; return whether the faster quarter of the latest took DRIFT more or less than then.

        They count anew then, and on another engine.
        """
        if engine != self._engine:
            self._engine = engine
            self._latest.clear()
        self._latest.append(ms)
        if len(self._latest) < DRIFT_RUNS:
            return False
        took = sorted(self._latest)[(DRIFT_RUNS - 1) // 4]
        self._latest.clear()
        return not chosen_ms / DRIFT <= took <= chosen_ms * DRIFT


@dataclass(slots=True, kw_only=True)
class Canary:
    """A successor's first time in service. `before` is the version it replaced, still loaded."""

    before: ServedModel
    since: float  # Monotonic seconds
    served: int = 0
    judging: bool = False
    strikes: int = 0  # Workers that ended while it was judged


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """A model at the version that is served; another version is another object. The machine alone changes it.

    It belongs to the engine `preferred_engine`, and `engine` is the one that serves it; `failover_reason`
    says why these differ, or
    "". Home is the engine `device`, where its compiled form is or would be, or the CPU engine. `compiled` is
    None where there is no compiled form or it could not be read. `rejected_by` are engines that gave it up. A
    variant that rests is served by nothing. `isolated` says why ONNX Runtime runs it apart from the other
    models, until `isolated_until` in monotonic seconds; "" where it does not.
    """

    number: int
    manifest: Manifest
    compiled: CompiledFileInfo | None
    device: str
    preferred_engine: str
    engine: str
    failover_reason: str = ""
    isolated: str = ""
    isolated_until: float = 0.0
    rejected_by: set[str] = field(default_factory=set)
    deployments: dict[str, Deployment] = field(default_factory=dict)  # By engine
    crash_record: CrashRecord = field(default_factory=CrashRecord)
    canary: Canary | None = None
    statistics: Statistics = field(default_factory=Statistics)
    comparing: bool = False  # Both engines run it in turns
    compared: float = float("-inf")  # When that began last, in monotonic seconds
    drift: LatencyDrift = field(default_factory=LatencyDrift)

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.manifest.name

    @property
    def key(self) -> str:
        """What tells it from others: the compiled file's SHA-256, or the source's where there is none."""
        return self.manifest.key

    def key_on(self, engine: str) -> str:
        """Return the key by which the worker of an engine knows the model."""
        return self.manifest.source_key if is_cpu(engine) else self.key

    @property
    def cpu_engine(self) -> str:
        """The CPU engine that may run it."""
        return cpu_engine(self.manifest.owner, isolated=bool(self.isolated))

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU engine serves it."""
        return is_cpu(self.engine)

    @property
    def kind(self) -> str:
        """What its answers are told to be of."""
        return self.kind_on(self.engine)

    def kind_on(self, engine: str) -> str:
        """Return the kind that an engine is for this model: "cpu", "gpu", or "gpu+cpu".

        It is "gpu+cpu" where the compiled form leaves partitions to the CPU engine.
        """
        kind = kind_of(engine)
        return self.compiled.engine if kind == "gpu" and self.compiled is not None else kind

    @property
    def on_device(self) -> bool:
        """Whether the device of its compiled form serves it."""
        return self.engine == self.device

    @property
    def can_run_on_cpu(self) -> bool:
        """Whether the CPU engine can run it, in whatever shapes its file allows."""
        return self.manifest.interface is not None

    @property
    def has_dynamic_inputs(self) -> bool:
        """Whether its file is known to leave sizes of inputs open."""
        interface = self.manifest.interface
        return interface is not None and any(tensor.is_open for tensor in interface.inputs)

    @property
    def on_preferred_engine(self) -> bool:
        """Whether the engine it belongs to serves it."""
        return self.engine == self.preferred_engine

    @property
    def deployment(self) -> Deployment:
        """On the engine that serves it."""
        return self.deployments[self.engine]

    @property
    def state(self) -> State:
        """Whether it can be run."""
        deployment = self.deployment
        if deployment.resting and deployment.state is State.LOADING:
            return State.READY
        return deployment.state

    @property
    def reason(self) -> str:
        """Why it cannot be run, or ""."""
        return self.deployment.reason

    @property
    def remark(self) -> str:
        """What users should know of its state, or ""."""
        return self.reason or self.failover_reason or self.isolated

    @property
    def checked(self) -> ModelChecked | None:
        """The comparison with its probes, by the engine that serves it."""
        return self.deployment.checked


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A request that runs; nobody waits for one that was `abandoned`.

    Others may be begun beside it once it has taken `long`.
    """

    ticket: Ticket
    model: ServedModel
    abandoned: bool = False
    long: bool = False


@dataclass(slots=True, kw_only=True)
class Engine:
    """One that runs models: the worker of an OpenCL device, or the CPU engine.

    `name` is the device's as configured, "" for the best there is, or what `cpu_engine` says. A `on_demand`,
    and the CPU engine is one, runs only while it has something to do; a user's also rests with the models
    that it serves, as does one that is `isolating`: it begins one thing at a time, runs and loads, so that it
    is known what ended its process. `worker` counts its workers; what one had loaded is gone with it.
    `running` are the requests that run, by number. Those that failed with a worker whose end is not known yet
    are in `fallen`, deployments whose loading did in `fallen_loads`.
    """

    name: str
    queue: Queue
    on_demand: bool = False
    owner: int | None = None  # The user whose own models it runs
    isolating: bool = False
    phase: Phase = Phase.STARTING
    worker: int = 0
    spec: str = ""  # The device's full name, once it was seen
    family: str = ""  # Of the device, once it was seen
    fingerprint: str = ""  # Of the device with its driver, or of the CPU engine, once it was seen
    reason: str = ""  # The last worker ended
    running: dict[int, RunningRequest] = field(default_factory=dict)
    fallen: list[RunningRequest] = field(default_factory=list)
    fallen_loads: list[int] = field(default_factory=list)
    ended: float = float("-inf")  # When a request ended last, in monotonic seconds
    proving: int | None = None  # The deployment that is compared with the probes left
    kept: Counter[str] = field(default_factory=Counter)  # Compiled files that no model stands for yet

    @property
    def stops_when_unused(self) -> bool:
        """Whether it ends, too, while what it serves is not asked for."""
        return self.owner is not None or self.isolating

    @property
    def open_to_more(self) -> bool:
        """Return whether another run may begin: where none runs, or in a CPU engine where all take long."""
        if not self.running:
            return True
        return is_cpu(self.name) and len(self.running) < RUNS_AT_ONCE and self.all_long

    @property
    def all_long(self) -> bool:
        """Return whether all runs take long, or nothing runs."""
        return all(each.long for each in self.running.values())

    def runs(self, model: ServedModel) -> bool:
        """Return whether a request for a model runs here."""
        return any(each.model is model for each in self.running.values())

    @property
    def is_inactive(self) -> bool:
        """Whether it is a stand-in whose worker is not kept, or not any more."""
        return self.phase in (Phase.RESTING, Phase.STOPPING)

    @property
    def state(self) -> str:
        """The state of its worker, as users are told."""
        return (Phase.RESTING if self.is_inactive else self.phase).value

    @property
    def on_processor(self) -> bool:
        """Whether its device is the host's processor."""
        family = FAMILIES.get(self.family)  # "": no worker has told it yet
        return family is not None and family.processor

    @property
    def shown(self) -> str:
        """The device for people: its full name once it was seen."""
        return self.spec or self.name or "the best device"

    def worker_ends(self) -> None:
        """Stop sending calls to a worker that is about to end; its end is reported later."""
        if self.phase is Phase.READY:
            self.phase = Phase.STARTING

    def idle_seconds(self, now: float) -> float:
        """Return for how many seconds no request has run or waited."""
        return 0.0 if self.running or len(self.queue) else now - self.ended
