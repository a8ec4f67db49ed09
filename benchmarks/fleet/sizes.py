"""How large what travels is: files of a real hub, and what HTTP adds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Http:
    """Bytes and round trips of one request on a connection of its own, without TLS.

    Defaults are those of Python's urllib and nginx 1.22, as recorded from a socket.
    """

    asks: int = 189  # a request, with If-None-Match
    answers: int = 234  # headers of an answer with a body
    unchanged: int = 175  # 304, without one
    round_trips: float = 2.0  # connecting, and asking


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a hub's files, as they lie there."""

    keyring: float  # per board that it names
    keyring_signature: float
    index: float  # of one board
    index_signature: float
    records: float  # of one board that others pull
    count: float  # records in them
    overview: float = 90.0  # per board: its key's id and a hash

    @classmethod
    def of(cls, hub: Path) -> Sizes:
        """Means over the boards of a hub's folder; raises FileNotFoundError where it is none."""
        boards = [path for path in sorted((hub / "boards").iterdir()) if (path / "index.json").exists()]
        indexes = [path / "index.json" for path in boards]
        named = json.loads((hub / "hub.json").read_text())
        entries = [entry for path in indexes for entry in json.loads(path.read_text())["entries"]]
        return cls(
            keyring=_bytes(hub / "hub.json") / max(1, len(named.get("boards", ()))),
            keyring_signature=_bytes(hub / "hub.json.minisig"),
            index=mean(map(_bytes, indexes)),
            index_signature=mean(_bytes(path.with_name("index.json.minisig")) for path in indexes),
            records=sum(entry["bytes"] for entry in entries) / len(boards),
            count=sum(entry["records"] for entry in entries) / len(boards),
        )


def _bytes(path: Path) -> int:
    return path.stat().st_size
