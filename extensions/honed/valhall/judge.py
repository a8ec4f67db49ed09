"""Judges kernels by their machine code: what a launch of each would take at least on a Mali-G610."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from honed.tuner.lower.program import KernelLaunch

from .compiler import Dump, NotBuilt, OfflineCompiler
from .count import Counted, counted
from .dump import KernelDump, Unreadable, kernels
from .machine import LAUNCH_SECONDS, Bound, LaunchGeometry, bound

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
        """The launches of a program, in order; raises NotBuilt where the compiler does not give its code."""
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
        counts = counted(kernel)
        geometry = LaunchGeometry(grid=launch.grid, block=launch.block)
        packs = bool(_VECTORS.search(source))
        return JudgedLaunch(
            launch=launch,
            kernel=kernel,
            counted=counts,
            plain=bound(counts.whole, geometry, launch.bytes, packs=False),
            packed=bound(counts.whole, geometry, launch.bytes, packs=packs),
        )


def seconds(judged: Sequence[JudgedLaunch]) -> float:
    """What the launches take one after the other, each with its cost."""
    return sum(one.packed.seconds + LAUNCH_SECONDS for one in judged)
