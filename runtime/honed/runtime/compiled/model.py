"""What a compiled model says: the header of a `.honed` file as frozen dataclasses.

The compiler fills these in, `modelfile` writes and reads them, the executor binds them. Nothing here
does I/O and nothing is checked here; `validate` holds every rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from honed.machine.profile import DeviceProfile
from honed.runtime.engines import HIGHEST

FORMAT_VERSION = 2
CONSTANT_ALIGN = 4096  # Bytes; constants start on a page so that the file can be mapped
Place = Literal["input", "output", "constant", "prepared", "scratch"]
Attr = int | float | str | bool | tuple[int, ...]
CPU_PART = "cpu_part"  # The host call that runs a part of the model in the CPU engine
COMPILED_PART = "compiled_part"  # What profiles call a part that is compiled for the sizes that it met


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """Whether `--precision auto` took fp16, and why, as part of a sentence.

    The compiler names operators by the values they make: of those in fp16 `single` are in float32, and `wide`
    are products that are added up in float32.
    """

    half: bool
    why: str
    single: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """Where the model came from."""

    sha256: str  # Of the ONNX file as it was given
    filename: str
    producer: str
    opset: int
    precision: str  # Of the arithmetic: "fp32", "fp16", "fp64" or "mixed"
    notes: tuple[str, ...]  # What the user should know, one sentence each (fallbacks, bound shapes)
    choice: PrecisionChoice | None = None  # Of the precision; None where the user chose


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A tensor in device memory: dense, row-major.

    `offset` (bytes) counts from the start of the constant section for place "constant", of the prepared
    section for "prepared" and of the scratch arena for "scratch"; it is 0 for inputs and outputs, which are
    allocations of their own so that the host can map them. Where a buffer lies `within` another (an index),
    it is part of that one's memory, and `offset` counts from there.
    """

    dtype: str
    shape: tuple[int, ...]
    place: Place
    offset: int
    nbytes: int
    within: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named input or output. Where `dtype` differs from its buffer's, the executor casts at the border."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int  # Index into CompiledModel.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Precondition:
    """What the values of an input must be for the compiled form to serve a request.

    Each of them lies in `low`..`high`, both included. `why` says what relies on it, as part of a sentence.
    """

    input: str
    low: int
    high: int
    why: str

    def allows(self, values: Any) -> bool:
        """Return whether all elements of a NumPy array keep to it."""
        return not values.size or bool(self.low <= values.min() and values.max() <= self.high)

    def __str__(self) -> str:
        """Return it as part of a sentence."""
        values = f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"
        return f"input {self.input!r} holds {values} ({self.why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelArg:
    """One `__global` pointer argument of a kernel."""

    dtype: str
    nbytes: int  # The least the buffer bound to it must hold
    access: Literal["read", "write", "readwrite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One entry of an OpenCL C source with its launch geometry.

    `grid` is in work-groups and `block` in work-items per work-group, each (x, y, z).
    `flops` and `bytes` are what one launch must at least compute (operations) and move (bytes).
    """

    name: str  # Unique in the model, what profiles show
    source: int  # Index into CompiledModel.sources
    entry: str
    args: tuple[KernelArg, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: int
    bytes: int
    task: str  # The tuning task it came from
    schedule: str  # What scheduled it: a default rule's name, or a record's id


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
    """Run a part of the model in the CPU engine between two launches: `function` is CPU_PART."""

    function: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: dict[str, Attr]


Preparation = Launch | Copy
Step = Preparation | HostCall
# What a step is called in a header.
_PREPARATIONS: Final[dict[str, type]] = {"launch": Launch, "copy": Copy}
_STEPS: Final[dict[str, type]] = {**_PREPARATIONS, "hostcall": HostCall}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Inputs with the outputs an independent reference gave for them.

    The tuples hold indices of constant buffers, in the order of the model's inputs and outputs and in
    the types the user sees. `tolerance[i]` is the largest allowed |difference| over the largest
    |reference value| of output i (0: equal). `behind` are those of the part that runs behind all steps, of
    the shapes that they have for these inputs.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tolerance: tuple[float, ...]
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Outputs whose rows one selection orders: they are compared as a set of rows where scores tie.

    `outputs` are numbers of outputs, `axes` the axis of rows in each. `score` is the one that holds what the
    rows were ordered by, None where no output does.
    """

    outputs: tuple[int, ...]
    axes: tuple[int, ...]
    score: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the compiled form was compared with."""

    reference: str  # Name and version of the evaluator
    probes: tuple[Probe, ...]
    device: str | None  # The device the comparison ran on when compiling; None: not run there
    error: tuple[float, ...]  # Per output, the largest over the probes; empty where not run
    covered: tuple[
        float, ...
    ] = ()  # Per output, the share that the probes say something of; empty: not known
    selections: tuple[Selection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of the model as it was compiled, by the value it makes.

    `passes` over the graph made or changed it.
    """

    name: str
    op: str  # As ONNX calls it
    passes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGroup:
    """Operators that were fused, and the numbers of the steps that compute them: prepared ones, others."""

    operators: tuple[Operator, ...]
    prepare: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An operator that takes no step: its result is a buffer seen with a shape of its own."""

    operator: Operator
    shape: tuple[int, ...]
    buffer: int  # Index into CompiledModel.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTensor:
    """What a part takes or gives, by its name in the model; a size of -1 depends on the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPartition:
    """Nodes of the model that the CPU engine runs, as an ONNX file in the constant buffer `onnx`.

    `nodes` counts them and `flops` estimates their work; `why` says of each kind why it is not compiled.
    Where that is only that sizes of its inputs depend on the data (-1), it is `sized`: it may have compiled
    forms for sizes that it meets. Where these are the first of each shape and what it makes of one row does
    not hang on others, it is `by_rows`: a form may be run on more rows than there are. ONNX Runtime optimises
    it to `level`, one of `honed.runtime.engines.LEVELS`.
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
    """Sizes of a part, as in `MetSizes`, for which it has no compiled form, and why."""

    part: int
    sizes: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTable:
    """A model that runs in parts: `parts` are the CPU engine's, `nodes` and `flops` what is compiled of it.

    Host calls of CPU_PART run them between launches. Those numbered `tail` run behind all steps, one after
    the other: each takes outputs of the steps, inputs of the model and what those before it made, by name.
    `outputs` are the model's, made by either.
    """

    parts: tuple[CpuPartition, ...]
    tail: tuple[int, ...] = field(metadata={"wire": "behind"})
    outputs: tuple[PartitionTensor, ...]
    nodes: int
    flops: int
    left_out: tuple[SkippedSizes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialisationTimes:
    """Microseconds of a part, in turns: compiled, with handing over and back, and in the CPU engine."""

    compiled_us: float
    cpu_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSpecialisation:
    """A part behind all steps, compiled for sizes that it was met in.

    `sizes` stand for what is -1 in the shapes of its inputs, in their order. `model` takes and gives what the
    part does, and its constants are in the file's one section. `times` are None where it was not run.
    It runs for these sizes, and where `least` is not 0 for so many rows and more, up to its own.
    """

    part: int
    sizes: tuple[int, ...]
    model: CompiledModel
    times: SpecialisationTimes | None
    least: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModel:
    """A whole compiled model, without the bytes of its constants.

    `prepare` runs once, when the model is loaded, and makes the prepared buffers out of constants; `steps`
    run in each inference. `parts` and `views` say what of the model they compute; nothing runs by them.
    `outputs` are those of the steps, and the model's where it is not `split`. `forms` are of its parts.
    Requests that break one of its `preconditions` are not run. Files of honed 0.1 have none, though they may
    rely on values: only those with `names_values` say all that they rely on.
    """

    source: SourceModel
    compiler: dict[str, str]  # Name -> version of what made it
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
        """Those of its proof, where it has one."""
        return self.proof.probes if self.proof is not None else ()

    @property
    def tail_outputs(self) -> tuple[PartitionTensor, ...]:
        """Those of the model's outputs that parts make behind all steps."""
        by_steps = {tensor.name for tensor in self.outputs}
        return tuple(tensor for tensor in self.model_outputs if tensor.name not in by_steps)

    @property
    def model_outputs(self) -> tuple[PartitionTensor, ...]:
        """The model's outputs as its user sees them."""
        if self.split is not None:
            return self.split.outputs
        return tuple(PartitionTensor(name=t.name, dtype=t.dtype, shape=t.shape) for t in self.outputs)


class ScheduleSource(StrEnum):
    """What speaks for a schedule. The first three are taken without a trial."""

    RULE = "rule"
    PRIOR = "prior"
    TABLES = "tables"
    PREDICTED = "predicted"  # Judged by its machine code, for a device that was not there
    RECORD = "record"  # Measured on such a device elsewhere, or by a honed that did not say where
    MEASURED = "measured"  # On the machine that compiled the model


class SearchStrategy(StrEnum):
    """How the search came to a schedule."""

    RELATED = "kin"  # The best of another task, moved to this one's extents
    TABLES = "tables"
    EVOLUTION = "evolution"
    DESCENT = "descent"
    REVALIDATED = "again"  # Known from another driver or compiler


@dataclass(frozen=True, slots=True)
class ScheduleProvenance:
    """Where a schedule comes from, as a kernel's `schedule` says it: `measured:kin:0123456789ab`.

    That is its source, its name among others of that source, and where it is known how it was found.
    """

    source: ScheduleSource
    name: str
    way: SearchStrategy | None = None

    @classmethod
    def parse(cls, text: str) -> ScheduleProvenance:
        """Return the origin whose `str` is `text`; any other text is a rule's name."""
        source, colon, rest = text.partition(":")
        if not colon or source not in set(ScheduleSource):
            return cls(ScheduleSource.RULE, text)
        way, colon, name = rest.partition(":")
        if colon and way in set(SearchStrategy):
            return cls(ScheduleSource(source), name, SearchStrategy(way))
        return cls(ScheduleSource(source), rest)

    def __str__(self) -> str:
        """Return the origin's name in a compiled model; for a rule, the rule's own name."""
        if self.source is ScheduleSource.RULE:
            return self.name
        return ":".join((self.source, *([self.way] if self.way else []), self.name))

    @property
    def tried(self) -> bool:
        """Whether its time was measured, here or elsewhere."""
        return self.source in (ScheduleSource.RECORD, ScheduleSource.MEASURED)


# What Relax calls an output of a part that the CPU engine runs: between the frontend and lowering.
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
