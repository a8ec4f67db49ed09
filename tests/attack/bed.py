"""Where attacks take place: a real daemon with small models, an honest client, a meter, a small disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from honed.runtime.errors import HonedError
from tests.daemon import spin
from tests.daemon.raw import Raw
from tests.daemon.running import Service, start, wait_for

from . import users
from .aside import Aside
from .attack import Findings
from .material.models import Victim, wide

CONFIG = """
[limits]
run_seconds = 10.0
max_queue = 256
stop_seconds = 2.0
[idle]
enabled = false
[tuner]
spawn = false
"""
HONEST = (Victim(16, 1), Victim(1000, 50))
VICTIM = Victim(8, 3)  # what attacks ask for, and what they alter
SPARE = Victim(32, 9)  # what may be damaged
SPIN_TURNS = 30_000  # of the slow model's loop: some milliseconds
DISK_MIB = 300
_STOP_SECONDS = 10.0
TOKEN = "HONED_ATTACK"  # in the environment of all processes of a bed
_CLOCK = Path(__file__).parents[1] / "daemon" / "clock.c"


class Bed:
    """A running service and those around it. `known` are the models that must be there, by name."""

    def __init__(self, kept: Path | None = None) -> None:
        """`kept` is a folder for what later beds need not make again: the daemon's cache, the models."""
        self.folder = Path(tempfile.mkdtemp(prefix="attack-"))
        self.folder.chmod(0o711)
        self.kept = kept or self.folder
        self.root = os.getuid() == 0
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        self.scratch = self.folder / "scratch"
        self.scratch.mkdir()
        self.mounted = self.root and _mount(self.disk)
        self.clock = self.folder / "clock"
        self.findings = Findings()
        self.known: dict[str, Victim] = {}
        self.token = f"{os.getpid()}-{time.time_ns()}"
        self.others_ms = self.victim_ms = 0.0  # one inference of the slow model, and of the victim
        self.honest: Aside
        self.meter: Aside
        self.service: Service

    def open(self) -> None:
        """Start everything."""
        made = self.kept / "models"
        if made.is_dir():
            shutil.copytree(made, self.disk / "state")
        self.service = start(
            self.disk / "state",
            self.kept / "cache",
            config=CONFIG,
            environment={TOKEN: self.token, **self._clock_environment()},
            prefix=self._prefix(),
        )
        self.service.socket.parent.chmod(0o711)
        self._add_models(there=made.is_dir())
        if not made.is_dir():
            shutil.copytree(self.state, made)
        sizes = ",".join(f"{victim.n}:{victim.k}" for victim in HONEST)
        self.meter = Aside("meter", str(self.service.socket), str(users.METER))
        self.honest = Aside("honest", str(self.service.socket), str(users.HONEST), sizes)

    def close(self) -> None:
        """End everything, also what should have ended by itself."""
        for name in ("honest", "meter"):
            if hasattr(self, name):
                getattr(self, name).close()
        if hasattr(self, "service"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.service.process.terminate()
                self.service.process.wait(_STOP_SECONDS)
            self.service.process.kill()
            self.service.stop()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.disk)], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def configure(self, text: str = CONFIG) -> None:
        """The configuration that counts from the next start, or reload, on."""
        (self.service.socket.parent / "honed.toml").write_text(text)

    @property
    def state(self) -> Path:
        """The daemon's state folder."""
        return self.service.state

    @property
    def pid(self) -> int:
        """The daemon's."""
        return self.service.process.pid

    def raw(self, uid: int = users.ROOT) -> Raw:
        """A connection without manners, of some user."""
        return users.raw(self.service.socket, uid)

    def client(self, uid: int = users.ROOT, timeout: float = 60.0) -> users.UserClient:
        """A connection with manners."""
        return users.UserClient(self.service.socket, uid, timeout=timeout)

    def alive(self) -> bool:
        """Whether the daemon's process is there."""
        return self.service.process.poll() is None

    def restart(self) -> None:
        """Start the daemon again, which has ended, and wait until all models are served."""
        self.service.restart()
        self.ready()

    def ready(self) -> None:
        """Wait until the daemon has all models."""
        self.service.wait_listening()
        self.service.wait_ready()

    def stop(self) -> None:
        """End the daemon as systemd does; raises where it does not end."""
        if self.alive():
            self.service.process.terminate()
        self.service.process.wait(60)

    def add(self, name: str, victim: Victim, *, replace: bool = False) -> None:
        """Add a model; from the service's acknowledgement on it must be found again."""
        path = victim.write(self.scratch / f"{name}.honed")
        with self.client() as client:
            client.add(path, name=name, replace=replace)
        self.known[name] = victim

    def remove(self, name: str) -> None:
        """Remove a model."""
        with self.client() as client:
            client.remove(name)
        self.known.pop(name, None)

    def processes(self) -> list[psutil.Process]:
        """All of this bed's daemons, dead or alive, with their children: they have its token."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(TOKEN) == self.token:
                    found.append(process)
        return found

    def descriptors(self) -> Counter[str]:
        """Open ones of the daemon, by kind or path."""
        found: Counter[str] = Counter()
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = os.readlink(f"/proc/{self.pid}/fd/{name}").split(":[")[0]
                if not target.startswith(("/proc/", "/sys/")):  # which the service reads now and then
                    found[target] += 1
        return found

    def set_clock(self, ahead: int) -> None:
        """Seconds that the daemon's wall clock is ahead."""
        with self.clock.open("r+b" if self.clock.exists() else "wb", buffering=0) as file:
            file.write(ahead.to_bytes(8, sys.byteorder, signed=True))

    @contextmanager
    def written(self, name: str, data: bytes) -> Iterator[Path]:
        """A file in the scratch folder for a while."""
        path = self.scratch / name
        path.write_bytes(data)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _add_models(self, *, there: bool) -> None:
        """Those that attacks use, unless they are there."""
        models = {"victim": VICTIM, "spare": SPARE}
        models |= {f"honest-{number}": victim for number, victim in enumerate(HONEST)}
        for name, victim in models.items():
            if not there:
                self.add(name, victim)
            self.known[name] = victim
        with self.client() as client:
            if not there:
                client.add(wide(self.scratch / "wide.honed"), name="wide")
                client.add(spin.write(self.scratch / "spin.honed", SPIN_TURNS), name="spin")
            x = np.zeros(VICTIM.n, np.float32)
            self.others_ms = _usual_ms(lambda: client.infer("spin", {"x": spin.X}))
            self.victim_ms = _usual_ms(lambda: client.infer("victim", {"x": x}))

    def _prefix(self) -> tuple[str, ...]:
        """As root: the daemon in a mount namespace whose /etc/group has the groups of honed."""
        if not self.root:
            return ()
        command = users.with_groups(self.folder)
        self.root = bool(command)  # not in a container without that right: all clients are root
        return command

    def _clock_environment(self) -> dict[str, str]:
        shim = self.folder / "clock.so"
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(shim), str(_CLOCK), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        self.set_clock(0)
        return {"LD_PRELOAD": str(shim), "HONED_TEST_CLOCK": str(self.clock)}


def _mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "attack", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _usual_ms(call: Callable[[], object]) -> float:
    """What a call takes where nothing else runs: the quickest of some."""
    taken = []
    for _ in range(15):
        begun = time.monotonic()
        call()
        taken.append((time.monotonic() - begun) * 1e3)
    return min(taken)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether a condition became true in time."""
    try:
        wait_for(condition, "", seconds=seconds)
    except AssertionError:
        return False
    return True


def quietly(call: Callable[[], object]) -> None:
    """Call something whose failure is expected."""
    with contextlib.suppress(HonedError, OSError, AssertionError):
        call()
