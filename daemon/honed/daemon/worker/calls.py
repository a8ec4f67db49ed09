"""Defines the calls between the service and its workers, and their results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgpack

from honed.daemon.store.compiled import Interface
from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.process.rpc import Call, R
from honed.protocol import strict
from honed.protocol.errors import AnswerTooLarge, ResourceExhausted, SequenceLost
from honed.protocol.values import ComparedOutput, Data, Empty, ModelProfile, ObservedSizes
from honed.runtime.engines import LOWEST


class WorkerCall(Call[R]):
    """The base class of calls to a worker; `work` marks those that build or run a model."""

    __slots__ = ()
    work: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """The device of a worker."""

    spec: str
    identity: DeviceIdentity
    profile: DeviceProfile | None  # The device's profile; None for a CPU engine


@dataclass(frozen=True, slots=True, kw_only=True)
class FindDevice(WorkerCall[FoundDevice]):
    """Find the device and its profile; measure unknown peaks within `measure_seconds`, None: do without.

    The driver takes memory, so without `models` another process loads it. A builder needs no peaks.
    """

    models: bool
    measure_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDevice(WorkerCall[Empty]):
    """Load the driver of the found device, unless it is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """The full name of the device that a model was built for, and the number of its probes.

    `interface` is the file's, if the engine reports it.
    """

    device: str
    probes: int
    interface: Interface | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildModel(WorkerCall[BuiltModel]):
    """Build and load the file at `path`, with reports of progress.

    ONNX Runtime optimises it to `level`. This replaces a session with another level, or with another fp16
    file, whose SHA-256 is `half`.
    """

    work = True
    key: str
    path: str
    level: str = LOWEST
    half: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedProbe:
    """The largest error of each output over the probes so far; `device_error` is "" if the device ran."""

    outputs: tuple[ComparedOutput, ...] = ()
    device_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckProbe(WorkerCall[CheckedProbe]):
    """Compare a model's outputs for a probe with the reference outputs in its file."""

    work = True
    key: str
    probe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRun:
    """A run in a comparison: its nanoseconds, what was `wrong`, and the number of `sets` of inputs.

    `clock_hz` is the GPU's clock right after the run; None on other devices, or if it cannot be read.
    """

    ns: int = 0
    clock_hz: int | None = None
    wrong: str = ""
    sets: int = 0
    device_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison(WorkerCall[ComparisonRun]):
    """Run one of two models in a comparison; `which` is 0 for the old one, whose pair 0 starts it."""

    work = True
    old: str
    new: str
    pair: int
    which: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnProbe(WorkerCall[ComparisonRun]):
    """Run a model of the CPU engine once, on the probe inputs number `turn` of a compiled file."""

    work = True
    key: str
    compiled: str
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel(WorkerCall[Empty]):
    """Unload a model, if it is loaded."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRegion(WorkerCall[Empty]):
    """Map the shared memory of the descriptor sent with the call, under a number."""

    region: int
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRegion(WorkerCall[Empty]):
    """Unmap a region of shared memory."""

    region: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(WorkerCall[Empty]):
    """Check that the serving thread answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSlice:
    """A range of bytes in a mapped region."""

    region: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input; its data is inline in the call if it has no `place`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: RegionSlice | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """An output; its data is inline in the answer if it has no `place`."""

    name: str
    place: RegionSlice | None


@dataclass(slots=True, kw_only=True)  # Constructing a frozen one takes four times as long
class InferenceResult:
    """The inline outputs of a run, the packed layout of all outputs, and the times of its stages.

    `layout` is from `pack_layout`, and unpacked once for many runs. `observed` are the sizes of partitions
    whose sizes depend on the data. `lowered` is the error of the optimised session if the model now runs
    without optimisation.
    """

    raw: tuple[Data, ...]
    layout: bytes
    input_ns: int
    infer_ns: int
    output_ns: int
    observed: tuple[ObservedSizes, ...] = ()
    lowered: str = ""


def pack_layout(shapes: Sequence[Sequence[int]], offsets: Sequence[int]) -> bytes:
    """Return the encoded layout of outputs: their shapes in the requested order, and their places.

    `offsets` are bytes from the start of the call's `room`; -1 for outputs elsewhere.
    """
    packed: bytes = msgpack.packb((shapes, offsets))
    return packed


def unpack_layout(layout: bytes) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the shapes and offsets of a layout from `pack_layout`."""
    shapes, offsets = msgpack.unpackb(layout)
    return [tuple(shape) for shape in shapes], offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTemplate:
    """A run without its data, shared by similar runs; inline outputs have at most `max_bytes`.

    `room` is shared memory for outputs without a place. With `keep` the inputs may be recorded, to compare
    versions on.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    room: RegionSlice | None
    finite: bool
    keep: bool
    max_bytes: int

    def pack(self) -> bytes:
        """Return the encoded template, the `form` of `RunModel`."""
        packed: bytes = msgpack.packb(strict.to_plain(self))
        return packed


