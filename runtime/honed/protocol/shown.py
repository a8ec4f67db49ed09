"""Values for messages: what is shown may be a peer's, and of any size."""

from __future__ import annotations

import itertools
import reprlib


class _Short(reprlib.Repr):
    """Looks at the first part of a value only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 2 * _SHOWN, 2 * _SHOWN
        self.maxlist = self.maxtuple = self.maxdict = 20

    def repr_bytes(self, value: bytes, level: int) -> str:
        """`reprlib` knows bytes only as any other object, whose whole text it makes first."""
        return repr(value[: 2 * _SHOWN])

    def repr_dict(self, value: dict[object, object], level: int) -> str:
        """Without the sorting of `reprlib`, which looks at every key."""
        first = list(itertools.islice(value.items(), self.maxdict))
        text = ", ".join(
            f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in first
        )
        return f"{{{text}{', ...' if len(value) > len(first) else ''}}}" if level > 0 else "{...}"


_SHOWN = 60  # letters of a value in a message
_short = _Short()


def shown(value: object) -> str:
    """`value` for a message: its first letters, found in a time that does not depend on its size."""
    text = _short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
