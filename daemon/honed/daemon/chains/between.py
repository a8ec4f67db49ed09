"""The memory of a chain's tensors: between its steps, and the room that its client gives.

Regions that are not needed any more are kept for a while: engines have them mapped, and their pages are
there.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from honed.daemon.serving.inference import RegionRange
from honed.daemon.settings.limits import CHAINS_MIB
from honed.daemon.worker.regions import HeldRegion
from honed.protocol.errors import ResourceExhausted
from honed.protocol.params import ROOM_ALIGN, RegionPlace

_LEAST_BYTES = 1 << 16  # of a region
_KEPT, _KEPT_BYTES = 64, 64 << 20  # regions that nobody needs
_ALL_BYTES = (CHAINS_MIB << 20) - _KEPT_BYTES
_USER_BYTES = _ALL_BYTES // 2
_KEPT_SECONDS = 60.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True, eq=False)
class _Wish:
    """A request that waits for memory to be set aside."""

    user: int
    nbytes: int
    admitted: asyncio.Future[None]


class BetweenMemory:
    """Regions of one service. What a chain is likely to need is set aside before it begins, so that none
    waits for another in the middle; `release` lets go of a region for good.
    """

    def __init__(self, release: Callable[[HeldRegion], None]) -> None:
        self.release = release
        self._numbers = itertools.count(1)
        self._reserved: Counter[int] = Counter()  # bytes by user
        self._wishes: list[_Wish] = []  # in the order of asking
        self._free: list[HeldRegion] = []  # the one used last is the last
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def reserved(self, user: int, nbytes: int) -> AsyncIterator[None]:
        """Set memory aside, in the order of asking; raises ResourceExhausted for more than there may be.

        A user who has as much as one may have does not keep others waiting.
        """
        if nbytes > _ALL_BYTES:
            raise ResourceExhausted(
                f"what goes between the chain's steps has {nbytes} bytes and may have {_ALL_BYTES}; "
                "send smaller inputs, or ask for the models one after the other"
            )
        wish = _Wish(user, nbytes, asyncio.get_running_loop().create_future())
        self._wishes.append(wish)
        self._admit()
        try:
            await wish.admitted
            yield
        finally:
            if wish in self._wishes:
                self._wishes.remove(wish)
            else:
                self._reserved[user] -= nbytes
            self._admit()

    def take(self, nbytes: int) -> HeldRegion:
        """A region of at least so many bytes, which hold anything; raises ResourceExhausted."""
        wanted = region_bytes(nbytes)
        for index, region in enumerate(self._free):
            if region.byte_size == wanted:
                return self._free.pop(index)
        name = f"/{next(self._numbers)}"  # that no client can give
        try:
            descriptor = os.memfd_create("honed chain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, wanted)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise ResourceExhausted(
                f"there is no shared memory for {wanted} bytes between two steps ({error.strerror}); "
                "try again later"
            ) from error
        return HeldRegion(name, descriptor, 0, wanted)

    def give_back(self, region: HeldRegion) -> None:
        """A region is not needed any more."""
        if region.shared:  # by a run that nobody waits for any more, and that may still write to it
            self.release(region)
            return
        self._free.append(region)
        self._drop(_KEPT, _KEPT_BYTES)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._drop, 0, 0)

    def _drop(self, keep: int, keep_bytes: int) -> None:
        """Let go of regions, those that were not used for the longest time first, until so many are kept."""
        while len(self._free) > keep or sum(region.byte_size for region in self._free) > keep_bytes:
            self.release(self._free.pop(0))

    def _admit(self) -> None:
        """Let those go on for whom there is room, of each user in order."""
        waiting: set[int] = set()
        for wish in list(self._wishes):
            mine = self._reserved[wish.user]
            if wish.user in waiting or (mine and mine + wish.nbytes > _USER_BYTES):
                waiting.add(wish.user)
                continue
            if self._reserved.total() + wish.nbytes > _ALL_BYTES:
                break
            self._wishes.remove(wish)
            self._reserved[wish.user] += wish.nbytes
            if not wish.admitted.done():
                wish.admitted.set_result(None)
        self._reserved = +self._reserved  # without users who have nothing


def region_bytes(nbytes: int) -> int:
    """The size of the region that is taken for so many bytes: one of few sizes, so that it fits others."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())


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
        return self.of.part(self.used, nbytes).place
