"""A session with all it needs: device, records, kernel log, searching and measuring children."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from honed.runtime import peaks
from honed.runtime.errors import HonedError
from honed.runtime.kernellog import Reader, open_reader
from honed.runtime.surveying import survey
from honed.tuner.measure.limits import Limits
from honed.tuner.measure.measurer import DEFAULT_LIMITS, Measurer
from honed.tuner.records import Records
from honed.tuner.setup import setup_for

from .proposals import Proposals
from .search_child import SearchChild
from .session import Gate, Session
from .sharing import sharing
from .trials import Trials

Emit = Callable[[dict[str, Any]], None]


class Opened:
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
        limits: Limits = DEFAULT_LIMITS,
        trust_defaults: bool = False,
    ) -> None:
        """`name` is what is tuned, in the records; `device` a spec, None for the best there is; `gate` and
        `trust_defaults` are the session's. `limits` bound each measurement.

        Raises DeviceError where there is no device, and what `Records.open` raises.
        """
        emit({"event": "stage", "stage": "extract", "fraction": 0.0, "text": "look at the device"})
        found = survey(device, cache_dir)
        self.spec = found.spec
        self.profile = profile = found.measured()
        setup = setup_for(profile.identity)
        records.parent.mkdir(parents=True, exist_ok=True)
        self.records = Records.open(records)
        for note in self.records.notes:
            emit({"event": "note", "text": note})
        cost_model = cache_dir / "cost-models" / f"{setup.device_key[:16]}.npz"
        cores = len(os.sched_getaffinity(0))
        beside = sharing(profile.rules.family, cores)
        self.search = SearchChild(profile, cost_model, seed, threads=beside.threads)
        self._cache_dir = cache_dir
        log = _kernel_log(emit)
        trials = Trials(
            lambda begin: Measurer(
                self.spec, profile, limits, kernel_log=log, begin=begin, builders=beside.builders
            ),
            self.records,
            setup,
        )
        self.session = Session(
            name,
            profile,
            trials,
            Proposals(self.search, self.records, setup, ahead=beside.ahead),
            emit,
            peaks_again=lambda: survey(self.spec, cache_dir, again=True).measured(),
            gate=gate,
            trust_defaults=trust_defaults,
        )

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        peaks.keep_higher(self.session.profile, self._cache_dir)
        self.search.close()
        self.records.close()


def _kernel_log(emit: Emit) -> Reader | None:
    try:
        return open_reader()
    except HonedError as error:
        emit({"event": "note", "text": f"candidates are not watched for GPU faults: {error}"})
        return None
