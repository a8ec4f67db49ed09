"""Everything a machine shows of itself, read below a root folder without any privilege."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from . import thermal
from .gpu import Gpu
from .own import Own, OwnShare
from .power import power
from .pressure import load, pressure
from .readings import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSignals:
    """What was read at one time: the signals, and our own share in them."""

    samples: tuple[Sample, ...]
    own: Own


class Signals:
    """Reads the signals; never raises for what a machine lacks. Blocks, for 100 ms at most."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._gpu = Gpu(root)
        self._own = OwnShare(root)

    def read(self, now: float, own: Collection[int]) -> MachineSignals:
        """The signals at `now` (seconds of a steady clock); `own` are the processes of service and tuners."""
        samples = (
            *pressure(self._root),
            load(self._root),
            *self._gpu.samples(now),
            *thermal.samples(self._root),
            power(self._root),
        )
        return MachineSignals(samples=samples, own=self._own.measure(own, now))
