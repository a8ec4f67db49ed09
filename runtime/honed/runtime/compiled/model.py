"""The content of a compiled model: the header of a `.honed` file as frozen dataclasses.

The compiler fills these in, `modelfile` writes and reads them, the executor binds them. This module does no
I/O and checks nothing; `validate` has all rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

from honed.machine.profile import DeviceProfile
from honed.runtime.engines import HIGHEST

FORMAT_VERSION = 2
CONSTANT_ALIGN = 4096  # Bytes; constants start on a page so that the file can be mapped
Place = Literal["input", "output", "constant", "prepared", "scratch"]
Attr = int | float | str | bool | tuple[int, ...]
CPU_PART = "cpu_part"  # Host call that runs a partition in the CPU engine
COMPILED_PART = "compiled_part"  # Name in profiles of a partition compiled for observed sizes
# Extra input of a compiled decoder, [1, room]: a mask of the rows of its state that are in use.
ROWS_MASK: Final = "honed.rows_mask"


class Growth(NamedTuple):
    """State that grows along an axis: the input with its present rows, and the output with new rows.

    New rows are last in the output; if it is as long as the input, they follow the present rows, perhaps in
    the input's own buffer, so that nothing is copied.
    """

    input: str
    output: str
    axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """The decision of `--precision auto` for or against fp16, and its reason, as part of a sentence.

    The compiler names operators by their outputs: in an fp16 model, those in `single` compute in float32, and
    `wide` are products that accumulate in float32.
    """

    half: bool
    why: str
    single: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """The ONNX file that was compiled, and the precision chosen for it."""

    sha256: str  # SHA-256 of the ONNX file as the user gave it
    filename: str
    producer: str
    opset: int
    precision: str  # Precision of the arithmetic: "fp32", "fp16", "fp64" or "mixed"
    notes: tuple[str, ...]  # Facts for the user, one sentence each (fallbacks, bound shapes)
    choice: PrecisionChoice | None = None  # Decision for the precision; None if the user chose it


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A tensor in device memory: dense, row-major.

    `offset` (bytes) counts from the start of the constant section for place "constant", of the prepared
    section for "prepared" and of the scratch arena for "scratch"; it is 0 for inputs and outputs, which have
    allocations of their own so that the host can map them. A buffer that lies `within` another (an index) is
    part of its memory, and `offset` counts from there.
    """

    dtype: str
    shape: tuple[int, ...]
    place: Place
    offset: int
    nbytes: int
    within: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named input or output. If `dtype` differs from its buffer's, the executor casts it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int  # Index into CompiledModel.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Precondition:
    """A range of values of an input outside which the compiled model does not serve a request.

    All elements lie in `low`..`high`, both included. `why` says what relies on it, as part of a sentence.
    """

    input: str
    low: int
    high: int
    why: str

    def allows(self, values: Any) -> bool:
        """Return whether all elements of a NumPy array are in the range."""
        return not values.size or bool(self.low <= values.min() and values.max() <= self.high)

    def __str__(self) -> str:
        """Return the precondition as part of a sentence."""
        values = f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"
        return f"input {self.input!r} holds {values} ({self.why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelArg:
    """A `__global` pointer argument of a kernel."""

    dtype: str
    nbytes: int  # Smallest size in bytes of the buffer bound to it
    access: Literal["read", "write", "readwrite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An entry of an OpenCL C source with its launch geometry.

    `grid` is in work-groups and `block` in work-items per work-group, each (x, y, z). `flops` and `bytes` are
    the least that one launch computes (operations) and moves (bytes).
    """

    name: str  # Unique in the model; shown in profiles
    source: int  # Index into CompiledModel.sources
    entry: str
    args: tuple[KernelArg, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: int
    bytes: int
    task: str  # The tuning task that it implements
    schedule: str  # Origin of its schedule: a default rule's name, or a record's id


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Enqueue kernel number `kernel` on `buffers`, in the order of its arguments."""

    kernel: int
    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copy the bytes of one buffer to another of the same size."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """Run a partition in the CPU engine between two launches: `function` is CPU_PART."""

    function: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: dict[str, Attr]


Preparation = Launch | Copy
Step = Preparation | HostCall
# Tags of steps in headers
_PREPARATIONS: Final[dict[str, type]] = {"launch": Launch, "copy": Copy}
_STEPS: Final[dict[str, type]] = {**_PREPARATIONS, "hostcall": HostCall}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Inputs, and the outputs that an independent reference computed for them.

    The tuples hold indices of constant buffers, in the order of the model's inputs and outputs and in the
    types the user sees. `tolerance[i]` is the largest allowed |difference| over the largest |reference value|
    of output i (0: equal). `behind` are the outputs of the tail, in the shapes that they have for these
    inputs.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tolerance: tuple[float, ...]
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Outputs whose rows one selection orders: rows with tied scores are compared as a set.

    `outputs` are numbers of outputs, `axes` the axis of rows in each. `score` is the output that holds the
    scores that order the rows, None if no output does.
    """

    outputs: tuple[int, ...]
    axes: tuple[int, ...]
    score: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The verification of a compiled model: its reference, probes and errors."""

    reference: str  # Name and version of the evaluator
    probes: tuple[Probe, ...]
    device: str | None  # Device of the verification after compiling; None: not run
    error: tuple[float, ...]  # Largest error over the probes for each output; empty: not run
    covered: tuple[float, ...] = ()  # Share of each output that the probes verify; empty: unknown
    selections: tuple[Selection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of the compiled graph, named by its output.

    `passes` over the graph created or changed it.
    """

    name: str
    op: str  # ONNX's name of the operator
    passes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGroup:
    """Fused operators, and the indices of the steps that compute them, in `prepare` and in `steps`."""

    operators: tuple[Operator, ...]
    prepare: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An operator without a step: its output is a buffer with another shape."""

    operator: Operator
    shape: tuple[int, ...]
    buffer: int  # Index into CompiledModel.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTensor:
    """An input or output of a partition, by its name in the model; size -1 depends on the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPartition:
    """Nodes of the model that the CPU engine runs, as an ONNX file in the constant buffer `onnx`.

    `nodes` counts them, `flops` estimates their operations, and `why` lists the reasons that they are not
    compiled. `sized`: the only reason is that sizes of inputs depend on the data (-1), so the partition may
    have size specialisations. `by_rows`: these sizes are the first dimension of each shape and rows are
    independent, so that a specialisation may run on more rows than there are. ONNX Runtime optimises the
    partition to `level`, one of `honed.runtime.engines.LEVELS`.
    """

    onnx: int  # Index into CompiledModel.buffers
    inputs: tuple[PartitionTensor, ...]
    outputs: tuple[PartitionTensor, ...]
    nodes: int
    flops: int
    why: tuple[str, ...]
    sized: bool = False
    by_rows: bool = False
    level: str = HIGHEST


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSizes:
    """Observed sizes of a partition for which it has no size specialisation, and the reason."""

    part: int
    sizes: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTable:
    """The partitions of a model: `parts` run on the CPU engine; `nodes` and `flops` count what is compiled.

    Host calls of CPU_PART run them between launches. Those numbered `tail` run after the last step, in order:
    the inputs of each are, by name, outputs of the steps, inputs of the model, and outputs of earlier
    partitions of the tail. `outputs` are the model's, from steps or tail.
    """

    parts: tuple[CpuPartition, ...]
    tail: tuple[int, ...] = field(metadata={"wire": "behind"})
    outputs: tuple[PartitionTensor, ...]
    nodes: int
    flops: int
    left_out: tuple[SkippedSizes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialisationTimes:
    """Microseconds of a partition, measured in turns: compiled, with transfers, and on the CPU engine."""

    compiled_us: float
    cpu_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSpecialisation:
    """A partition of the tail, compiled for observed sizes.

    `sizes` replace each -1 in the shapes of its inputs, in order. `model` has the partition's inputs and
    outputs, and its constants are in the file's one constant section. `times` are None if it was not run. It
    runs for exactly these sizes, and if `least` is not 0, for any number of rows from `least` to its own.
    """

    part: int
    sizes: tuple[int, ...]
    model: CompiledModel
    times: SpecialisationTimes | None
    least: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModel:
    """A whole compiled model, without the bytes of its constants.

    `prepare` runs once, when the model is loaded, and computes the prepared buffers from constants; `steps`
    run in each inference. `parts` and `views` describe the operators that they compute, and do not affect
    execution. `outputs` are those of the steps, which are the model's unless it is `split`. `forms` are size
    specialisations of its partitions. Requests that break one of its `preconditions` are not run. Files of
    honed 0.1 have none, though they may rely on values: only files with `names_values` list all values that
    they rely on.
    """

    source: SourceModel
    compiler: dict[str, str]  # Versions of the programs that compiled it, by name
    device: DeviceProfile
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...]
    arena_bytes: int
    constant_bytes: int
    sources: tuple[str, ...]  # OpenCL C
    kernels: tuple[Kernel, ...]
    steps: tuple[Step, ...] = field(metadata={"tags": _STEPS})
    proof: Proof | None
    prepare: tuple[Preparation, ...] = field(default=(), metadata={"tags": _PREPARATIONS})
    prepared_bytes: int = 0
    parts: tuple[FusedGroup, ...] = ()
    views: tuple[View, ...] = ()
    split: PartitionTable | None = None
    forms: tuple[SizeSpecialisation, ...] = ()
    preconditions: tuple[Precondition, ...] = ()
    names_values: bool = False

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The probes of the verification; empty if the model was not verified."""
        return self.proof.probes if self.proof is not None else ()

    @property
    def tail_outputs(self) -> tuple[PartitionTensor, ...]:
        """The model's outputs that the tail computes."""
        by_steps = {tensor.name for tensor in self.outputs}
        return tuple(tensor for tensor in self.model_outputs if tensor.name not in by_steps)

    @property
    def model_outputs(self) -> tuple[PartitionTensor, ...]:
        """The model's outputs as its user sees them, those of the tail included."""
        if self.split is not None:
            return self.split.outputs
        return tuple(PartitionTensor(name=t.name, dtype=t.dtype, shape=t.shape) for t in self.outputs)


class ScheduleSource(StrEnum):
    """The evidence for a schedule. The first three are used without a trial."""

    RULE = "rule"
    PRIOR = "prior"
    TABLES = "tables"
    PREDICTED = "predicted"  # Predicted from its machine code, for a device that is not there
    RECORD = "record"  # Measured on such a device elsewhere, or by a honed that did not record where
    MEASURED = "measured"  # Measured on the machine that compiled the model


class SearchStrategy(StrEnum):
    """The search strategy that found a schedule."""

    RELATED = "kin"  # The best schedule of another task, adapted to this task's extents
    TABLES = "tables"
    EVOLUTION = "evolution"
    DESCENT = "descent"
    REVALIDATED = "again"  # Recorded with another driver or compiler, and measured again


@dataclass(frozen=True, slots=True)
class ScheduleProvenance:
    """The provenance of a schedule, written in a kernel's `schedule` as `measured:kin:0123456789ab`.

    That is its source, the search strategy that found it if known, and its name among schedules of that
    source.
    """

    source: ScheduleSource
    name: str
    way: SearchStrategy | None = None

    @classmethod
    def parse(cls, text: str) -> ScheduleProvenance:
        """Return the provenance whose `str` is `text`; any other text is a rule's name."""
        source, colon, rest = text.partition(":")
        if not colon or source not in set(ScheduleSource):
            return cls(ScheduleSource.RULE, text)
        way, colon, name = rest.partition(":")
        if colon and way in set(SearchStrategy):
            return cls(ScheduleSource(source), name, SearchStrategy(way))
        return cls(ScheduleSource(source), rest)

    def __str__(self) -> str:
        """Return the text in a compiled model; for a rule, the rule's own name."""
        if self.source is ScheduleSource.RULE:
            return self.name
        return ":".join((self.source, *([self.way] if self.way else []), self.name))

    @property
    def tried(self) -> bool:
        """Return whether the schedule's time was measured, here or elsewhere."""
        return self.source in (ScheduleSource.RECORD, ScheduleSource.MEASURED)


# Prefix of Relax functions that stand for an output of a CPU partition, from the frontend until lowering.
_PREFIX = "honed.cpu_part."


def part_symbol(part: int, output: int) -> str:
    """Return the name of the function that stands for output `output` of partition `part`."""
    return f"{_PREFIX}{part}.{output}"


def part_named(function: str) -> tuple[int, int] | None:
    """Return the partition and output that a function stands for; None for any other function."""
    if not function.startswith(_PREFIX):
        return None
    part, output = function.removeprefix(_PREFIX).split(".")
    return int(part), int(output)
