"""What a tuning session needs of what judges its candidates: a device that runs them, or a model of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from honed.machine.kernellog import FaultStory
from honed.machine.profile import DevicePeaks
from honed.tuner.verdict import Verdict

from .candidate import Candidate, Workload

# Called before a candidate is judged: notes it in the records, or raises where it must not be tried.
Begin = Callable[[Candidate], None]


class Measures(Protocol):
    """Judges the candidates of one workload after the other; not for several threads.

    Calls may raise DeviceError where the judging itself broke; they may be made again then.
    """

    @property
    def ahead(self) -> int:
        """How many candidates `prepare` may have built beside the one being judged; 0: it does nothing."""

    @property
    def rate(self) -> float:
        """Bytes per second that the device was seen to move at the loaded workload's size; 0 if unknown."""

    @property
    def peaks(self) -> DevicePeaks:
        """The device's peaks as they are known now."""

    @property
    def spent(self) -> dict[str, float]:
        """Wall seconds of the candidate judged last, by phase."""

    def load(self, workload: Workload) -> None:
        """Judge candidates of `workload` from now on."""

    def prepare(self, candidate: Candidate) -> None:
        """Have a candidate built that is soon judged."""

    def build(self, candidates: Sequence[Candidate]) -> None:
        """Have candidates built that are judged soon, the first of them next, where a pool does that."""

    def forget(self) -> dict[str, Verdict]:
        """What `build` and `prepare` were told is not judged any more.

        Gives verdicts by id on candidates that were prepared, and judged before they were asked for.
        """

    def measure(self, candidate: Candidate, best: float | None = None) -> Verdict:
        """The verdict on a candidate; one far slower than `best` (seconds) may be timed less well."""

    def settle(self) -> None:
        """Wait until faults of what was judged last must be known; `take_faults` has them then."""

    def take_faults(self) -> list[tuple[str, FaultStory]]:
        """Faults found since the last call, with the ids of the candidates they belong to."""

    def close(self) -> None:
        """End its processes."""
