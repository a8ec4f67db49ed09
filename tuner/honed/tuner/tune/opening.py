"""A session's resources: device or bench, records, kernel log, searching and measuring children.

An OpenCL device judges candidates, or a substitute from an extension: a bench, the boards of a farm.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from honed.jobs import events
from honed.machine import peaks
from honed.machine.families import DeviceFamily
from honed.machine.profile import DeviceProfile
from honed.tuner.measure.candidate import SPARE_CORES, Begin, CandidateRunner, MeasureLimits
from honed.tuner.measure.gate import Gate
from honed.tuner.measure.measurer import DEFAULT_LIMITS, Measurer, kernel_log
from honed.tuner.records import HINTS_PER_TASK, MeasurementSetup, Records
from honed.tuner.setup import setup_for

from .children import BATCH, Proposals, SearchChild
from .session import Emit, Rooflines, TuningSession
from .trials import Trials

Tell = Callable[[str], None]
_MOST_THREADS = 8  # A batch is too small to gain from more
MOST_BUILDERS = 6  # Limited because each builder holds a context of the device


class SessionResources:
    """A context manager; everything is closed and every child ended afterwards."""

    def __init__(
        self,
        name: str,
        open_instrument: OpenInstrument,
        *,
        records: Path,
        cache_dir: Path,
        seed: int,
        emit: Emit,
        gate: Gate | None = None,
        trust_defaults: bool = False,
        hints: int = HINTS_PER_TASK,
    ) -> None:
        """Open the instrument and the records, and set up the session.

        `name` is the model's in the records; `gate` and `trust_defaults` are the session's. At most `hints`
        of a hub are tried for a task in a day. Raises DeviceError where there is no device, bench or board,
        and the errors of `Records.open`.
        """
        emit(events.Stage(stage="extract", fraction=0.0, text="look at the device"))
        instrument = open_instrument(lambda text: emit(events.Note(text=text)))
        self.spec, self._keep_peaks, self.instrument = instrument.spec, instrument.keep_peaks, instrument
        self.profile = profile = instrument.profile
        setup = setup_for(profile.identity)
        self.records = _open_records(records, setup, instrument.yardstick, emit)
        self.search = SearchChild(
            profile,
            cache_dir / "cost-models" / f"{setup.device_key[:16]}.npz",
            seed,
            batch=instrument.batch,
            answers=instrument.answers,
            threads=instrument.sharing.threads,
        )
        trials = Trials(instrument.measurer, self.records, setup)
        self.session = TuningSession(
            name,
            Rooflines(profile, instrument.peaks_again),
            trials,
            Proposals(self.search, self.records, setup, ahead=instrument.sharing.ahead, hints=hints),
            emit,
            gate=gate,
            trust_defaults=trust_defaults,
        )

    def __enter__(self) -> SessionResources:
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_peaks(self.session.profile)
        self.search.close()
        self.records.close()


def _open_records(path: Path, setup: MeasurementSetup, yardstick: float | None, emit: Emit) -> Records:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = Records.open(path)
    if yardstick is not None:
        records.keep_yardstick(setup, yardstick)
    for note in records.notes:
        emit(events.Note(text=note))
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The work that a search does beside timing, and its threads and processes."""

    ahead: bool  # The next batch is made, and the next candidates are built, while others are timed
    threads: int  # Threads of the search
    builders: int  # Children that build ahead


def sharing(family: DeviceFamily, cores: int) -> Sharing:
    """Return how a search shares the processor with a device of a family, on `cores` usable cores.

    Beside a GPU the processor is idle except for one core that feeds the GPU. Where the device is the
    processor, work that runs ahead takes one thread; with too few cores for that, it runs before and may use
    all of them. Whole batches are built there before they are timed, on all cores. Where a driver is not
    known to keep the builds of other processes, only the measuring child builds for it.
    """
    if family.processor:
        ahead = cores >= SPARE_CORES
        return Sharing(ahead=ahead, threads=1 if ahead else cores, builders=min(MOST_BUILDERS, cores))
    threads = max(1, min(_MOST_THREADS, cores - 1))
    builders = max(1, min(MOST_BUILDERS, cores - 2)) if family.keeps_builds else 0
    return Sharing(ahead=True, threads=threads, builders=builders)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementBackend:
    """A backend that judges candidates.

    `profile` has peaks; `peaks_again` measures them again, `keep_peaks` stores those that rose.

    `spec` is the device's, None where it is not on this machine. Without `answers` nothing runs, times are
    predicted, and answers are not looked at. `yardstick` is that of the reference speed in seconds; None: it
    is to be measured. `batch` is how many candidates are proposed at once.
    """

    spec: str | None
    answers: bool = True
    profile: DeviceProfile
    measurer: Callable[[Begin], CandidateRunner]
    peaks_again: Callable[[], DeviceProfile]
    keep_peaks: Callable[[DeviceProfile], None]
    sharing: Sharing
    yardstick: float | None = None
    batch: int = BATCH


OpenInstrument = Callable[[Tell], MeasurementBackend]


def on_device(
    device: str | None, cache_dir: Path, tell: Tell, limits: MeasureLimits = DEFAULT_LIMITS
) -> MeasurementBackend:
    """Return an instrument on the device of a spec, or on the best device there is if the spec is None.

    `limits` bound each measurement. Raises DeviceError where there is no device.
    """
    log = kernel_log(tell)
    found = peaks.survey(device, cache_dir)
    profile = found.require_peaks()
    beside = sharing(profile.family, len(os.sched_getaffinity(0)))
    return MeasurementBackend(
        spec=found.spec,
        profile=profile,
        measurer=lambda begin: Measurer(
            found.spec, profile, limits, kernel_log=log, begin=begin, builders=beside.builders
        ),
        peaks_again=lambda: peaks.survey(found.spec, cache_dir, again=True).require_peaks(),
        keep_peaks=lambda raised: peaks.keep_higher(raised, cache_dir),
        sharing=beside,
    )
