"""A Mali-G610 as far as it is modelled: how long the busiest pipe of its cores takes for a launch.

Four cores at 1 GHz, warps of 16 work-items. A clock of a core issues 64 lanes of FMA and CVT and 16 of SFU
(shifts and integer multiplications among them), and touches one line of 64 bytes. So an instruction costs a
warp a quarter of a clock on FMA and CVT, one on SFU, and as many on LS as the lines that its 16 lanes touch
(facts: fitted to Mesa's totals over 57 dumps; Arm's data sheet of the G610: 64 FMA a clock and core).
The first 32 registers of a thread come at full occupancy, up to 64 at half.

Left out: latency, caches, the schedule of instructions. So it is a bound, right for ranking kernels that
keep the machine busy, and says nothing of those that wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .count import Counts

CORES = 4
CLOCK_HZ = 1.0e9
WARP = 16
BANDWIDTH = 27.2e9  # bytes per second, reading and writing (clpeak on this board's LPDDR4X)
LAUNCH_SECONDS = 4e-6
FP16_FLOPS = CORES * CLOCK_HZ * 64 * 2 * 2  # two halves to a lane, as Arm's own driver packs them
FP32_FLOPS = CORES * CLOCK_HZ * 64 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchGeometry:
    """A launch: work-groups and work-items of a group."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def warps(self) -> int:
        """Warps that the busiest core runs; groups are dealt out whole, and partial warps cost as whole."""
        return math.ceil(math.prod(self.grid) / CORES) * math.ceil(math.prod(self.block) / WARP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least seconds of a launch by pipe, and by the memory that it must move."""

    fma: float
    cvt: float
    sfu: float
    ls: float
    memory: float

    @property
    def limiter(self) -> str:
        """What takes longest."""
        return max(("fma", "cvt", "sfu", "ls", "memory"), key=lambda name: float(getattr(self, name)))

    @property
    def seconds(self) -> float:
        """The bound itself."""
        return max(self.fma, self.cvt, self.sfu, self.ls, self.memory)


def bound(counts: Counts, geometry: LaunchGeometry, nbytes: int, *, packs: bool) -> Bound:
    """The bound of one launch that moves `nbytes`. With `packs` its arithmetic on halves goes in pairs.

    Arm's own driver packs what is written as vectors (clpeak on this chip: half4 910, half 442 GFLOP/s);
    Mesa never does.
    """
    each = geometry.warps / CLOCK_HZ
    return Bound(
        fma=(counts.fma - (counts.half / 2 if packs else 0.0)) / 4 * each,
        cvt=counts.cvt / 4 * each,
        sfu=counts.sfu * each,
        ls=counts.lines * each,
        memory=nbytes / BANDWIDTH,
    )
