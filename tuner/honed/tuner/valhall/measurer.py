"""Candidates judged by their machine code, in the place of a device that measures them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from honed.runtime.errors import InvalidArgument
from honed.runtime.kernellog import FaultStory
from honed.runtime.profile import DeviceProfile
from honed.tuner.measure import checks
from honed.tuner.measure.candidate import Candidate, Outcome, Timing, Verdict, Workload
from honed.tuner.measure.limits import ALL, Limits

from .compiler import Dump, NotBuilt, OfflineCompiler
from .judge import Judge, seconds


class BenchMeasurer:
    """Stands where `measure.measurer.Measurer` does. Its times are bounds, and its answers are not computed.

    So what it finds right is only not known to be wrong: it has to be proven on a device before it is served.
    """

    pipelines = True
    rate = 0.0  # bytes per second that were seen: none are

    def __init__(
        self, compiler: OfflineCompiler, profile: DeviceProfile, begin: Callable[[Candidate], None]
    ) -> None:
        """`begin` is called before a candidate is first judged."""
        self._compiler = compiler
        self._judge = Judge(compiler)
        self._profile = profile
        self._begin = begin
        self._begun: dict[str, Future[Dump]] = {}
        self._workload: Workload | None = None

    def close(self) -> None:
        """End the compiler."""
        self._compiler.close()

    def load(self, workload: Workload) -> None:
        """Have the following candidates judged as those of `workload`."""
        self._workload = workload
        self._begun.clear()

    def prepare(self, candidate: Candidate) -> None:
        """Have a candidate built meanwhile."""
        if candidate.id not in self._begun:
            self._begin(candidate)
            self._begun[candidate.id] = self._judge.begin(candidate.source)

    def measure(self, candidate: Candidate, best: float | None = None) -> Verdict:
        """The verdict on a candidate; raises InvalidArgument before `load`."""
        began = time.monotonic()
        if self._workload is None:
            raise InvalidArgument("no workload is loaded; load one before judging candidates")
        refusal = checks.without_device(self._workload, candidate, self._profile, Limits(), ALL)
        if refusal is not None:
            return Verdict(outcome=refusal.outcome, reason=refusal.reason)
        self.prepare(candidate)
        try:
            judged = self._judge.judge(candidate.source, candidate.launches, self._begun.pop(candidate.id))
        except NotBuilt as failed:
            return Verdict(outcome=Outcome.BUILD, reason=str(failed), seconds=time.monotonic() - began)
        found = seconds(judged)
        timing = Timing(median=found, low=found, high=found, repeats=1, yardstick=1.0)
        return Verdict(outcome=Outcome.RIGHT, reason="", timing=timing, seconds=time.monotonic() - began)

    def settle(self) -> None:
        """Nothing runs, so nothing can come late."""

    def take_faults(self) -> list[tuple[str, FaultStory]]:
        """None: nothing runs."""
        return []
