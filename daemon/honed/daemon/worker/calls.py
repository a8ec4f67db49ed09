"""What a worker is asked for, and what it answers: the one contract of the service's end and the worker's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import msgpack

from honed.daemon.store.compiled import Interface
from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.process.rpc import Call, R
from honed.protocol import strict
from honed.protocol.params import Data
from honed.protocol.results import ComparedOutput, Empty, ModelProfile, ObservedSizes
from honed.runtime.engines import LOWEST


class WorkerCall(Call[R]):
    """Something to ask of a worker. In those that are `work` a model is built or runs."""

    __slots__ = ()
    work: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """The device that the worker is for."""

    spec: str
    identity: DeviceIdentity
    profile: DeviceProfile | None  # None: an engine without one


@dataclass(frozen=True, slots=True, kw_only=True)
class FindDevice(WorkerCall[FoundDevice]):
    """Find the device and its profile, with peaks where they are known or can be measured in that time.

    Its driver takes memory, so that it stays out of the process until there are `models`. None: it is to
    build only, and needs no peaks.
    """

    models: bool
    measure_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDevice(WorkerCall[Empty]):
    """Load the driver of the device that was found, unless it is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """The full name of the device that a model was built for, and how many probes its file has.

    `interface` is the file's, where the engine tells it.
    """

    device: str
    probes: int
    interface: Interface | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildModel(WorkerCall[BuiltModel]):
    """Build and hold the file at `path`; tells progress.

    The CPU engine has ONNX Runtime optimise it to `level`, in the place of what it holds at another level or
    of another form: `half` is the SHA-256 of one in fp16.
    """

    work = True
    key: str
    path: str
    level: str = LOWEST
    half: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedProbe:
    """The worst of each output over the probes so far; `device_error` says how the device failed, or ""."""

    outputs: tuple[ComparedOutput, ...] = ()
    device_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckProbe(WorkerCall[CheckedProbe]):
    """Compare a model's answers on this device with those its file knows to be right, for one probe."""

    work = True
    key: str
    probe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRun:
    """One run: how long it took, how its answers were wrong, and on how many sets of inputs runs are due.

    `clock_hz` is that of the GPU right after it, None where another device ran it or it cannot be read.
    """

    ns: int = 0
    clock_hz: int | None = None
    wrong: str = ""
    sets: int = 0
    device_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison(WorkerCall[ComparisonRun]):
    """One run of two models that are compared: `which` is 0 for the old one. Pair 0 begins with it, anew."""

    work = True
    old: str
    new: str
    pair: int
    which: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnProbe(WorkerCall[ComparisonRun]):
    """Ask the CPU engine for one run on the inputs that came with a compiled file, those of set `turn`."""

    work = True
    key: str
    compiled: str
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel(WorkerCall[Empty]):
    """Let go of a model, if it is there."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRegion(WorkerCall[Empty]):
    """Map shared memory, whose descriptor comes along, under a number."""

    region: int
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRegion(WorkerCall[Empty]):
    """Unmap it."""

    region: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(WorkerCall[Empty]):
    """Tell that the serving thread is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSlice:
    """Bytes of a mapped region."""

    region: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input, whose data comes along in line where it has no `place`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: RegionSlice | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """An output, whose data is answered in line where it has no `place`."""

    name: str
    place: RegionSlice | None


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class InferenceResult:
    """Outputs that have no place, the shapes of all, in the order asked for, and the time of each part.

    Where the call has room, `offsets` of all, in bytes from its start; -1 for those that are not there.
    `observed` are the sizes of partitions whose sizes depend on the data. `lowered` is how the run failed
    in ONNX Runtime until the model was run without optimisation, as it is from now on.
    """

    raw: tuple[Data, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    input_ns: int
    infer_ns: int
    output_ns: int
    observed: tuple[ObservedSizes, ...] = ()
    lowered: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTemplate:
    """What runs have in common that differ in their data alone; outputs in line have at most `max_bytes`.

    `room` is for outputs that have no place. `keep`: the inputs may be kept, to compare a successor on.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    room: RegionSlice | None
    finite: bool
    keep: bool
    max_bytes: int

    def packed(self) -> bytes:
        """Return it as `RunModel` has it."""
        packed: bytes = msgpack.packb(strict.to_plain(self))
        return packed


@functools.lru_cache(maxsize=256)
def _unpacked(form: bytes) -> RunTemplate:
    return strict.from_plain(RunTemplate, msgpack.unpackb(form), where="the form of a run")


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class RunModel(WorkerCall[InferenceResult]):
    """Run once on the data of those inputs that have no place.

    The form is packed, so that of many runs it is made, and read, once.
    """

    work = True
    key: str
    form: bytes
    raw: tuple[Data, ...]

    @property
    def template(self) -> RunTemplate:
        """The form."""
        return _unpacked(self.form)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The result of each call, in their order."""

    members: tuple[InferenceResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch(WorkerCall[BatchResult]):
    """Run several calls for one model as one, joined along the first dimension of each input and output."""

    work = True
    key: str
    members: tuple[RunModel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensorSpec:
    """State that stays in the worker: an output, and the input that it is given to next.

    It has the shape `initial_shape` and is all zeros before the first step. It grows on `axis`; -1: it is
    what the latest step gave, or with `set_once` the first.
    """

    output: str
    input: str
    dtype: str
    initial_shape: tuple[int, ...]
    axis: int
    set_once: bool


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class StepResult:
    """The result of a step, the rows that growing state has now, and the bytes of the sequence's state."""

    result: InferenceResult
    rows: int
    nbytes: int


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class RunStep(WorkerCall[StepResult]):
    """Run the next step of a sequence, whose state the worker holds and gives to the model.

    It starts from the first `rows` rows of what grows, and anew where that is 0; without `tensors` they are
    those of the step before. Of its tokens the first `count` are the client's, of each of a `batch`. The CPU
    engine makes what it lacks of `step_inputs`, and keeps inputs among `constants` from the step that brings
    them. Where the state would have more than `max_state_bytes`, it stays as it was. Of outputs in
    `last_token` the answer has one row, of the client's last token.
    """

    work = True
    run: RunModel
    sequence: int
    rows: int
    count: int
    batch: int
    tensors: tuple[StateTensorSpec, ...]
    constants: tuple[str, ...]
    max_state_bytes: int
    last_token: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """The rows of what grows in a sequence, by input, row-major."""

    tensors: tuple[InputSpec, ...]
    raw: tuple[Data, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSequence(WorkerCall[SequenceState]):
    """Return the first `rows` rows of a sequence, with which another engine is to go on."""

    sequence: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSequence(WorkerCall[Empty]):
    """Go on with a sequence that has `rows` rows of each of `tensors`, whose data comes in their order.

    Without data the rows are made up, the same in every worker.
    """

    sequence: int
    rows: int
    tensors: tuple[StateTensorSpec, ...]
    raw: tuple[Data, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSequences(WorkerCall[Empty]):
    """Let go of the state of sequences, as far as it is here."""

    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingCheck:
    """Why a model must not be run on several requests at once; "" where it may."""

    objection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRows(WorkerCall[BatchingCheck]):
    """Run a model on made-up inputs one by one and joined, and compare; `shapes` are those of one request."""

    work = True
    key: str
    inputs: tuple[InputSpec, ...]  # Without their data


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(WorkerCall[ComparisonRun]):
    """Run a model once on zeros, before anybody waits for it."""

    work = True
    key: str
    inputs: tuple[InputSpec, ...]  # Without their data


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileModel(WorkerCall[ModelProfile]):
    """Run once, timed; `name` is what clients call the model, and its file is at `path`."""

    work = True
    key: str
    name: str
    path: str
    timeline: bool
