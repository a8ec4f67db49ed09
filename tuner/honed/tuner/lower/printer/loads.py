"""Values read from memory more than once, read once.

While a block is written a load stands in its lines as a mark. When the block is complete its marks are
counted: a load that stands in it once is put where its mark is, one that stands in it several times is read
into a variable before the first line that needs it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from . import types
from .names import Names
from .types import Type

_MARK = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True, slots=True)
class LoadText:
    """A load: its text (with marks of loads in it), the type of its value, and the memory it reads."""

    text: str
    type: Type
    memory: str


class Loads:
    """All loads of a kernel, by the numbers in their marks."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._loads: list[LoadText] = []

    def mark(self, load: LoadText) -> str:
        """A mark for a load not met before."""
        self._loads.append(load)
        return f"\ue000{len(self._loads) - 1}\ue001"

    def shared(self, texts: list[str]) -> set[int]:
        """The loads that stand more than once in the lines of a block."""
        uses: Counter[int] = Counter()
        for text in texts:
            uses.update(_marks(text))
        found: set[int] = set()
        # A load's index is marked before the load itself.
        for number in range(max(uses, default=-1), -1, -1):
            if uses[number] > 1:
                found.add(number)
            if uses[number]:
                uses.update(_marks(self._loads[number].text))
        return found

    def declared(self, text: str, shared: set[int], named: dict[int, str]) -> tuple[list[str], str]:
        """A line without marks, and the declarations it needs before it; `named` has those made before."""
        before: list[str] = []

        def value(match: re.Match[str]) -> str:
            number = int(match.group(1))
            if number in named:
                return named[number]
            load = self._loads[number]
            plain = _MARK.sub(value, load.text)
            if number not in shared:
                return plain
            named[number] = name = self._names.fresh(f"{load.memory}_value")
            before.append(f"const {types.name(load.type)} {name} = {plain};")
            return name

        return before, _MARK.sub(value, text)


def _marks(text: str) -> list[int]:
    return [int(number) for number in _MARK.findall(text)]
