"""Which compiled files a device has answered rightly for, remembered over restarts of the service.

A file that is known serves after its first probe, as a restart must not take long; the others follow then.
What is remembered counts for the same device, driver and honed only. One empty file for each, so that it can
be lost at any time, at the cost of a slower start.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from honed.machine.profile import DeviceIdentity
from honed.protocol import strict
from honed.runtime.version import HONED_VERSION

REMEMBERED = 500
_log = logging.getLogger(__name__)


class ProofCache:
    """The files proven on one device; `key` is always a compiled file's SHA-256. Blocking I/O, but little."""

    def __init__(self, cache_dir: Path, identity: DeviceIdentity) -> None:
        self._folder = cache_dir / "proven"
        self._device = repr((sorted(strict.to_plain(identity).items()), HONED_VERSION))

    def knows(self, key: str) -> bool:
        """Whether every probe of the file was answered rightly."""
        try:
            return self._marker(key).exists()
        except OSError:  # a folder that cannot be looked into has nothing to tell
            return False

    def note(self, key: str) -> None:
        """Every probe of the file was answered rightly."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._marker(key).touch()
            kept = sorted(self._folder.iterdir(), key=lambda marker: marker.stat().st_mtime)
            for marker in kept[:-REMEMBERED]:
                marker.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("that a model was proven right cannot be remembered: %s", error)

    def forget(self, key: str) -> None:
        """The file is to be proven anew. Raises OSError where that cannot be written."""
        self._marker(key).unlink(missing_ok=True)

    def _marker(self, key: str) -> Path:
        return self._folder / hashlib.sha256(f"{key} {self._device}".encode()).hexdigest()
