"""File descriptors that come with a stream of messages (SCM_RIGHTS), and which message they belong to."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable


class Arrivals:
    """Descriptors received, until the message that they came with is decoded.

    A read that brings descriptors ends within the bytes they were sent with: the kernel joins nothing that
    follows to it (unix(7), "Ancillary messages"). So they belong to the first message that ends there or
    later.
    """

    def __init__(self) -> None:
        self._received = 0  # bytes since the connection began
        self._held: deque[tuple[int, list[int]]] = deque()  # with the last byte of the read they came in

    def __len__(self) -> int:
        return sum(len(descriptors) for _, descriptors in self._held)

    def note(self, nbytes: int, descriptors: list[int]) -> None:
        """What one read gave; the descriptors are kept."""
        self._received += nbytes
        if descriptors:
            self._held.append((self._received, descriptors))

    def take(self, undecoded: int) -> list[int]:
        """Those of the message just decoded, behind which `undecoded` bytes are left; now the caller's."""
        end = self._received - undecoded
        taken: list[int] = []
        while self._held and self._held[0][0] <= end:
            taken += self._held.popleft()[1]
        return taken

    def close(self) -> None:
        """Close all that are held; may be called again."""
        while self._held:
            close_all(self._held.popleft()[1])


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors, all of them ours."""
    for descriptor in descriptors:
        os.close(descriptor)
