"""Records out of files: those of `hone records export`, and those that lie in a hub."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from honed.protocol.errors import InvalidArgument, NotFound
from honed.protocol.strict import Mismatch
from honed.tuner.records.exchange import Line, lines, parsed

_KINDS = (".jsonl", ".jsonl.gz")


def files(place: Path) -> list[Path]:
    """A file, or all of a folder and of those below it; raises NotFound where there are none."""
    found = sorted(place.rglob("*")) if place.is_dir() else [place]
    found = [path for path in found if path.is_file() and (path == place or path.name.endswith(_KINDS))]
    if not found:
        raise NotFound(f"there are no records at {place}; 'hone records export' writes them, as .jsonl")
    return found


def _opened(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")


def records(path: Path) -> Iterator[Line | str]:
    """What the lines of a file say, or why one is no record; raises InvalidArgument where it is damaged."""
    try:
        with _opened(path) as file:
            for number, data in enumerate(lines(file), 1):
                if data.strip():
                    try:
                        yield parsed(data)
                    except (InvalidArgument, Mismatch) as error:
                        yield f"{path.name}, line {number}: {error}"
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read ({error}); export or fetch it again") from error
