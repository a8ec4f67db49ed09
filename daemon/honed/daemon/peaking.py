"""Measures a device's peaks and keeps them: python -m honed.daemon.peaking PARENT_PID DEVICE CACHE_DIR."""

from __future__ import annotations

import sys

from honed.runtime import peaks
from honed.runtime.devices import select
from honed.runtime.errors import HonedError
from honed.runtime.offspring import die_with


def main(parent: str, spec: str, cache_dir: str) -> int:
    """0 measured, 1 not; the worker that started this then tries itself, and says why."""
    die_with(int(parent))
    try:
        peaks.measured(select(spec), cache_dir)
    except HonedError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
