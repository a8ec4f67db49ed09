"""The parent's hold on one measuring child: start it, ask it within deadlines, end it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from honed.machine.children import Death, kill_group, last_line, python, start

from . import codec

COMMAND = python("honed.tuner.measure.child")
BUILDER = python("honed.tuner.measure.builder")
# Every candidate is another program: kept binaries would fill the disk and never be used again.
NO_CACHES = {
    "CUDA_CACHE_DISABLE": "1",
    "MESA_SHADER_CACHE_DISABLE": "true",
    "POCL_KERNEL_CACHE": "0",
}
_KILL_SECONDS = 5.0  # a process that hangs in a driver may not go; it is left behind then


FENCE = "fence"  # the phase in which a candidate's buffers lie against pages that may not be touched


class Ended(Exception):
    """The child died, or was killed because it missed a deadline."""

    def __init__(self, phase: str, death: Death) -> None:
        super().__init__(str(death))
        self.phase = phase  # what it had announced last
        self.death = death


class DriverChild:
    """One child process in a process group of its own, which it shares with what its driver starts.

    It dies with the thread that made this object (PR_SET_PDEATHSIG), so let that be one that lasts.
    """

    def __init__(
        self, log: Path, program: Sequence[str] = COMMAND, caches: dict[str, str] = NO_CACHES
    ) -> None:
        """Start it; `log` takes what it and its driver print, `caches` says in variables of the environment
        what its driver keeps.
        """
        self._log = log
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            self._process = start(
                [*program, "--channel", str(theirs.fileno())],
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                environment=os.environ | caches,
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
            raise Ended(phase, self._death(seconds)) from None
        except (codec.ChannelClosed, ValueError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
            death = self._death()
            self.kill()
            raise Ended(phase, death) from None

    def kill(self) -> None:
        """End it and what it started, without a word to its driver."""
        kill_group(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        self._channel.close()

    def _receive(self, deadline: float) -> codec.Message:
        self._channel.settimeout(max(deadline - time.monotonic(), 1e-3))
        return codec.receive(self._channel)

    def _death(self, deadline: float | None = None) -> Death:
        with self._log.open("rb") as log:
            return Death(status=self._process.returncode, deadline=deadline, said=last_line(log))
