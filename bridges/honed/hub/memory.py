"""What this machine remembers of its hub, as a file that is whole or not there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from honed.machine.files import replacing
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument

MAX_PROBLEM: Final = 300  # letters
_MOST: Final = 100_000  # files that were taken; older ones are forgotten, and taken again


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStanding:
    """How one key's files were found at the last pull; `problem` is "" where nothing was wrong."""

    name: str
    key_id: str
    records: int  # of this machine's devices
    problem: str


@dataclass(slots=True, kw_only=True)
class HubMemory:
    """Serials and files seen, and what came of the last pull and push; times are seconds since 1970."""

    serial: int = 0  # of the last index pushed
    index: str = ""  # its SHA-256
    noted: bool = True  # in the overview, where there is one, at the last pull
    seen: dict[str, int] = field(default_factory=dict)  # serials, as `index.numbered` names them
    taken: tuple[str, ...] = ()  # files, by their key's id and hash
    revoked: tuple[str, ...] = ()  # key ids
    pulled_s: float | None = None
    pushed_s: float | None = None
    sources: tuple[KeyStanding, ...] = ()
    models: tuple[str, ...] = ()  # of the service at the last pull
    trials: int = 0  # that tuning had made at the last push
    failures: int = 0  # in a row
    retry_s: float = 0.0  # nothing is done by itself before
    problem: str = ""  # of the last pull or push

    @classmethod
    def load(cls, path: Path) -> HubMemory:
        """What is kept at `path`; nothing where nothing is. Raises InvalidArgument where it is damaged."""
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
