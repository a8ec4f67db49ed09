"""Folders for as long as a process runs; what one left behind that was killed is cleared away by the next."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from honed.tuner.records.store import Owner

_OWNER = "owner"


def scratch(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A new temporary folder, once those of the same prefix have gone whose processes have ended."""
    sweep(Path(tempfile.gettempdir()), prefix)
    made = tempfile.TemporaryDirectory(prefix=prefix)
    (Path(made.name) / _OWNER).write_text(str(Owner.this_process()))
    return made


def sweep(place: Path, prefix: str) -> None:
    """Remove this user's folders in `place` that begin with `prefix` and whose process certainly ended."""
    for folder in place.glob(f"{prefix}*"):
        # Another process may be clearing the same away, and folders of others are none of ours.
        with suppress(OSError, ValueError):
            about = folder.lstat()
            ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
            if ours and Owner.parse((folder / _OWNER).read_text()).gone():
                shutil.rmtree(folder, ignore_errors=True)
