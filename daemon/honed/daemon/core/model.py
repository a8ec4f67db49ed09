"""The state that the serving machine keeps: engines, the models they serve, and crashes and latencies."""

from __future__ import annotations

import enum
import functools
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from honed.daemon.core.queue import EmptyAxes, Queue, Ticket
from honed.daemon.core.statistics import Statistics
from honed.daemon.store.compiled import CompiledFileInfo
from honed.daemon.store.store import Manifest
from honed.machine.families import FAMILIES
from honed.protocol.results import ModelChecked

CPU_ENGINE = "ONNX Runtime/CPU"  # The engine that runs ONNX files as users added them
RESTING_SECONDS = 60.0  # Time without a request after which a user's CPU engine stops
MAX_CRASHES_AN_HOUR = 6  # Crashes of workers that ran one model and were not killed from outside
MAX_CRASHES = 4  # Consecutive crashes of workers that ran one model: two requests, two attempts each
MAX_SHARED_CRASHES = 2  # Consecutive crashes of a shared CPU engine before the model is isolated
MAX_ISOLATED_CRASHES = 6  # Consecutive crashes, shared ones included, before an isolated model is refused
RUNS_AT_ONCE = 4  # Runs of different models in one CPU engine; the next begins once all others are `long`
_FIRST_PAUSE_SECONDS = 60.0  # Length of a model's first isolation or refusal
_FIRST_ISOLATED_PAUSE_SECONDS = 2.0  # Length of an isolated model's first refusal
_LONGEST_PAUSE_SECONDS = 3600.0
_HOUR = 3600.0
DRIFT = 1.25  # Ratio of the latency now to that when the engine was chosen, or its inverse
DRIFT_RUNS = 20  # Consecutive requests that one estimate of the latency is made from
DRIFT_SECONDS = 600.0  # Minimum time between two comparisons of engines


def cpu_engine(owner: int | None, *, isolated: bool = False) -> str:
    """Return the name of the CPU engine that runs a user's own models; owner None: those of administrators.

    `isolated` selects the engine for models that crashed the shared one.
    """
    name = CPU_ENGINE if owner is None else f"{CPU_ENGINE} {owner}"
    return f"{name} isolated" if isolated else name


@functools.lru_cache(maxsize=1024)  # Each request calls this function several times
def is_cpu(engine: str) -> bool:
    """Return whether an engine is a CPU engine, shared or of a user."""
    return engine.startswith(CPU_ENGINE)


def kind_of(engine: str) -> Literal["gpu", "cpu"]:
    """Return the kind that answers report: "cpu" for a CPU engine, "gpu" for compiled files on a device."""
    return "cpu" if is_cpu(engine) else "gpu"


class State(enum.Enum):
    """The readiness of a model; the values are the protocol's."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


class Phase(enum.Enum):
    """The phase of an engine's worker process."""

    RESTING = "resting"  # Stopped: an on-demand engine that is not needed
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"  # Two workers in a row ended before they were ready; the next one is starting
    STOPPING = "stopping"  # Ending: an on-demand engine that is not needed any more


@dataclass(slots=True, kw_only=True)
class Deployment:
    """A version of a model on one engine.

    `checked` is the engine's comparison with the probes; those in `unchecked_probes` are compared later.
    A `resting` deployment is loaded at the next request. One that is UNAVAILABLE because it crashed processes
    is retried at `again`, in monotonic seconds.
    """

    number: int
    engine: str
    state: State = State.LOADING
    reason: str = ""
    checked: ModelChecked | None = None
    unchecked_probes: tuple[int, ...] = ()
    loading: bool = False  # A Load is in progress
    used: float = float("-inf")  # Time of the last request (monotonic seconds)
    resting: bool = False
    again: float = float("inf")

    def ready(self, checked: ModelChecked | None, left: tuple[int, ...] = ()) -> None:
        """Mark the deployment as ready: the engine has loaded and checked it."""
        self.state, self.reason, self.checked, self.unchecked_probes = State.READY, "", checked, left

    @property
    def used_there(self) -> bool:
        """Return whether the engine needs the file: the deployment was not given up, or loads."""
        return self.loading or self.state is not State.UNAVAILABLE

    def due(self, now: float) -> bool:
        """Return whether an unavailable deployment is to be retried now."""
        return self.state is State.UNAVAILABLE and self.again <= now

    def mark_lost(self) -> None:
        """Mark the deployment as lost with the engine's worker and all that it had loaded."""
        self.loading, self.unchecked_probes = False, ()
        if self.state is State.READY:
            self.state = State.LOADING


