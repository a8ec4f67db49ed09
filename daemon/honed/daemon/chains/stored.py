"""The chains on disk: one small checksummed file each, `chains/<name>.json`. Blocking I/O.

As with models, each is written beside its place, synced and renamed; what was altered is set aside.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path

from honed.daemon.store.received import explained
from honed.machine.files import put_aside, read_regular, replacing, sync_folder
from honed.protocol import strict
from honed.protocol.errors import HonedError

from .definition import Chain, chained

_MAX_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class ChainStore:
    """The chains under one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "chains"

    def read(self) -> tuple[list[Chain], list[str]]:
        """Every chain, and a sentence for each that was damaged; raises HonedError without the folder."""
        chains: list[Chain] = []
        damaged: list[str] = []
        with explained(self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            found = sorted(self._folder.iterdir())
        for path in found:
            if path.name.startswith("."):  # one that was being written
                with suppress(OSError):
                    path.unlink()
            elif path.suffix == ".json":
                try:
                    chains.append(_loads(path.stem, read_regular(path, _MAX_BYTES)))
                except (ValueError, RecursionError, OSError, HonedError) as error:
                    damaged.append(f"chain {path.stem}: {error}; {put_aside(path)}; add the chain again")
        return chains, damaged

    def write(self, chain: Chain) -> None:
        """Keep a chain, in the place of one of its name; raises HonedError."""
        with replacing(self._path(chain.name)) as target:
            target.write(_dumps(chain))

    def remove(self, name: str) -> None:
        """Forget a chain; raises HonedError."""
        with explained(self._folder):
            with suppress(FileNotFoundError):
                self._path(name).unlink()
            sync_folder(self._folder)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def checksum(chain: Chain) -> str:
    """The SHA-256 of what a chain consists of, as hex."""
    plain = strict.to_plain(chain)
    return hashlib.sha256(json.dumps([plain["steps"], plain["outputs"]], sort_keys=True).encode()).hexdigest()


def _dumps(chain: Chain) -> bytes:
    body = json.dumps(strict.to_plain(chain))
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n".encode()


def _loads(name: str, data: bytes) -> Chain:
    """Raises ValueError, or InvalidArgument, with a reason."""
    digest, _, body = data.decode(errors="replace").removesuffix("\n").partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        raise ValueError("it does not match its checksum")
    read = strict.from_plain(Chain, json.loads(body), where=name)
    if read.name != name:
        raise ValueError(f"it speaks of chain {read.name!r}")
    return chained(read.name, read.added, read.steps, read.outputs)
