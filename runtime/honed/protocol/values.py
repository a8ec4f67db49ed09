"""The values that the service exchanges with its children as well as with clients.

Children import these without the methods' parameters and results, many of which only the service needs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Final, Literal, NamedTuple

from .strict import ABSENT

Data = bytes | memoryview  # Data of a tensor, row-major

PRECISIONS: Final = ("auto", "fp32", "fp16")  # Precisions that a model may be compiled in
# Name of each engine, by its word in requests, results and stored files.
ENGINE_NAMES: Final = {"gpu": "opencl", "cpu": "onnxruntime", "gpu+cpu": "opencl+onnxruntime"}
_WORDS: Final = {name: word for word, name in ENGINE_NAMES.items()}


def engine_name(word: str) -> str:
    """Return the name of an engine, by its word; any other text stays as it is."""
    return ENGINE_NAMES.get(word, word)


def engine_word(engine: str) -> str:
    """Return the word for an engine, by its word or name; any other text stays as it is."""
    return _WORDS.get(engine, engine)


ROOM_ALIGN = 64  # Bytes that the room for outputs, and each output in it, is aligned to


@dataclass(slots=True, kw_only=True, eq=False)
class Empty:
    """The result of methods that have none."""


@dataclass(slots=True, kw_only=True, eq=False)
class TensorMetadata:
    """An input or output of a model."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOutput:
    """The error allowed for an output, and the largest error.

    `covered` is the share of the output that the comparison verifies, None if unknown.
    """

    name: str
    tolerance: float
    error: float | None
    covered: float | None = None


