"""Runs a temporary service for a benchmark."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from honed.protocol.errors import HonedError
from honed.runtime.client import Client

_SECONDS = 120.0  # Limit for the service to become ready


@contextlib.contextmanager
def service(folder: Path, config: str, environment: Mapping[str, str] | None = None) -> Iterator[Client]:
    """Yield a client of a service that keeps everything in `folder`; both end with the block.

    `environment` adds to this process's.
    """
    file, socket = folder / "honed.toml", folder / "s"
    file.write_text(config)
    command = [sys.executable, "-m", "honed.daemon.service", f"--socket={socket}", f"--config={file}"]
    command += [f"--state-dir={folder / 'state'}", f"--cache-dir={folder / 'cache'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **(environment or {})})
    try:
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(HonedError), Client(socket) as client:
                if client.ready():
                    break
            time.sleep(0.2)
        with Client(socket, timeout=600.0) as client:
            yield client
    finally:
        process.terminate()
        process.wait()