@dataclass(slots=True)
class CrashRecord:
    """The crashes charged to a version.

    `crashes` counts consecutive ones while it ran, `load_crashes` consecutive ones while it was loaded, and
    `times` holds those of the last hour. `refusals` counts consecutive temporary refusals, `isolations` all
    isolations. `answers` says for inputs with empty axes whether they were answered (True) or crash the CPU
    engine (False).
    """

    crashes: int = 0
    load_crashes: int = 0
    refusals: int = 0
    isolations: int = 0
    times: tuple[float, ...] = ()
    answers: dict[EmptyAxes, bool] = field(default_factory=dict)

    def count_crash(self, now: float) -> int:
        """Count a crash of a worker that ran the model, and return how many there were within an hour."""
        self.times = (*(t for t in self.times if now - t < _HOUR), now)
        return len(self.times)

    def record_success(self) -> None:
        """Record that a worker ran the model to its end."""
        self.crashes = self.refusals = 0

    def count_refusal(self, *, isolated: bool) -> float:
        """Count a refusal, and return its length in seconds: twice as long each time in a row."""
        self.refusals += 1
        return _longer(_FIRST_ISOLATED_PAUSE_SECONDS if isolated else _FIRST_PAUSE_SECONDS, self.refusals)

    def count_isolation(self) -> float:
        """Count an isolation, and return its length in seconds: twice as long each time."""
        self.isolations += 1
        return _longer(_FIRST_PAUSE_SECONDS, self.isolations)


def _longer(first: float, times: int) -> float:
    """Return a pause that doubles each time, up to an hour."""
    return min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** min(times - 1, 20))


