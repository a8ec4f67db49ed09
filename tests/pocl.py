"""What PoCL calls its devices, which may also be asked for as "pthread" and "basic": cpu-... since 4.0."""

from __future__ import annotations

import os
import subprocess
import sys

_LIST = """
import pyopencl

for platform in pyopencl.get_platforms():
    for device in platform.get_devices():
        print(device.name)
"""


def _names() -> tuple[str, str]:
    """Return how the names begin of the device of all processors, and of that of one."""
    command, both = [sys.executable, "-c", _LIST], {**os.environ, "POCL_DEVICES": "basic pthread"}
    found = subprocess.run(command, env=both, check=False, capture_output=True, text=True).stdout.split("\n")
    newer = next((name for name in found if name.startswith("cpu-") and "minimal" not in name), "")
    return ("-".join(newer.split("-")[:2]), "cpu-minimal") if newer else ("pthread", "basic")


ALL, ONE = _names()
