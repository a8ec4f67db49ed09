"""Signed files of a hub as they were read last, so that what did not change is not read again.

It is no place of trust: what comes from it is checked like what comes from the hub.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from honed.machine.files import replacing
from honed.protocol import strict

MAX_FILE: Final = 1 << 20  # letters of a file, as a list of 10,000 keys has; a larger one is read each time
MAX_WHOLE: Final = 32 << 20  # likewise, of all
_log = logging.getLogger("honed.hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file and its signature, "" where the hub had none; `looked_s` is when the hub was asked for it."""

    text: str
    signature: str
    tag: str  # what the store knows it by
    looked_s: float  # since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    url: str
    files: dict[str, KeptFile]


class Shelf:
    """What is kept of the hub at `url`, by name; `files` is to look at."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, KeptFile] = {}
        self._letters = 0

    @classmethod
    def load(cls, path: Path, url: str) -> Shelf:
        """What is kept at `path` of that hub. What is damaged is read anew from the hub, and logged."""
        shelf = cls(url)
        try:
            whole = strict.from_plain(_Whole, json.loads(path.read_bytes()), where=path.name)
        except FileNotFoundError:
            return shelf
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s is damaged (%s): all indexes are read anew", path, error)
            return shelf
        if whole.url == url:
            for name, kept in whole.files.items():
                shelf.put(name, kept)
        return shelf

    def save(self, path: Path) -> None:
        """Keep it; raises ResourceExhausted or PermissionDenied."""
        with replacing(path) as file:
            file.write(json.dumps(strict.to_plain(_Whole(url=self.url, files=self.files))).encode())

    def put(self, name: str, kept: KeptFile) -> None:
        """Keep a file in place of what was kept of that name; one for which there is no room is not."""
        self.drop(name)
        if len(kept.text) <= min(MAX_FILE, MAX_WHOLE - self._letters):
            self.files[name] = kept
            self._letters += len(kept.text)

    def drop(self, name: str) -> None:
        """Keep it no longer."""
        if (kept := self.files.pop(name, None)) is not None:
            self._letters -= len(kept.text)