class LatencyDrift:
    """A detector of changed latency: the latest latencies of a model on one engine, in milliseconds."""

    def __init__(self) -> None:
        self._engine = ""
        self._latest: deque[float] = deque(maxlen=DRIFT_RUNS)

    def note(self, engine: str, ms: float, chosen_ms: float) -> bool:
        """Count a request, and return whether the latency has drifted.

        After each `DRIFT_RUNS` requests their lower quartile is compared with `chosen_ms`: beyond a factor of
        `DRIFT`, up or down, it has drifted. Another engine starts the count again.
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
    """A successor on trial. `before` is the version it replaced, still loaded."""

    before: ServedModel
    since: float  # Monotonic seconds
    served: int = 0
    judging: bool = False
    strikes: int = 0  # Workers that ended during its comparison with `before`


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """A model at the version that is served; another version is another object. Only the machine changes it.

    `engine` serves it, and `preferred_engine` should: the engine of `device`, which runs its compiled file
    or would run one, or the CPU engine. `failover_reason` says why the two differ, or is "". `compiled` is
    None if there is no compiled file or it could not be read. The engines in `rejected_by` gave the model up.
    No engine serves a suspended variant. `isolated` says why ONNX Runtime runs the model in a process apart
    from other models, until `isolated_until` in monotonic seconds; otherwise it is "".
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
    deployments: dict[str, Deployment] = field(default_factory=dict)  # Deployments by engine
    crash_record: CrashRecord = field(default_factory=CrashRecord)
    canary: Canary | None = None
    statistics: Statistics = field(default_factory=Statistics)
    comparing: bool = False  # A comparison of both engines is in progress
    compared: float = float("-inf")  # Start of the last comparison (monotonic seconds)
    drift: LatencyDrift = field(default_factory=LatencyDrift)
    name: str = field(init=False)  # The name by which clients request the model

    def __post_init__(self) -> None:
        self.name = self.manifest.name

    @property
    def key(self) -> str:
        """The SHA-256 of the compiled file, or of the source if there is none."""
        return self.manifest.key

    def key_on(self, engine: str) -> str:
        """Return the key by which the worker of an engine knows the model."""
        return self.manifest.source_key if is_cpu(engine) else self.key

    @property
    def cpu_engine(self) -> str:
        """The name of the CPU engine that may run the model."""
        return cpu_engine(self.manifest.owner, isolated=bool(self.isolated))

    @property
    def on_cpu(self) -> bool:
        """Return whether a CPU engine serves the model."""
        return is_cpu(self.engine)

    @property
    def kind(self) -> str:
        """The kind of engine that the model's answers report."""
        return self.kind_on(self.engine)

    def kind_on(self, engine: str) -> str:
        """Return the kind that an engine is for this model: "cpu", "gpu", or "gpu+cpu".

        It is "gpu+cpu" if the compiled file leaves partitions to the CPU engine.
        """
        kind = kind_of(engine)
        return self.compiled.engine if kind == "gpu" and self.compiled is not None else kind

    @property
    def on_device(self) -> bool:
        """Return whether the device of the compiled file serves the model."""
        return self.engine == self.device

    @property
    def can_run_on_cpu(self) -> bool:
        """Return whether the CPU engine can run the model, in all shapes that its file allows."""
        return self.manifest.interface is not None

    @property
    def has_dynamic_inputs(self) -> bool:
        """Return whether the file is known to leave sizes of inputs dynamic."""
        interface = self.manifest.interface
        return interface is not None and any(tensor.is_open for tensor in interface.inputs)

    @property
    def on_preferred_engine(self) -> bool:
        """Return whether the preferred engine serves the model."""
        return self.engine == self.preferred_engine

    @property
    def deployment(self) -> Deployment:
        """The deployment on the engine that serves the model."""
        return self.deployments[self.engine]

    @property
    def state(self) -> State:
        """The state of that deployment; a resting one is READY, as a request loads it."""
        deployment = self.deployment
        if deployment.resting and deployment.state is State.LOADING:
            return State.READY
        return deployment.state

    @property
    def reason(self) -> str:
        """The reason why the model cannot be run, or ""."""
        return self.deployment.reason

    @property
    def remark(self) -> str:
        """The first reason to show to users: it cannot be run, has failed over or is isolated; or ""."""
        return self.reason or self.failover_reason or self.isolated

    @property
    def checked(self) -> ModelChecked | None:
        """The comparison with the probes by the engine that serves the model."""
        return self.deployment.checked


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A running request; `abandoned` once its client gave up.

    Once it has run for `long`, requests for other models may start beside it.
    """

    ticket: Ticket
    model: ServedModel
    abandoned: bool = False
    long: bool = False


@dataclass(slots=True, kw_only=True)
class Engine:
    """An engine that runs models: the worker of an OpenCL device, or a CPU engine.

    `name` is the configured name of the device ("" for the best one), or the result of `cpu_engine`. An
    `on_demand` engine, such as each CPU engine, runs only while it is needed. A user's, and one that is
    `isolating`, also stops while its models are not requested. An isolating engine begins one run or load
    at a time, so that a crash has one cause. `worker` counts its workers; each starts with no model loaded.
    `running` holds the running requests by number. `fallen` holds requests that failed with a worker whose
    end is not reported yet, `fallen_loads` the numbers of deployments whose load failed so.
    """

    name: str
    queue: Queue
    on_demand: bool = False
    owner: int | None = None  # The user whose own models it runs
    isolating: bool = False
    phase: Phase = Phase.STARTING
    worker: int = 0
    spec: str = ""  # The device's full name, "" until a worker reported it
    family: str = ""  # The device's family, "" until a worker reported it
    fingerprint: str = ""  # Fingerprint of device and driver, or of ONNX Runtime; "" at first
    reason: str = ""  # Reason why the last worker ended
    running: dict[int, RunningRequest] = field(default_factory=dict)
    fallen: list[RunningRequest] = field(default_factory=list)
    fallen_loads: list[int] = field(default_factory=list)
    ended: float = float("-inf")  # Time when a request last ended (monotonic seconds)
    proving: int | None = None  # Number of the deployment whose unchecked probes are verified
    kept: Counter[str] = field(default_factory=Counter)  # Pins on compiled files that no model has yet

    @property
    def stops_when_unused(self) -> bool:
        """Return whether the engine also stops while its models are not requested."""
        return self.owner is not None or self.isolating

    @property
    def open_to_more(self) -> bool:
        """Return whether another run may begin: none is running, or in a CPU engine all take long."""
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
        """Return whether this on-demand engine's worker is stopped or stopping."""
        return self.phase in (Phase.RESTING, Phase.STOPPING)

    @property
    def state(self) -> str:
        """The phase of the worker as reported to users; a stopping one is "resting"."""
        return (Phase.RESTING if self.is_inactive else self.phase).value

    @property
    def on_processor(self) -> bool:
        """Return whether the engine's device is the host's processor."""
        family = FAMILIES.get(self.family)  # The family is "" until a worker reports it
        return family is not None and family.processor

    @property
    def label(self) -> str:
        """The device's name for messages: the full name once a worker reported it."""
        return self.spec or self.name or "the best device"

    @property
    def not_starting(self) -> str:
        """The sentence about an engine that has failed."""
        return f"the worker does not start ({self.reason})"

    def worker_ends(self) -> None:
        """Stop sending calls to a worker that is about to end; its end is reported later."""
        if self.phase is Phase.READY:
            self.phase = Phase.STARTING

    def idle_seconds(self, now: float) -> float:
        """Return the seconds since a request last ran or waited."""
        return 0.0 if self.running or len(self.queue) else now - self.ended
