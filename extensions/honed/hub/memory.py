"""Stores what this machine knows of its hub: standings of keys, and signed files as last read."""

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
_MOST: Final = 100_000  # Maximum pulled files; older ones are forgotten, and pulled again
MAX_FILE: Final = 1 << 20  # Letters of a file, as a list of 10,000 keys has; a larger one is read each time
MAX_WHOLE: Final = 32 << 20  # Letters of all files together
_log = logging.getLogger("honed.hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStanding:
    """The standing of a key at the last pull; `problem` is "" if nothing was wrong."""

    name: str
    key_id: str
    records: int  # Records of this machine's devices
    problem: str


@dataclass(slots=True, kw_only=True)
class HubState:
    """Serials and files seen, and the results of the last pull and push; times are seconds since 1970."""

    serial: int = 0  # Serial of the last index pushed
    index: str = ""  # SHA-256 of the last index pushed
    noted: bool = True  # False if the overview lacked that index at the last pull
    seen: dict[str, int] = field(default_factory=dict)  # Serials, as `layout.serial_name` names them
    taken: tuple[str, ...] = ()  # Pulled files, by their key's id and hash
    revoked: tuple[str, ...] = ()  # Key ids
    pulled_s: float | None = None
    pushed_s: float | None = None
    sources: tuple[KeyStanding, ...] = ()
    models: tuple[str, ...] = ()  # Models of the service at the last pull
    trials: int = 0  # Trials of all tuning at the last push
    failures: int = 0  # Failures in a row
    retry_s: float = 0.0  # Time before which honed-hub does nothing
    problem: str = ""  # Failure of the last pull or push

    @classmethod
    def load(cls, path: Path) -> HubState:
        """Return the state stored at `path`, an empty one if there is none.

        Raises InvalidArgument if it is damaged.
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
        """Store the state; raises ResourceExhausted or PermissionDenied."""
        self.taken = self.taken[-_MOST:]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(strict.to_plain(self)).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file and its signature, "" if the hub had none; `looked_s` is the time of the last request for it."""

    text: str
    signature: str
    tag: str  # The store's tag of this content
    looked_s: float  # Seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    url: str
    files: dict[str, KeptFile]


class IndexCache:
    """A cache of the files of the hub at `url`, by name, so that what did not change is not read again.

    It is not trusted: its files are checked like those of the hub. `files` may be read, but not changed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, KeptFile] = {}
        self._letters = 0

    @classmethod
    def load(cls, path: Path, url: str) -> IndexCache:
        """Load the cache of that hub at `path`.

        A damaged file is logged, and all is read again from the hub.
        """
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
        """Store the cache; raises ResourceExhausted or PermissionDenied."""
        with replacing(path) as file:
            file.write(json.dumps(strict.to_plain(_Whole(url=self.url, files=self.files))).encode())

    def put(self, name: str, kept: KeptFile) -> None:
        """Cache a file in place of the one of that name; a file without room is not cached."""
        self.drop(name)
        if len(kept.text) <= min(MAX_FILE, MAX_WHOLE - self._letters):
            self.files[name] = kept
            self._letters += len(kept.text)

    def drop(self, name: str) -> None:
        """Drop a file from the cache."""
        if (kept := self.files.pop(name, None)) is not None:
            self._letters -= len(kept.text)
