"""Provides the bench of a device that is not here, which judges candidates by their machine code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from honed.jobs import commands
from honed.machine.kernellog.story import FaultIncident
from honed.machine.profile import DevicePeaks, DeviceProfile
from honed.protocol.errors import InvalidArgument
from honed.tuner.measure import checks
from honed.tuner.measure.candidate import Begin, Candidate, MeasureLimits, Workload, inference_launches
from honed.tuner.measure.checks import Submitted
from honed.tuner.records.rows import Outcome, Timing, Verdict
from honed.tuner.setup import PREDICTED
from honed.tuner.tune.session import MeasurementBackend, Sharing

from .compiler import ROOT, ROOTS, Dump, OfflineCompileFailed, OfflineCompiler
from .judge import MachineCodeJudge, seconds

BENCHES = {"mali-g610": Path(__file__).with_name("mali-g610.toml")}
DRIVER = "predicted by Mesa's Valhall compiler"  # Stands for Arm's driver, which packs halves
YARDSTICK = 1.0  # Seconds; the device's speed is always the same
# Candidates of a batch: the compiler builds on all cores, and proposing few takes as long as many.
AHEAD = 64


def bench_profile(bench: str, mesa: str = "") -> DeviceProfile:
    """Return the profile of one of BENCHES, with an identity that says that its times are predicted.

    With `mesa`, one of the compiler's ROOTS, they are those of this Mesa's driver, else of Arm's.
    """
    profile = DeviceProfile.load(BENCHES[bench])
    driver = f"Mesa {mesa}, {DRIVER}" if mesa else DRIVER
    identity = replace(profile.identity, platform=PREDICTED, driver_version=driver, kernel_driver="")
    return replace(profile, identity=identity)


class BenchMeasurer:
    """A `CandidateRunner` without a device; its times are bounds, and it computes no outputs.

    A verdict of right only means that nothing wrong was found: the kernel must be verified on a device before
    it is served.
    """

    ahead = AHEAD
    rate = 0.0  # Unknown, as nothing is measured

    def __init__(self, compiler: OfflineCompiler, profile: DeviceProfile, begin: Begin) -> None:
        """Own the compiler; raise InvalidArgument if `profile` has no peaks.

        `begin` is called once a candidate is built: until then nothing can fail that should be recorded.
        """
        if profile.peaks is None:
            raise InvalidArgument("the bench's profile has no peaks; give them in its [peaks]")
        self.peaks: DevicePeaks = profile.peaks
        self._compiler = compiler
        self._judge = MachineCodeJudge(compiler)
        self._profile = profile
        self._begin = begin
        self.spent: dict[str, float] = {}
        self._begun: dict[str, Future[Dump]] = {}
        self._workload: Workload | None = None

    def close(self) -> None:
        """End the compiler's processes."""
        self._compiler.close()

    def load(self, workload: Workload) -> None:
        """Have the following candidates judged as those of `workload`."""
        self._workload = workload
        for dump in self._begun.values():
            dump.cancel()
        self._begun.clear()

    def prepare(self, candidate: Candidate) -> None:
        """Start building a candidate, unless it is refused."""
        if candidate.id not in self._begun and self._refusal(candidate) is None:
            self._begun[candidate.id] = self._judge.begin(candidate.source)

    def build(self, candidates: Sequence[Candidate]) -> None:
        """Do nothing: `prepare` builds."""

    def forget(self) -> dict[str, Verdict]:
        """Return no verdicts: `load` cancels builds, and nothing is judged before it is requested."""
        return {}

    def measure(self, candidate: Candidate, best: float | None = None) -> Verdict:
        """Return the verdict on a candidate; raise InvalidArgument before `load`."""
        began = time.monotonic()
        refusal = self._refusal(candidate)
        if refusal is not None:
            return Verdict(outcome=refusal.outcome, reason=refusal.reason)
        self.prepare(candidate)
        dump = self._begun.pop(candidate.id)
        wait([dump])
        self.spent = {"build": time.monotonic() - began}
        self._begin(candidate)
        try:
            launches = inference_launches(self._require_workload(), candidate)
            judged = self._judge.judge(candidate.source, launches, dump)
        except OfflineCompileFailed as failed:
            return Verdict(outcome=Outcome.BUILD, reason=str(failed), seconds=time.monotonic() - began)
        found = seconds(judged, self._profile.driver)
        timing = Timing(median_s=found, low_s=found, high_s=found, repeats=1)
        return Verdict(
            outcome=Outcome.RIGHT, timing=timing, yardstick_s=YARDSTICK, seconds=time.monotonic() - began
        )

    def settle(self) -> None:
        """Do nothing: nothing runs, so no fault can come late."""

    def take_faults(self) -> list[tuple[str, FaultIncident]]:
        """Return no faults, as nothing runs."""
        return []

    def _refusal(self, candidate: Candidate) -> checks.Refusal | None:
        submitted = Submitted(self._require_workload(), candidate, self._profile, MeasureLimits())
        return checks.first_refusal(checks.SUBMITTED, submitted)

    def _require_workload(self) -> Workload:
        if self._workload is None:
            raise InvalidArgument("no workload is loaded; load one before judging candidates")
        return self._workload


def instrument(job: commands.Search[Any], _tell: Callable[[str], None]) -> MeasurementBackend:
    """Return a bench with its profile's peaks; raise DeviceError if its compiler cannot be used."""
    root = Path(job.settings.get("root", ROOT))
    mesa = next((name for name, place in ROOTS.items() if place == root != ROOT), "")
    compiler, profile = OfflineCompiler(root), bench_profile(job.settings["device"], mesa)
    return MeasurementBackend(
        spec=None,
        answers=False,
        profile=profile,
        measurer=lambda begin: BenchMeasurer(compiler, profile, begin),
        peaks_again=lambda: profile,
        keep_peaks=lambda _: None,
        sharing=Sharing(ahead=True, threads=len(os.sched_getaffinity(0)), builders=0),
        yardstick=YARDSTICK,
        batch=AHEAD,
    )
