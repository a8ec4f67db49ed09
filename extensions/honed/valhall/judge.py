"""Kernels judged by their machine code: what a launch of each would take at least on a Mali-G610.

Four cores at 1 GHz, warps of 16 work-items. A clock of a core issues 64 lanes of FMA and CVT and 16 of SFU
(shifts and integer multiplications among them), and touches one line of 64 bytes. So an instruction costs a
warp a quarter of a clock on FMA and CVT, one on SFU, and as many on LS as the lines that its 16 lanes touch
(facts: fitted to Mesa's totals over 57 dumps; Arm's data sheet of the G610: 64 FMA a clock and core).
The first 32 registers of a thread come at full occupancy, up to 64 at half.

Left out: latency, caches, the schedule of instructions. So it is a bound, right for ranking kernels that
keep the machine busy, and says nothing of those that wait.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future

from honed.machine.families import DriverClass
from honed.protocol.dataclass import dataclass
from honed.tuner.lower.program import KernelLaunch

from .compiler import Dump, NotBuilt, OfflineCompiler
from .count import Counted, Counts, counted
from .dump import KernelDump, Unreadable, kernels
from .lanes import CORES, LaunchGeometry

CLOCK_HZ = 1.0e9
BANDWIDTH = 27.2e9  # bytes per second, reading and writing (clpeak on this board's LPDDR4X)
LAUNCH_SECONDS = 4e-6
FP16_FLOPS = CORES * CLOCK_HZ * 64 * 2 * 2  # two halves to a lane, as Arm's own driver packs them
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
    memory: float
    alu: float

    @property
    def limiter(self) -> str:
        """What takes longest."""
        return max(("fma", "cvt", "sfu", "ls", "memory"), key=lambda name: float(getattr(self, name)))

    @property
    def seconds(self) -> float:
        """The bound by the busiest pipe."""
        return max(self.fma, self.cvt, self.sfu, self.ls, self.memory)

    @property
    def shared_seconds(self) -> float:
        """The bound where the pipes of arithmetic share the issue of instructions."""
        return max(self.alu, self.ls, self.memory)


def bound(counts: Counts, geometry: LaunchGeometry, nbytes: int, *, packs: bool) -> Bound:
    """Return the bound of one launch that moves `nbytes`.

    With `packs` its arithmetic on halves goes in pairs.

    Arm's own driver packs what is written as vectors (clpeak on this chip: half4 910, half 442 GFLOP/s), and
    Mesa since 26.1; Mesa 25 packs no multiply-add in a loop.
    """
    each = geometry.warps / CLOCK_HZ
    fma = counts.fma - (counts.half / 2 if packs else 0.0)
    return Bound(
        fma=fma / 4 * each,
        cvt=counts.cvt / 4 * each,
        sfu=counts.sfu * each,
        ls=counts.lines * each,
        memory=nbytes / BANDWIDTH,
        alu=max(counts.sfu, (fma + counts.cvt + counts.sfu) / 4) * each,
    )


_VECTORS = re.compile(r"\bhalf(?:2|4|8|16)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLaunch:
    """One launch. `plain` is its bound with Mesa's code as it is, `packed` where halves go in pairs."""

    launch: KernelLaunch
    kernel: KernelDump
    counted: Counted
    plain: Bound
    packed: Bound


class MachineCodeJudge:
    """Judges programs with one compiler."""

    def __init__(self, compiler: OfflineCompiler) -> None:
        self._compiler = compiler

    def begin(self, source: str) -> Future[Dump]:
        """Have a program built meanwhile."""
        return self._compiler.build(source)

    def judge(
        self, source: str, launches: Sequence[KernelLaunch], dump: Future[Dump] | None = None
    ) -> list[JudgedLaunch]:
        """Return the launches of a program, in order.

        Raises NotBuilt where the compiler does not give its code.
        """
        try:
            found = kernels((dump or self.begin(source)).result())
        except Unreadable as error:
            raise NotBuilt(str(error)) from error
        return [self._launch(source, launch, found) for launch in launches]

    @staticmethod
    def _launch(source: str, launch: KernelLaunch, found: dict[str, KernelDump]) -> JudgedLaunch:
        kernel = found.get(launch.entry) or found.get(f"__wrapped_{launch.entry}")
        if kernel is None:
            raise NotBuilt(f"the compiler made {', '.join(found)}, and no {launch.entry}")
        geometry = LaunchGeometry(grid=launch.grid, block=launch.block)
        counts = counted(kernel, geometry)
        packs = bool(_VECTORS.search(source))
        return JudgedLaunch(
            launch=launch,
            kernel=kernel,
            counted=counts,
            plain=bound(counts.whole, geometry, launch.bytes, packs=False),
            packed=bound(counts.whole, geometry, launch.bytes, packs=packs),
        )


def seconds(judged: Sequence[JudgedLaunch], driver: DriverClass = DriverClass.ARM) -> float:
    """Return how long the launches take one after the other with such a driver, each with its cost.

    Mesa's code is as its compiler gives it. Arm's packs halves.
    """
    packs = driver is DriverClass.ARM
    return sum((one.packed if packs else one.plain).seconds + LAUNCH_SECONDS for one in judged)
