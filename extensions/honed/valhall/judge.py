"""Judges kernels by their machine code: the least time of each launch on a Mali-G610.

Four cores at 1 GHz, warps of 16 work-items. A clock of a core issues 64 lanes of FMA and CVT and 16 of SFU
(shifts and integer multiplications among them), and touches one line of 64 bytes. So an instruction costs a
warp a quarter of a clock on FMA and CVT, one on SFU, and as many on LS as the lines that its 16 lanes touch
(facts: fitted to Mesa's totals over 57 dumps; Arm's data sheet of the G610: 64 FMA a clock and core). A texel
costs a warp two clocks for each word, as Arm's reference of the G610's counters says of one and two words.
With up to 32 registers a thread a core has full occupancy, with up to 64 half.

Latency, caches and the schedule of instructions are left out. So it is a lower bound, right for ranking
kernels that keep the machine busy, and says nothing about those that wait.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from honed.machine.families import DriverClass
from honed.tuner.lower.program import KernelLaunch

from .compiler import Dump, OfflineCompileFailed, OfflineCompiler
from .count import Counted, Counts, count
from .dump import KernelDump, Unreadable, kernels
from .lanes import CORES, LaunchGeometry

CLOCK_HZ = 1.0e9
BANDWIDTH = 27.2e9  # Bytes per second, reading and writing (clpeak on this board's LPDDR4X)
LAUNCH_SECONDS = 4e-6
FP16_FLOPS = CORES * CLOCK_HZ * 64 * 2 * 2  # Two halves to a lane, as Arm's own driver packs them
FP32_FLOPS = CORES * CLOCK_HZ * 64 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least seconds of a launch by pipe, and by the memory that it must move.

    `alu` is Mesa 26.2's figure: the pipes of arithmetic share the issue of instructions, four a clock. Only a
    board can say which is right.
    """

    fma: float
    cvt: float
    sfu: float
    ls: float
    tex: float
    memory: float
    alu: float

    @property
    def limiter(self) -> str:
        """The name of the pipe that takes longest, or "memory"."""
        return max(_PIPES, key=lambda name: float(getattr(self, name)))

    @property
    def seconds(self) -> float:
        """The bound by the busiest pipe."""
        return max(self.fma, self.cvt, self.sfu, self.ls, self.tex, self.memory)

    @property
    def shared_seconds(self) -> float:
        """The bound if the pipes of arithmetic share the issue of instructions."""
        return max(self.alu, self.ls, self.tex, self.memory)


_PIPES = ("fma", "cvt", "sfu", "ls", "tex", "memory")


def bound(counts: Counts, geometry: LaunchGeometry, nbytes: int) -> Bound:
    """Return the bound of one launch that moves `nbytes`."""
    each, cycles = geometry.warps / CLOCK_HZ, counts.cycles
    return Bound(
        **{pipe: clocks * each for pipe, clocks in cycles.items()},
        memory=nbytes / BANDWIDTH,
        alu=max(counts.sfu, (counts.fma + counts.cvt + counts.sfu) / 4) * each,
    )


def by_arm(counts: Counts, *, vectors: bool) -> Counts:
    """Return the least that Arm's compiler needs of a kernel's counts.

    It multiplies halves that are written as `vectors` in pairs (clpeak on this chip: half4 910, half 442
    GFLOP/s), as Mesa does since 26.1; Mesa 25 pairs no multiply-add in a loop. Its loads and stores can add
    constants to their addresses, which Mesa adds before.
    """
    paired = counts.half / 2 if vectors else 0.0
    return replace(
        counts,
        fma=counts.fma - paired,
        half=counts.half - 2 * paired,
        cvt=counts.cvt - counts.offsets,
        offsets=0.0,
    )


_VECTORS = re.compile(r"\bhalf(?:2|4|8|16)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLaunch:
    """A judged launch. `plain` is its bound with Mesa's code, `arm` with what Arm's driver needs of that."""

    launch: KernelLaunch
    kernel: KernelDump
    counted: Counted
    plain: Bound
    arm: Bound


class MachineCodeJudge:
    """A judge of programs, with one compiler."""

    def __init__(self, compiler: OfflineCompiler) -> None:
        self._compiler = compiler

    def begin(self, source: str) -> Future[Dump]:
        """Start building a program."""
        return self._compiler.build(source)

    def judge(
        self, source: str, launches: Sequence[KernelLaunch], dump: Future[Dump] | None = None
    ) -> list[JudgedLaunch]:
        """Return the launches of a program, in order.

        Raises OfflineCompileFailed if the compiler gives no code.
        """
        try:
            found = kernels((dump or self.begin(source)).result())
        except Unreadable as error:
            raise OfflineCompileFailed(str(error)) from error
        return [self._launch(source, launch, found) for launch in launches]

    @staticmethod
    def _launch(source: str, launch: KernelLaunch, dumps: dict[str, KernelDump]) -> JudgedLaunch:
        kernel = dumps.get(launch.entry) or dumps.get(f"__wrapped_{launch.entry}")
        if kernel is None:
            raise OfflineCompileFailed(f"the compiler made {', '.join(dumps)}, and no {launch.entry}")
        geometry = LaunchGeometry(grid=launch.grid, block=launch.block)
        counts = count(kernel, geometry)
        least = by_arm(counts.whole, vectors=bool(_VECTORS.search(source)))
        return JudgedLaunch(
            launch=launch,
            kernel=kernel,
            counted=counts,
            plain=bound(counts.whole, geometry, launch.bytes),
            arm=bound(least, geometry, launch.bytes),
        )


def seconds(judged: Sequence[JudgedLaunch], driver: DriverClass = DriverClass.ARM) -> float:
    """Return the seconds of the launches in sequence with such a driver, each with its launch cost.

    For Mesa's driver its compiler's code is judged unchanged.
    """
    arm = driver is DriverClass.ARM
    return sum((one.arm if arm else one.plain).seconds + LAUNCH_SECONDS for one in judged)
