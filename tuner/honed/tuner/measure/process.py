"""The parent's hold on one measuring child: start it, ask it within deadlines, end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from . import codec

COMMAND = (sys.executable, "-P", "-m", "honed.tuner.measure.child")
BUILDER = (sys.executable, "-P", "-m", "honed.tuner.measure.builder")
# Every candidate is another program: kept binaries would fill the disk and never be used again.
NO_CACHES = {
    "CUDA_CACHE_DISABLE": "1",
    "MESA_SHADER_CACHE_DISABLE": "true",
    "POCL_KERNEL_CACHE": "0",
}
_KILL_SECONDS = 5.0  # a process that hangs in a driver may not go; it is left behind then
_LOG_TAIL = 8192  # bytes


class Ended(Exception):
    """The child died, or was killed because it missed a deadline."""

    def __init__(self, phase: str, *, late: bool, how: str, last: str) -> None:
        super().__init__(how)
        self.phase = phase  # what it had announced last
        self.late = late
        self.how = how  # "signal SIGSEGV", "status 1", or what it exceeded
        self.last = last  # the last line its driver wrote

    @property
    def out_of_memory(self) -> bool:
        """Whether memory was the reason, as far as can be told."""
        told = self.last.casefold()
        signs = ("bad_alloc", "out of memory", "cannot allocate memory", "memoryerror")
        return not self.late and (self.how == "signal SIGKILL" or any(sign in told for sign in signs))

    def __str__(self) -> str:
        return f"{self.how}; the driver's last words: {self.last}" if self.last else self.how


class Child:
    """One child process in a process group of its own, which it shares with what its driver starts.

    It dies with the thread that made this object (PR_SET_PDEATHSIG), so let that be one that lasts.
    """

    def __init__(
        self, log: Path, command: Sequence[str] = COMMAND, caches: Mapping[str, str] = NO_CACHES
    ) -> None:
        """Start it; `log` takes what it and its driver print, `caches` says in variables of the environment
        what its driver keeps.
        """
        self._log = log
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            arguments = ["--channel", str(theirs.fileno()), "--parent", str(os.getpid())]
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | dict(caches),
            )
        self._channel = ours

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Of its channel, for `select`."""
        return self._channel.fileno()

    def tell(self, message: Mapping[str, object]) -> None:
        """Send what has no answer, or one to be had from `answer`; that the child is gone shows there."""
        with suppress(codec.ChannelClosed):
            codec.send(self._channel, message)

    def ask(
        self, message: Mapping[str, object], seconds: float, on_phase: Callable[[str], None] | None = None
    ) -> codec.Message:
        """The answer. It may take `seconds`, then what each phase the child announces may take.

        Raises Ended, after which the child is gone.
        """
        self.tell(message)
        return self.answer(seconds, on_phase)

    def answer(self, seconds: float, on_phase: Callable[[str], None] | None = None) -> codec.Message:
        """The answer to what it was told; as `ask`."""
        phase = "start"
        try:
            while True:
                answer = self._receive(time.monotonic() + seconds)
                if "phase" not in answer:
                    return answer
                phase, seconds = str(answer["phase"]), float(answer["seconds"])
                if on_phase:
                    on_phase(phase)
        except TimeoutError:
            self.kill()
            how = f"it took more than {seconds:.3g} s"
            raise Ended(phase, late=True, how=how, last=self._last_line()) from None
        except (codec.ChannelClosed, ValueError):
            how = self._death()
            raise Ended(phase, late=False, how=how, last=self._last_line()) from None

    def kill(self) -> None:
        """End it and what it started, without a word to its driver."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        self._channel.close()

    def _receive(self, deadline: float) -> codec.Message:
        self._channel.settimeout(max(deadline - time.monotonic(), 1e-3))
        return codec.receive(self._channel)

    def _death(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        status = self._process.returncode
        self.kill()
        if status is None:
            return "it closed its channel"
        if status < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-status).name}"
            return f"signal {-status}"
        return f"status {status}"

    def _last_line(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _LOG_TAIL, 0))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""
