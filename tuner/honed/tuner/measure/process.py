"""The parent's hold on its children: the measuring child, and a pool of building ones."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from honed.machine.children import Death, kill_group, last_line, python, start

from . import codec
from .candidate import Candidate, Workload

# ---- The parent's hold on one measuring child: start it, ask it within deadlines, end it ----

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


# ---- A pool of building children: the parent's side ----
#
# They fill the cache that the measuring child reads.

_AT_ONCE = 2  # candidates that a child has been given, so that it need not wait for us


def cached_in(folder: Path) -> dict[str, str]:
    """The environment in which PoCL and NVIDIA's driver keep compiled programs in `folder`."""
    kept = str(folder)
    return {
        "POCL_KERNEL_CACHE": "1",
        "POCL_CACHE_DIR": kept,
        "CUDA_CACHE_DISABLE": "0",
        "CUDA_CACHE_PATH": kept,
        "CUDA_CACHE_MAXSIZE": str(256 << 20),
    }


class Builders:
    """Builds candidates in `count` children. Not for several threads.

    What fails, crashes or takes too long is left to the measuring child, which gives the verdict.
    """

    def __init__(
        self,
        device: str,
        count: int,
        *,
        launch: bool,
        folder: Path,
        seconds: float,
        memory_bytes: int,
        command: Sequence[str] = BUILDER,
    ) -> None:
        """`folder` takes the cache and logs, `seconds` is what one candidate may take, `memory_bytes` what a
        child may grow by. With `launch`, kernels are run once.
        """
        self.cache = folder / "cache"
        self._folder = folder
        self._opening = {"device": device, "launch": launch, "memory_bytes": memory_bytes}
        self._seconds = seconds
        self._command = tuple(command)
        self._children: list[_Builder | None] = [None] * count
        self._queue: deque[tuple[Candidate, Mapping[str, object]]] = deque()
        self._submitted: set[str] = set()
        self.cache.mkdir(exist_ok=True)

    def close(self) -> None:
        """End the children, and empty the cache."""
        self.forget()
        for builder in self._children:
            if builder is not None:
                builder.child.kill()
        shutil.rmtree(self.cache, ignore_errors=True)

    def forget(self) -> None:
        """Leave what has not begun, and forget what was built: another batch begins."""
        self._queue.clear()
        self._submitted.clear()
        if self._busy:
            return  # it may be writing there
        for kept in self.cache.iterdir():
            if kept.is_dir():
                shutil.rmtree(kept, ignore_errors=True)

    def submit(self, candidates: Sequence[Candidate], workload: Workload) -> None:
        """Have candidates of `workload` built, in order; those submitted before are passed over."""
        plain = codec.workload_to_plain(workload)
        for candidate in candidates:
            if candidate.id not in self._submitted:
                self._submitted.add(candidate.id)
                self._queue.append((candidate, plain))
        self._pump(0.0)

    def submitted(self, candidate: Candidate) -> bool:
        """Whether it was submitted since the last `forget`."""
        return candidate.id in self._submitted

    def wait(self, candidate: Candidate | None = None) -> None:
        """Wait until it, or everything, was built or given up."""
        while self._waits(candidate):
            self._pump(0.1)

    def _waits(self, candidate: Candidate | None) -> bool:
        if candidate is None:
            return bool(self._queue or self._busy)
        queued = any(one.id == candidate.id for one, _ in self._queue)
        return queued or any(candidate.id in builder.given for builder in self._busy)

    @property
    def _busy(self) -> list[_Builder]:
        return [builder for builder in self._children if builder is not None and builder.given]

    def _pump(self, seconds: float) -> None:
        """Hand out what is queued, and take in what is done, waiting for it for `seconds` at most."""
        self._hand_out()
        busy = self._busy
        if not busy:
            return
        ready, _, _ = select.select([builder.child for builder in busy], [], [], seconds)
        for builder in busy:
            if builder.child in ready or time.monotonic() > builder.deadline:
                self._take_in(builder)
        self._hand_out()

    def _take_in(self, builder: _Builder) -> None:
        try:
            builder.child.answer(max(0.0, builder.deadline - time.monotonic()))
        except Ended:
            self._children[self._children.index(builder)] = None
            for left, plain in reversed(list(builder.given.values())[1:]):
                self._queue.appendleft((left, plain))
            return
        del builder.given[next(iter(builder.given))]
        builder.deadline = time.monotonic() + self._seconds

    def _hand_out(self) -> None:
        for _ in range(_AT_ONCE):
            for place, builder in enumerate(self._children):
                if not self._queue:
                    return
                if builder is None:
                    builder = self._children[place] = self._started(place)
                if len(builder.given) >= _AT_ONCE:
                    continue
                candidate, plain = self._queue.popleft()
                if not builder.given:
                    builder.deadline = time.monotonic() + self._seconds
                builder.given[candidate.id] = candidate, plain
                builder.child.tell({"candidate": codec.candidate_to_plain(candidate), "workload": plain})

    def _started(self, place: int) -> _Builder:
        log = self._folder / f"builder-{place}.log"
        child = DriverChild(log, self._command, cached_in(self.cache))
        child.tell(self._opening)
        return _Builder(child)


class _Builder:
    """A child, and what it was given and has not answered, the oldest first."""

    def __init__(self, child: DriverChild) -> None:
        self.child = child
        self.given: dict[str, tuple[Candidate, Mapping[str, object]]] = {}
        self.deadline = 0.0  # of the oldest, by time.monotonic