@functools.lru_cache(maxsize=256)
def _unpack(form: bytes) -> RunTemplate:
    return strict.from_plain(RunTemplate, msgpack.unpackb(form), where="the form of a run")


@dataclass(slots=True, kw_only=True)  # Constructing a frozen one takes four times as long
class RunModel(WorkerCall[InferenceResult]):
    """Run a model once; `raw` is the data of its inline inputs.

    `form` is a packed `RunTemplate`, which is encoded and decoded once for many runs.
    """

    work = True
    key: str
    form: bytes
    raw: tuple[Data, ...]

    @property
    def template(self) -> RunTemplate:
        """The unpacked run template."""
        return _unpack(self.form)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The results of a batch's calls, in their order."""

    members: tuple[InferenceResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch(WorkerCall[BatchResult]):
    """Run several calls for one model as one, joined along the first dimension of each input and output."""

    work = True
    key: str
    members: tuple[RunModel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensorSpec:
    """A state tensor that stays in the worker: an output, and the input of the next step that receives it.

    Before the first step it has `initial_shape` and is zero. It grows on `axis`; with -1 it is the output of
    the latest step, or with `set_once` of the first.
    """

    output: str
    input: str
    dtype: str
    initial_shape: tuple[int, ...]
    axis: int
    set_once: bool


@dataclass(slots=True, kw_only=True)  # Constructing a frozen one takes four times as long
class StepResult:
    """The result of a step, the rows of growing state after it, and the bytes of the sequence's state.

    `tokens` are those that a greedy step chose; its result has no outputs.
    """

    result: InferenceResult
    rows: int
    nbytes: int
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyChoice:
    """A choice of the token with the largest of the last row's `logits`, as the next value of input `tokens`.

    It is repeated after a run for each of `later`, the data of the run's inline inputs, in which that of
    `tokens` is replaced. It ends early with a token in `stop`.
    """

    tokens: str
    logits: str
    stop: tuple[int, ...]
    later: tuple[tuple[Data, ...], ...] = ()


@dataclass(slots=True, kw_only=True)  # Constructing a frozen one takes four times as long
class RunStep(WorkerCall[StepResult]):
    """Run the next step of a sequence, whose state the worker holds and passes to the model.

    It starts from the first `rows` rows of growing state; 0 begins the sequence. Without `tensors` these are
    those of the previous step. The first `count` tokens of each member of a `batch` are the client's. The CPU
    engine generates missing inputs (`step_inputs`), and keeps inputs in `constants` from the step that sends
    them. State that would exceed `max_state_bytes` is not changed. Of each output in `last_token` the answer
    has one row, of the client's last token. With `greedy` it has the chosen tokens, and no outputs.
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
    greedy: GreedyChoice | None = None

    def check_state(self, nbytes: int) -> None:
        """Raise ResourceExhausted if `nbytes` of state are more than the sequence may have."""
        if nbytes > self.max_state_bytes:
            raise ResourceExhausted(
                f"the sequence's state would have {nbytes} bytes, and its user may have "
                f"{self.max_state_bytes} more; end sequences, or raise max_mib of [sequences]"
            )


def answer_too_large(nbytes: int, most: int, room: int) -> AnswerTooLarge:
    """Return the error for outputs of `nbytes` in an answer of at most `most`; shared memory takes `room`."""
    return AnswerTooLarge(
        f"the outputs have {nbytes} bytes and an answer may hold {most}; place them in shared memory", room
    )


def state_lost() -> SequenceLost:
    """Return the error for a sequence whose state was in a process that has ended."""
    return SequenceLost("the process that held its state has ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """The rows of a sequence's growing state: inputs, and their row-major data."""

    tensors: tuple[InputSpec, ...]
    raw: tuple[Data, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSequence(WorkerCall[SequenceState]):
    """Read the first `rows` rows of a sequence's state, to move it to another engine."""

    sequence: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSequence(WorkerCall[Empty]):
    """Set a sequence's state to `rows` rows of each of `tensors`, with `raw` data in their order.

    Without data the rows are random, but equal in all workers.
    """

    sequence: int
    rows: int
    tensors: tuple[StateTensorSpec, ...]
    raw: tuple[Data, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSequences(WorkerCall[Empty]):
    """Drop the state of those sequences that the worker has."""

    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingCheck:
    """The result of `CompareRows`: why a model's requests must not be batched, or ""."""

    objection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRows(WorkerCall[BatchingCheck]):
    """Compare runs of a model on synthetic inputs, one by one and joined; `inputs` are those of a request."""

    work = True
    key: str
    inputs: tuple[InputSpec, ...]  # Without their data


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(WorkerCall[ComparisonRun]):
    """Run a model once on zeros, before requests do."""

    work = True
    key: str
    inputs: tuple[InputSpec, ...]  # Without their data


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileModel(WorkerCall[ModelProfile]):
    """Run a model once, timing its kernels or nodes; clients call it `name`, and `path` is its file."""

    work = True
    key: str
    name: str
    path: str
    timeline: bool
