"""The room that a client gives for outputs, shared out among the steps of a chain. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.serving.inference import RegionRange
from honed.protocol.params import ROOM_ALIGN, RegionPlace


def aligned(nbytes: int) -> int:
    """So many bytes, and the gap before what follows them in a room."""
    return -(-nbytes // ROOM_ALIGN) * ROOM_ALIGN


@dataclass(slots=True, eq=False)
class ScratchRoom:
    """What is left of it. While a step has `lent` the rest, nothing else is taken."""

    of: RegionRange
    used: int = 0
    lent: bool = False

    def take(self, nbytes: int) -> RegionPlace | None:
        """A place for a tensor of so many bytes, None where there is none."""
        if self.lent or not 0 < nbytes <= self.of.nbytes - self.used:
            return None
        place = self._place(nbytes)
        self.used += aligned(nbytes)
        return place

    def lend(self) -> RegionPlace | None:
        """All that is left, to a step that does not know how much it needs; None where there is none."""
        if self.lent or self.used >= self.of.nbytes:
            return None
        self.lent = True
        return self._place(self.of.nbytes - self.used)

    def returned(self, end: int) -> None:
        """The step has run, and what it placed ends at this byte of the region."""
        self.lent = False
        self.used = max(self.used, aligned(end - self.of.offset))

    def _place(self, nbytes: int) -> RegionPlace:
        return RegionPlace(
            shared_memory_region=self.of.region.name,
            shared_memory_offset=self.of.offset + self.used,
            shared_memory_byte_size=nbytes,
        )
