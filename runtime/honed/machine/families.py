"""The families of devices: a row of data for what all devices of one have in common; and Mali's models.

The compiler has further rows, on the schedules of each family, in `tuner/search/rules.py`.

Sources of the rules of Mali's profiles:

- `local_memory`: on Mali GPUs local memory is ordinary memory in the same cache. Arm's "Mali GPU OpenCL
  Developer Guide" advises against copying to it: the copies and their barriers gain nothing.
- `max_vector_bytes`: clpeak on a Mali-G610 (libmali g6p0) reads 27.2 GB/s with float4 and 13.6 GB/s with
  float8. Arm's guide recommends loads of 128 bits, too.
- `max_threads`: Arm's best-practice guides name 64 registers a thread, and the full number of threads up to
  32. Work-groups of 256 leave the compiler room, and Mesa's driver allows no more.
- `max_unroll`, `max_source_bytes`: more unrolling spills registers, and sources beyond 64 KiB have crashed
  drivers' compilers.
- `max_queued_launches`: on RK3588 the driver returns CL_OUT_OF_HOST_MEMORY (-6) if too many launches are
  queued before a finish.

Sources of the table of Mali's models: kbase's `mali_kbase_gpu_id.h` for internal names; for multiply-adds
Mesa's `pan_model.c` (G310, G610), Arm's "Mali GPU Datasheet" of 2021 (up to the G78, half of its operations
per clock), and AnandTech of 25 May 2021 (G510, G710).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class DriverClass(Enum):
    """A class of Mali drivers whose compilers need different schedules. Priors store it as its number."""

    MESA = 0  # Mesa up to 26.0: a half takes a whole register
    ARM = 1  # Arm's, and any other but Mesa's: packs halves; spills are not known here
    MESA_26 = 2  # Mesa 26.1 and later: two halves share a register, in loops, too


_PAIRED = 26, 1  # First Mesa of class MESA_26
_NAMED = "Mesa "


def mesa_version(text: str) -> tuple[int, int] | None:
    """Return the version at the start of a text, as in versions of Mesa's drivers or its Debian packages."""
    found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", text)
    return found and (int(found[1]), int(found[2]))


def driver_class(platform: str, driver_version: str) -> DriverClass:
    """Return the class of a driver by the OpenCL platform and by the version that it reports.

    A bench writes the Mesa that it simulates before the version: "Mesa 26.2".
    """
    if "rusticl" not in platform.casefold() and not driver_version.startswith(_NAMED):
        return DriverClass.ARM
    version = mesa_version(driver_version.removeprefix(_NAMED))
    return DriverClass.MESA_26 if version is not None and version >= _PAIRED else DriverClass.MESA


class Packing(Enum):
    """The operators whose weights a family's sketches lay out in a separate launch when a model is loaded."""

    NONE = auto()
    WINDOWS = auto()  # Convolutions over a window, or over images whose pixels no vector divides
    OPERANDS = auto()  # Products that are summed with another operand


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFigures:
    """The rates of one compute unit, and the time of a launch; round figures."""

    gflops: float
    gbs: float  # GB/s from the cache that all units share, when all read
    alone_gbs: float  # GB/s when few other units read
    launch_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFamily:
    """A family of devices: their names, their abilities, and the rules of their profiles."""

    name: str
    brands: tuple[str, ...]  # Parts of its devices' names, in lower case; "": any
    # Names of kernel drivers, by a part of the platform's or vendor's name; the first bound counts.
    drivers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    target_device: str = ""  # Name in the targets of TVM's rules

    # Facts.
    processor: bool  # The host's own: shares its cores, a work-group is one thread, its clock is up
    contracts: bool  # Compiler fuses products with sums, and splits `mad` into two operations
    keeps_builds: bool  # Driver is known to cache what another process built
    accumulators: int  # Scalars, beyond which a work-item of the longest vectors spills

    # Choices that are faster.
    winograd: bool  # Convolutions on transformed tiles
    vectors_of_channels: bool  # Convolutions with their output channels along the lanes, laid out so
    blocks_of_channels: bool  # Images laid out in blocks of channels from one convolution to the next
    parts_of_buffers: bool  # Sub-buffers as arguments of kernels, in place of launches that copy
    packing: Packing
    rows: bool  # A norm of one row in one kernel with the products that read it, where groups share the row
    joined: UnitFigures | None  # Decides whether one kernel may be faster than several; None: never

    # Rules of the profile; docs/dev/devices.md says what each is.
    max_threads: int
    local_memory: bool
    max_vector_bytes: int
    max_unroll: int
    max_source_bytes: int
    max_queued_launches: int = 0  # Launches; 0: no cap

    by_driver_class: bool = False  # Drivers' compilers need different schedules


