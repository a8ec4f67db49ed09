"""The bench of a device that is not here: candidates are judged by their machine code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from honed.jobs import commands
from honed.machine import profilefile
from honed.machine.kernellog import FaultIncident
from honed.machine.profile import DevicePeaks, DeviceProfile
from honed.protocol.errors import InvalidArgument
from honed.tuner.measure import checks
from honed.tuner.measure.candidate import Begin, Candidate, MeasureLimits, Workload, inference_launches
from honed.tuner.measure.checks import Submitted
from honed.tuner.records.verdict import Outcome, Timing, Verdict
from honed.tuner.setup import PREDICTED
from honed.tuner.tune.opening import MeasurementBackend, Sharing

from .compiler import ROOT, ROOTS, Dump, OfflineCompileFailed, OfflineCompiler
from .judge import MachineCodeJudge, seconds

BENCHES = {"mali-g610": Path(__file__).with_name("mali-g610.toml")}
DRIVER = "predicted by Mesa's Valhall compiler"  # For Arm's driver, which packs halves
YARDSTICK = 1.0  # Seconds; the device's speed is always the same
# A batch at once: the compiler builds on all cores, and proposing few takes as long as proposing many.
AHEAD = 64


def predicted(bench: str, mesa: str = "") -> DeviceProfile:
    """Return the profile of one of BENCHES, with an identity that says that its times are predicted.

    With `mesa`, one of the compiler's ROOTS, they are those of this Mesa's driver, else of Arm's.
    """
    profile = profilefile.load(BENCHES[bench])
    driver = f"Mesa {mesa}, {DRIVER}" if mesa else DRIVER
    identity = replace(profile.identity, platform=PREDICTED, driver_version=driver, kernel_driver="")
    return replace(profile, identity=identity)


class BenchMeasurer:
    """`Measures` without a device. Its times are bounds, and its answers are not computed.

    So what it finds right is only not known to be wrong: it has to be proven on a device before it is served.
    """

    ahead = AHEAD
    rate = 0.0  # None was seen

    def __init__(self, compiler: OfflineCompiler, profile: DeviceProfile, begin: Begin) -> None:
        """Take over the compiler; raise InvalidArgument where `profile` has no peaks.

        `begin` is called once a candidate is built: until then nothing can go wrong that should be known.
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
        """End the compiler."""
        self._compiler.close()

    def load(self, workload: Workload) -> None:
        """Have the following candidates judged as those of `workload`."""
        self._workload = workload
        for dump in self._begun.values():
            dump.cancel()
        self._begun.clear()

    def prepare(self, candidate: Candidate) -> None:
        """Have a candidate built meanwhile."""
        if candidate.id not in self._begun and self._refusal(candidate) is None:
            self._begun[candidate.id] = self._judge.begin(candidate.source)

    def build(self, candidates: Sequence[Candidate]) -> None:
        """Nothing: `prepare` does it."""

    def forget(self) -> dict[str, Verdict]:
        """Nothing: `load` does it, and what is built is judged when it is asked for."""
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
            launches = inference_launches(self._loaded(), candidate)
            judged = self._judge.judge(candidate.source, launches, dump)
        except OfflineCompileFailed as failed:
            return Verdict(outcome=Outcome.BUILD, reason=str(failed), seconds=time.monotonic() - began)
        found = seconds(judged, self._profile.driver)
        timing = Timing(median_s=found, low_s=found, high_s=found, repeats=1)
        return Verdict(
            outcome=Outcome.RIGHT, timing=timing, yardstick_s=YARDSTICK, seconds=time.monotonic() - began
        )

    def settle(self) -> None:
        """Nothing runs, so nothing can come late."""

    def take_faults(self) -> list[tuple[str, FaultIncident]]:
        """None: nothing runs."""
        return []

    def _refusal(self, candidate: Candidate) -> checks.Refusal | None:
        submitted = Submitted(self._loaded(), candidate, self._profile, MeasureLimits())
        return checks.first_refusal(checks.SUBMITTED, submitted)

    def _loaded(self) -> Workload:
        if self._workload is None:
            raise InvalidArgument("no workload is loaded; load one before judging candidates")
        return self._workload


def instrument(job: commands.Search[Any], _tell: Callable[[str], None]) -> MeasurementBackend:
    """Return a bench, whose peaks are its profile's. Raises DeviceError where its compiler cannot be used."""
    root = Path(job.settings.get("root", ROOT))
    mesa = next((name for name, place in ROOTS.items() if place == root != ROOT), "")
    compiler, profile = OfflineCompiler(root), predicted(job.settings["device"], mesa)
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