class OrtSessionConfig(NamedTuple):
    """The settings of an ONNX Runtime session: optimisation level, and SHA-256 of the fp16 model or ""."""

    level: str = "none"
    half: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """The fp16 choice of a model's ONNX Runtime session, from comparing fp16 with fp32 in idle time.

    `half` is the SHA-256 of the fp16 model if it serves. A run takes `us` microseconds in fp16, and
    `first_us` in fp32 on the threads that `first` describes; both are 0 if the fp16 model's outputs are
    wrong. If other programs were busy meanwhile, using `others_percent` of the processors, both are compared
    again. Only honed 0.1 wrote `threads`, `spinning` and `arena` other than their defaults.
    """

    threads: int = 0
    spinning: bool = True
    us: float
    first_us: float
    first: str
    others_percent: float | None = field(default=None, metadata=ABSENT)
    arena: bool | None = field(default=None, metadata=ABSENT)
    half: str | None = field(default=None, metadata=ABSENT)

    def __str__(self) -> str:
        """Return the settings as text for users."""
        if not self.first_us:
            return f"{self.first}; its answers in fp16 are not right"
        in_fp32 = f"{self.first_us / 1e3:.3g} ms in fp32 on {self.first}"
        if self.others_percent is not None:
            in_fp32 += f", measured while other programs took {self.others_percent:.0f} % of the processors"
        return f"{self.us / 1e3:.3g} ms in fp16; {in_fp32}" if self.half else f"{in_fp32}; fp16 is no faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimisationCheck:
    """The optimisation level of ONNX Runtime for a model on the CPU engine, and the check that found it.

    `level` (`honed.runtime.engines`) is the highest whose outputs equal those without optimisation; "none" if
    not `checked`. `error` is the largest difference at level "all", over the largest value of an output.
    `why` says what differs and which node causes it, or why nothing was checked. The check took `seconds`,
    once. `runtime` identifies the ONNX Runtime that was checked and for which `session` was found. `session`
    is None before fp16 was compared.
    """

    level: str
    checked: bool
    error: float | None
    why: str
    seconds: float
    runtime: str = ""
    session: SessionSettings | None = field(default=None, metadata=ABSENT)

    @property
    def session_config(self) -> OrtSessionConfig:
        """The settings of the session in which the CPU engine runs the model."""
        if not self.checked:  # Stores of earlier versions may have "all" here
            return OrtSessionConfig()
        return OrtSessionConfig(self.level, (self.session and self.session.half) or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSizes:
    """Sizes observed in the inputs of a partition, in the place of each -1 of their shapes, in order."""

    part: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """The identity of a device, which compiled models and tuning records belong to."""

    platform: str
    vendor: str
    name: str
    driver_version: str
    kernel_driver: str  # Such as "kbase", "panthor" or "nvidia"; "" if there is none

    @property
    def key(self) -> str:
        """The SHA-256 of the identity as canonical JSON, without the driver's version."""
        identity = asdict(self)
        del identity["driver_version"]
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


Figure = Literal["fp32_gflops", "fp16_gflops", "bandwidth_gbs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """The highest rates that kernels reach on the device, which `machine.profile` computes with.

    They are the best of several microbenchmarks, and of kernels that were measured to be faster
    (docs/devices.md).
    """

    fp32_gflops: float
    fp16_gflops: float | None  # GFLOPS; None without cl_khr_fp16
    bandwidth_gbs: float  # GB/s beyond all caches, reading and writing counted together
    launch_us: float  # Time from one empty kernel to the next in a long queue, which the host may limit
    # Rates of data that caches hold: bytes of a working set, rising, and GB/s. Empty if not measured.
    caches_gbs: tuple[tuple[int, float], ...] = ()
    # Figures that kernels have exceeded, so that each is only a lower bound. "bandwidth_gbs" includes the
    # caches.
    raised: tuple[Figure, ...] = ()
    empty_us: float | None = None  # Least END - START of an empty kernel; None: not measured
    busy: float | None = None  # Share of CPU time of other programs meanwhile; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRow:
    """The launches of one kernel in an inference; all copies share a row, as do calls of one host function.

    `kind` is kernel, copy or host, or node for a model on the CPU engine, with the operator in `schedule`.
    `share` is of the profile's `sum_us`. `peak_share` is the least time that the device's measured peaks
    allow (the larger of operations over peak arithmetic and bytes over peak bandwidth) over the measured
    time; it and the rates are None if work or peaks are unknown.
    """

    name: str
    kind: str
    task: str
    schedule: str
    count: int
    us: float
    share: float
    gflops: float | None
    gbs: float | None
    peak_share: float | None


@dataclass(slots=True, kw_only=True, eq=False)
class ModelProfile:
    """The result of ModelProfile.

    A span of the timeline is name, host_us, host_end_us, device_us, device_end_us.
    """

    name: str
    runs: int
    launches: int
    whole_us: float
    sum_us: float
    device: DeviceIdentity
    peaks: DevicePeaks | None
    rows: tuple[ProfiledRow, ...]
    engine: str = "gpu"
    engine_name: str = "opencl"
    timeline: tuple[tuple[str, float, float, float | None, float | None], ...] | None = field(
        default=None, metadata=ABSENT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProof:
    """The verification of a compiled model by the compiler: reference, device, and errors by output."""

    reference: str
    probes: int
    device: str | None
    outputs: tuple[ComparedOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    """The compiled partitions of a model ("gpu"), or one that the CPU engine runs ("cpu").

    `nodes` counts nodes of the model's file, `flops` estimates their operations, and `why` lists reasons that
    the CPU engine runs them. `last` partitions run after the compiled steps, others between. If `sized`, the
    partition is compiled for frequently observed sizes: `forms`, which may run on fewer rows if it is
    `by_rows`.
    """

    engine: str
    nodes: int
    flops: int
    why: tuple[str, ...] = ()
    inputs: tuple[TensorMetadata, ...] = ()
    outputs: tuple[TensorMetadata, ...] = ()
    last: bool = False
    sized: bool = False
    by_rows: bool = False
    forms: tuple[SpecialisationInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownKernel:
    """A kernel of a model; `launches` in one inference, `prepared` at loading."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: int
    bytes: int
    task: str
    schedule: str
    launches: int
    prepared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialisationInfo:
    """Sizes of a partition that depend on the data, for which it was compiled, and times of both engines.

    It serves these sizes unless `why` gives a reason against it; if `least` is not 0, any number of rows from
    `least` to its own.
    """

    sizes: tuple[int, ...]
    least: int = 0
    compiled_us: float | None = None
    cpu_us: float | None = None
    why: str = ""