# A device is of the first family that fits it.
_ROWS = (
    DeviceFamily(
        name="mali",
        brands=("mali", "immortalis"),
        # Arm's own OpenCL talks to kbase only, Mesa's to the open drivers only.
        drivers=(("rusticl", ("panthor", "panfrost")), ("", ("kbase",))),
        target_device="mali",
        processor=False,
        contracts=False,
        keeps_builds=False,
        accumulators=128,
        winograd=True,
        vectors_of_channels=True,
        blocks_of_channels=False,
        parts_of_buffers=True,
        packing=Packing.WINDOWS,
        rows=True,
        # Rates of a row's products with packed weights, by the bench; 64 bytes a clock of the cache for two
        # units. No sketch keeps the scores of an attention here: by the bench one kernel would be no faster.
        joined=UnitFigures(gflops=150.0, gbs=30.0, alone_gbs=30.0, launch_us=4.0),
        max_threads=256,
        local_memory=False,
        max_vector_bytes=16,
        max_unroll=16,
        max_source_bytes=64 << 10,
        max_queued_launches=512,
        by_driver_class=True,
    ),
    DeviceFamily(
        name="cpu",
        brands=("llvmpipe",),
        processor=True,
        contracts=True,  # PoCL 3.1's `mad` is a product and then a sum: half of the speed
        keeps_builds=True,
        accumulators=192,  # 12 registers of 64 bytes with AVX-512
        winograd=False,
        vectors_of_channels=False,
        blocks_of_channels=True,
        parts_of_buffers=True,
        packing=Packing.OPERANDS,
        rows=False,
        # Rates of tuned products on a core of PoCL with AVX-512.
        joined=UnitFigures(gflops=50.0, gbs=30.0, alone_gbs=30.0, launch_us=20.0),
        max_threads=256,
        local_memory=False,
        max_vector_bytes=64,
        max_unroll=16,
        max_source_bytes=64 << 10,
    ),
    DeviceFamily(
        name="gpu",
        brands=("",),
        drivers=(("nvidia", ("nvidia",)),),
        processor=False,
        contracts=False,
        keeps_builds=True,
        accumulators=128,  # Half of the 255 registers that the largest threads have
        winograd=False,
        vectors_of_channels=False,
        blocks_of_channels=False,
        parts_of_buffers=False,  # NVIDIA's driver takes 10 to 18 us longer for a launch with one
        packing=Packing.NONE,
        rows=True,
        # A fifth of the rate of an H100's units, and between the 3 us of a launch in its queue and the 10 us
        # with the host's part. A unit alone: half of its maximal input, not measured.
        joined=UnitFigures(gflops=100.0, gbs=25.0, alone_gbs=60.0, launch_us=5.0),
        max_threads=512,
        local_memory=True,
        max_vector_bytes=16,
        max_unroll=64,
        max_source_bytes=256 << 10,
    ),
)
FAMILIES: Mapping[str, DeviceFamily] = {row.name: row for row in _ROWS}


def family_of(name: str, *, is_cpu: bool) -> DeviceFamily:
    """Return the family of a device by its reported name; `is_cpu`: its driver calls it a processor."""
    return next(
        row
        for row in _ROWS
        if any(brand in name.casefold() for brand in row.brands) or (is_cpu and row.processor)
    )


# Above every clock these GPUs were sold with; the fastest known is 1.3 GHz (G610, Dimensity 7350).
_FASTEST_HZ = 1.5e9


@dataclass(frozen=True, slots=True)
class MaliModel:
    """A model of Arm's Mali GPUs. Multiply-adds are of the widest shader core that it is sold with.

    From the G310 on `fma_fp16` is assumed to be twice `fma_fp32`, as clpeak shows on a G610.
    """

    name: str
    code: str  # Internal name, as drivers report it
    fma_fp32: int  # Multiply-adds of a core in one clock
    fma_fp16: int

    def most_gflops(self, cores: int, *, half: bool) -> float:
        """Return an upper bound in GFLOP/s, at half or single precision, of chips with `cores` cores."""
        return 2e-9 * cores * (self.fma_fp16 if half else self.fma_fp32) * _FASTEST_HZ


MALI_MODELS = (  # Name, code, fma_fp32, fma_fp16
    MaliModel("Mali-G52", "TGOX", 24, 48),  # fp32: 16 with two engines
    MaliModel("Mali-G76", "TNOX", 24, 48),
    MaliModel("Mali-G57", "TNAX", 32, 64),
    MaliModel("Mali-G77", "TTRX", 32, 64),
    MaliModel("Mali-G68", "LBEX", 32, 64),
    MaliModel("Mali-G78", "TBEX", 32, 64),
    MaliModel("Mali-G310", "TVAX", 64, 128),  # fp32: 16 to 64, by variant
    MaliModel("Mali-G510", "TGRX", 64, 128),  # fp32: 48 with a narrow engine
    MaliModel("Mali-G610", "LODX", 64, 128),
    MaliModel("Mali-G710", "TODX", 64, 128),
)
# Mesa appends a variant to a product ("G310v2") and Arm a revision or a core count, after a space.
_MALI_NAME = re.compile(r"\bmali-([a-z]+\d*)(?:v\d+)?\b")
_MALIS = {name: model for model in MALI_MODELS for name in (model.name.removeprefix("Mali-"), model.code)}


def mali_model(name: str) -> MaliModel | None:
    """Return the Mali model of a device's reported name; None for unknown models and other devices.

    One GPU has several names: Arm's driver reports `Mali-G610 r0p0` or, if it does not know the product by
    its name, the internal one (`Mali-LODX r0p0`); Mesa reports `Mali-G610 MC4 (Panfrost)`.
    """
    found = _MALI_NAME.search(name.casefold())
    return _MALIS.get(found[1].upper()) if found else None
