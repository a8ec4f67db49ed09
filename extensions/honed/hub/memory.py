"""What this machine remembers of its hub: standings of keys, and signed files as they were read last."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from honed.machine.files import replacing
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument

MAX_PROBLEM: Final = 300  # Letters
_MOST: Final = 100_000  # Files that were taken; older ones are forgotten, and taken again
MAX_FILE: Final = 1 << 20  # Letters of a file, as a list of 10,000 keys has; a larger one is read each time
MAX_WHOLE: Final = 32 << 20  # Letters of all files together
_log = logging.getLogger("honed.hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStanding:
    """How one key's files were found at the last pull; `problem` is "" where nothing was wrong."""

    name: str
    key_id: str
    records: int  # Of this machine's devices
    problem: str


@dataclass(slots=True, kw_only=True)
class HubState:
    """Serials and files seen, and the results of the last pull and push; times are seconds since 1970."""

    serial: int = 0  # Of the last index pushed
    index: str = ""  # Its SHA-256
    noted: bool = True  # In the overview, where there is one, at the last pull
    seen: dict[str, int] = field(default_factory=dict)  # Serials, as `index.numbered` names them
    taken: tuple[str, ...] = ()  # Files, by their key's id and hash
    revoked: tuple[str, ...] = ()  # Key ids
    pulled_s: float | None = None
    pushed_s: float | None = None
    sources: tuple[KeyStanding, ...] = ()
    models: tuple[str, ...] = ()  # Of the service at the last pull
    trials: int = 0  # That tuning had made at the last push
    failures: int = 0  # In a row
    retry_s: float = 0.0  # Nothing is done by itself before
    problem: str = ""  # Of the last pull or push

    @classmethod
    def load(cls, path: Path) -> HubState:
        """Load what is kept at `path`; nothing where nothing is.

        Raises InvalidArgument where it is damaged.
        """
        try:
            return strict.from_plain(cls, json.loads(path.read_bytes()), where=path.name)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"{path} is damaged ({error}); remove it, and all is pulled again"
            ) from error

    def save(self, path: Path) -> None:
        """Keep it; raises ResourceExhausted or PermissionDenied."""
        self.taken = self.taken[-_MOST:]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(strict.to_plain(self)).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file and its signature, "" where the hub had none; `looked_s` is when the hub was asked for it."""

    text: str
    signature: str
    tag: str  # What the store knows it by
    looked_s: float  # Since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    url: str
    files: dict[str, KeptFile]


class IndexCache:
    """What is kept of the hub at `url`, by name, so that what did not change is not read again.

    It is no place of trust: what comes from it is checked like what comes from the hub.
    `files` is to look at.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, KeptFile] = {}
        self._letters = 0

    @classmethod
    def load(cls, path: Path, url: str) -> IndexCache:
        """Load what is kept at `path` of that hub. Damaged parts are logged, and read anew from the hub."""
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
