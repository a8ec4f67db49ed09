"""A session with all it needs: device or bench, records, kernel log, searching and measuring children."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from honed.jobs import events
from honed.tuner.gate import Gate
from honed.tuner.measure.faultwatch import kernel_log
from honed.tuner.measure.limits import MeasureLimits
from honed.tuner.measure.measurer import DEFAULT_LIMITS
from honed.tuner.records import HINTS_PER_TASK, Records, Setup
from honed.tuner.setup import setup_for

from .children import SearchChild
from .instruments import BenchChoice, Instrument, on_bench, on_device, on_farm
from .proposals import Proposals
from .session import Emit, TuningSession
from .trials import Trials

if TYPE_CHECKING:
    from honed.tuner.farm.joining import FarmChoice


class OpenedSession:
    """A context manager; everything is closed and every child ended afterwards."""

    def __init__(
        self,
        name: str,
        *,
        device: str | None,
        records: Path,
        cache_dir: Path,
        seed: int,
        emit: Emit,
        gate: Gate | None = None,
        limits: MeasureLimits = DEFAULT_LIMITS,
        trust_defaults: bool = False,
        bench: BenchChoice | None = None,
        farm: FarmChoice | None = None,
        hints: int = HINTS_PER_TASK,
    ) -> None:
        """`name` is what is tuned, in the records; `device` a spec, None for the best there is; `gate` and
        `trust_defaults` are the session's. `limits` bound each measurement. With `bench` no device is used,
        with `farm` those of its boards. Of a task so many `hints` of a hub may be tried in a day.

        Raises DeviceError where there is no device, bench or board, and what `Records.open` raises.
        """
        emit(events.Stage(stage="extract", fraction=0.0, text="look at the device"))

        def tell(text: str) -> None:
            emit(events.Note(text=text))

        if farm is not None:
            instrument = on_farm(farm, tell)
        elif bench is not None:
            instrument = on_bench(bench)
        else:
            instrument = on_device(device, cache_dir, limits, kernel_log(tell))
        self.spec, self._keep_peaks = instrument.spec, instrument.keep_peaks
        self.profile = profile = instrument.profile
        setup = setup_for(profile.identity)
        self.records = _open_records(records, setup, instrument.yardstick, emit)
        self.search = _search_child(instrument, setup, cache_dir, seed)
        trials = Trials(instrument.measurer, self.records, setup)
        self.session = TuningSession(
            name,
            profile,
            trials,
            Proposals(self.search, self.records, setup, ahead=instrument.sharing.ahead, hints=hints),
            emit,
            peaks_again=instrument.peaks_again,
            gate=gate,
            trust_defaults=trust_defaults,
        )

    def __enter__(self) -> OpenedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_peaks(self.session.profile)
        self.search.close()
        self.records.close()


def _open_records(path: Path, setup: Setup, yardstick: float | None, emit: Emit) -> Records:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = Records.open(path)
    if yardstick is not None:
        records.keep_yardstick(setup, yardstick)
    for note in records.notes:
        emit(events.Note(text=note))
    return records


def _search_child(instrument: Instrument, setup: Setup, cache_dir: Path, seed: int) -> SearchChild:
    return SearchChild(
        instrument.profile,
        cache_dir / "cost-models" / f"{setup.device_key[:16]}.npz",
        seed,
        batch=instrument.batch,
        answers=instrument.answers,
        threads=instrument.sharing.threads,
    )
