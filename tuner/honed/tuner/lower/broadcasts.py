"""Shortens vectors of equal elements in generated OpenCL C.

TVM writes the broadcast of a scalar as `((float16)(a, a, ..., a))` with every element spelled out: most of
the source of a vectorised kernel, and of the time a driver's compiler takes for it. `((float16)(a))` means
the same (OpenCL C 3.0, 6.2.2: a scalar is widened to the vector).
"""

from __future__ import annotations

import re

_VECTOR = re.compile(r"\(\(((?:u?(?:char|short|int|long)|half|float|double)(\d+))\)\(")


def shorten_broadcasts(source: str) -> str:
    """The same source with every vector literal of textually equal elements written once."""
    parts: list[str] = []
    at = 0
    for match in _VECTOR.finditer(source):
        if match.start() < at:
            continue
        elements, end = _elements(source, match.end())
        if len(elements) == int(match.group(2)) and len(set(elements)) == 1:
            parts += [source[at : match.end()], shorten_broadcasts(elements[0])]
            at = end
    parts.append(source[at:])
    return "".join(parts)


def _elements(source: str, start: int) -> tuple[list[str], int]:
    """The comma-separated elements from `start`, and where their closing parenthesis is."""
    elements: list[str] = []
    depth, first = 0, start
    for n in range(start, len(source)):
        character = source[n]
        if character in "([":
            depth += 1
        elif character in ")]":
            if depth == 0:
                return [*elements, source[first:n].strip()], n
            depth -= 1
        elif character == "," and depth == 0:
            elements.append(source[first:n].strip())
            first = n + 1
    return [], start
