"""What PoCL calls its devices, which it knows by the names "pthread" and "basic" as well: cpu-... since 4.0."""

from __future__ import annotations

import os
import subprocess
import sys

_LIST = (
    "import pyopencl as cl; print(*(d.name for p in cl.get_platforms() for d in p.get_devices()), sep='\\n')"
)


def _names() -> tuple[str, str]:
    """Return how the names begin of the device of all processors, and of that of one."""
    command, both = [sys.executable, "-c", _LIST], {**os.environ, "POCL_DEVICES": "basic pthread"}
    found = subprocess.run(command, env=both, check=False, capture_output=True, text=True).stdout.split("\n")
    newer = next((name for name in found if name.startswith("cpu-") and "minimal" not in name), "")
    return ("-".join(newer.split("-")[:2]), "cpu-minimal") if newer else ("pthread", "basic")


ALL, ONE = _names()
