"""The machine around the service: its clock is set, its disk is full or read-only; and all is well again."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Iterator

from honed.runtime.errors import HonedError

from .attack import Attack
from .bed import Bed
from .material.models import Victim

_STEPS = (3600, -3600, 86_400, -86_400, 30 * 86_400, 5 * 365 * 86_400, -20 * 365 * 86_400, 80 * 365 * 86_400)
_NAME = "during"
_REFUSED = {"RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE"}


class Clock(Attack):
    """The wall clock steps while models are added, asked and looked at."""

    name = "clock-steps"
    what = "the wall clock jumps by hours, days, years, ahead and back"

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        if not bed.clock.exists():
            bed.findings.left_out = "needs a C compiler"
            return
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                step = rng.choice(_STEPS)
                bed.findings.offered(f"the clock by {step} s")
                bed.set_clock(step)
                _used(bed, rng)
                time.sleep(0.1)
        finally:
            bed.set_clock(0)
        _used(bed, rng)


class FullDisk(Attack):
    """No byte is left on the disk of the state folder."""

    name = "full-disk"
    what = "the state folder's disk is full while models are added, removed and asked, and has room again"
    needs_root = True
    least_seconds = 3.0

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        if not bed.mounted:
            bed.findings.left_out = "needs a tmpfs of its own"
            return
        end = time.monotonic() + seconds
        filler = bed.disk / "filler"
        while True:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(256))
            try:
                _refused(bed, rng, "a full disk")
            finally:
                filler.unlink()
            _recovered(bed, rng)
            if time.monotonic() > end:
                return


class ReadOnlyDisk(Attack):
    """The disk of the state folder cannot be written."""

    name = "read-only-disk"
    what = "the state folder's disk is remounted read-only while models are added, removed and asked"
    allowed = frozenset({"UNAVAILABLE"})
    needs_root = True
    restarts = True
    least_seconds = 3.0

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        if not bed.mounted:
            bed.findings.left_out = "needs a tmpfs of its own"
            return
        end = time.monotonic() + seconds
        with self._lock_elsewhere(bed):
            while True:
                self._mounted(bed, "ro")
                try:
                    _refused(bed, rng, "a read-only disk")
                finally:
                    self._mounted(bed, "rw")
                _recovered(bed, rng)
                if time.monotonic() > end:
                    return

    @contextlib.contextmanager
    def _lock_elsewhere(self, bed: Bed) -> Iterator[None]:
        """The lock is open for writing all the time, which keeps its disk writable: it lies on another."""
        lock, other = bed.state / "lock", bed.folder / "lock"
        bed.stop()
        other.touch()
        subprocess.run(["mount", "--bind", str(other), str(lock)], check=True)
        try:
            bed.restart()
            yield
        finally:
            if bed.alive():
                bed.stop()
            subprocess.run(["umount", str(lock)], check=True)
            bed.restart()

    def _mounted(self, bed: Bed, how: str) -> None:
        """A file that is being written keeps it busy for a moment."""
        for _ in range(50):
            done = subprocess.run(
                ["mount", "-o", f"remount,{how}", str(bed.disk)], check=False, capture_output=True
            )
            if done.returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"the disk cannot be remounted {how}: {done.stderr.decode()}")


def _used(bed: Bed, rng: random.Random) -> None:
    """Everything that tells times, and a model that comes and goes."""
    with bed.client() as client:
        client.status(), client.metrics(), client.openmetrics(), client.statistics(), client.history("victim")
        victim = Victim(rng.randrange(4, 500), rng.randrange(100))
        with contextlib.suppress(HonedError):
            client.remove(_NAME)
        client.add(victim.write(bed.scratch / "during.honed"), name=_NAME)
        client.add(victim.write(bed.scratch / "during.honed"), name=_NAME, replace=True)
        client.remove(_NAME)


def _refused(bed: Bed, rng: random.Random, what: str) -> None:
    """Changes are refused with a reason, or made; what was refused is as it was."""
    victim = Victim(rng.randrange(20_000, 60_000), rng.randrange(100))
    path = victim.write(bed.scratch / "during.honed")
    with bed.client() as client:
        for _ in range(2):
            bed.findings.offered(f"an addition on {what}")
            try:
                client.add(path, name=_NAME)
            except HonedError as error:
                bed.findings.answered({"code": error.code, "message": str(error)}, f"an addition on {what}")
                if error.code not in _REFUSED:
                    bed.findings.problem(f"{error.code} for an addition on {what}: {error}")
            else:
                bed.known[_NAME] = victim
                break
        bed.findings.offered(f"a removal on {what}")
        try:
            client.remove("spare")
        except HonedError as error:
            bed.findings.answered({"code": error.code, "message": str(error)}, f"a removal on {what}")
            there = {model["name"]: model["state"] for model in client.models()}
            if there.get("spare") != "READY":
                now = there.get("spare", "gone")
                bed.findings.problem(
                    f"a removal on {what} was refused ({error.code}), and the model is {now}"
                )
        else:
            bed.known.pop("spare", None)
        bed.findings.offered(f"looking on {what}")
        client.status(), client.metrics(), client.config(), client.history("victim")
    time.sleep(0.2)


def _recovered(bed: Bed, rng: random.Random) -> None:
    """With room again everything works."""
    bed.findings.offered("afterwards")
    with bed.client() as client:
        there = {model["name"] for model in client.models()}
    if _NAME in there:
        bed.remove(_NAME)
    if "spare" in there:
        bed.remove("spare")
    bed.known.pop("spare", None)
    bed.add("spare", Victim(32, rng.randrange(100)))
