"""On which line of a TOML file a setting stands: `tomllib` does not tell."""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*\[\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*(?:\.\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*)?=")


def lines_of(text: str) -> dict[str, int]:
    """Line numbers, from 1, of the settings in a valid TOML document, by "table.key".

    Settings in inline tables are left out, and all of them where the document has texts of several lines,
    which could hold what only looks like a setting.
    """
    if '"""' in text or "'''" in text:
        return {}
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header, key = _HEADER.fullmatch(line), _KEY.match(line)
        if header:
            table = header[1]
        elif key:
            dotted = f"{key[1]}.{key[2]}" if key[2] else f"{table}.{key[1]}"
            found.setdefault(dotted, number)
    return found
