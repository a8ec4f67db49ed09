"""Runs the commands of honed as a user does, and a temporary service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_CONFIG = "[tuner]\nspawn = false\n"  # Restricts tuning to requests
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0


class Failed(Exception):
    """Raised when a command failed; the text is its message."""


def hone(
    *arguments: str, seconds: float, socket: Path | None = None, enough: float | None = None
) -> dict[str, Any]:
    """Return the output of `hone ARGUMENTS --json`; raise Failed if it fails or takes longer than `seconds`.

    After `enough` seconds it is interrupted, as by Ctrl-C: tuning then ends with its results, within
    `seconds`.
    """
    command = [sys.executable, "-m", "honed.tool.main", *arguments, "--json"]
    command += [] if socket is None else [f"--socket={socket}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, words = _heard(process, seconds, enough)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"`hone {arguments[0]}` took more than {(enough or 0.0) + seconds:.0f} s") from error
        finally:
            process.kill()
    try:
        said: dict[str, Any] = json.loads(out)
    except ValueError as error:
        last = (words.strip().splitlines() or ["nothing"])[-1]
        raise Failed(
            f"`hone {arguments[0]}` ended with status {process.returncode} and said: {last}"
        ) from error
    if "error" in said:
        raise Failed(str(said["error"].get("message", said["error"])))
    return said


def _heard(process: subprocess.Popen[str], seconds: float, enough: float | None) -> tuple[str, str]:
    if enough is not None:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=enough)
        process.send_signal(signal.SIGINT)
    return process.communicate(timeout=seconds)


class Service:
    """A context manager that runs `honed` with a temporary state.

    Does not measure peaks that are in `cache` already. Raises Failed if it does not start.
    """

    def __init__(self, device: str, cache: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="honed-board-")
        self.folder = Path(self._folder.name)
        self.socket = self.folder / "s"
        config = self.folder / "honed.toml"
        config.write_text(_CONFIG)
        command = [sys.executable, "-m", "honed.daemon.service", f"--socket={self.socket}"]
        command += [f"--state-dir={self.folder / 'state'}", f"--cache-dir={cache}"]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--config={config}", f"--device={device}"], stdin=subprocess.DEVNULL, stderr=log
            )

    def __enter__(self) -> Service:
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                self("status", seconds=_START_SECONDS)
            except Failed as failed:
                if self._process.poll() is None and time.monotonic() < end:
                    time.sleep(0.2)
                    continue
                self.close()
                raise Failed(f"the service does not start: {failed}") from failed
            return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, *arguments: str, seconds: float, enough: float | None = None) -> dict[str, Any]:
        """Run `hone` with this service."""
        return hone(*arguments, seconds=seconds, socket=self.socket, enough=enough)

    def close(self) -> None:
        """End it and remove its folder."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
