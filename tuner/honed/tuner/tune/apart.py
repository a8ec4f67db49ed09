"""Runs a child process that a Ctrl-C meant for this one does not reach, and that ends with this one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from honed.runtime.offspring import die_with


def run_apart(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """What it printed, once it has ended; raises subprocess.TimeoutExpired after `seconds`.

    Not for processes with several threads, as between fork and exec it runs Python.
    """
    parent = os.getpid()
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        start_new_session=True,
        preexec_fn=lambda: die_with(parent),
    )
