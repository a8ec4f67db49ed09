"""Starts and watches real daemons."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from honed.runtime import Client
from honed.runtime.errors import HonedError

T = TypeVar("T")
Made = Callable[[str, Callable[[Path], object]], Path]  # the fixture `made_once`
NO_TUNER = "\n[tuner]\nspawn = false\n"
# Idle as soon as nobody asks, whatever else the machine does.
IDLE = """
[idle]
quiet_seconds = 0.2
settle_seconds = 0
max_pressure_percent = 1000
max_load_per_core = 1000
max_gpu_percent = 100
max_temperature_c = 1000
on_battery = true
"""
# A `patch` of `start`. Times are real, and what is concluded from them is given: what is new is as fast.
ALL_HOLDS = """
from honed.runtime import engines

engines.PairedTiming.within_allowance = property(lambda self: True)
engines.can_compiled_serve = lambda *_, **__: True
"""
COMPILED_ONLY = '\n[serve]\nengine = "gpu"\n'
PATIENCE = 15.0  # seconds that a test waits for what is done in the background, beside others
DEADLINE = 240.0  # seconds after which a test gives up; nothing waits so long but what hangs


class Service:
    """A daemon's process and places."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], socket: Path, state: Path, folder: Path
    ) -> None:
        """Starts it; its configuration is the file honed.toml in `folder`, which is removed at the end."""
        self.socket = socket
        self.state = state
        self.log_file = folder / "log"
        self._folder = folder
        self._command = tuple(command)
        self._environment = dict(environment)
        self.process: subprocess.Popen[bytes]
        self._start()

    def hasten(self) -> None:
        """Give what is done in the background as much of the processors as tests have, where permitted."""
        with contextlib.suppress(psutil.Error):  # the service has ended
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.nice(psutil.Process().nice())

    def children(self, word: str) -> list[psutil.Process]:
        """Its processes, and theirs, with this word in the command line; one may end at any time."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended just now
                if word in child.cmdline():
                    found.append(child)
        return found

    def restart(self) -> None:
        """Start it anew, after `kill`."""
        assert self.process.poll() is not None, "it still runs, and would keep its place"
        self._start()

    def _start(self) -> None:
        with self.log_file.open("ab") as stream:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stderr=stream
            )

    def configure(self, text: str) -> None:
        """Another configuration, read at once."""
        self.write_configuration(text)
        with self.client() as client:
            client.reload_config()

    def write_configuration(self, text: str) -> None:
        """What counts from the next start, or reload, on."""
        (self._folder / "honed.toml").write_text(_served_compiled(text))

    def answers(self) -> bool:
        """Whether it does."""
        with contextlib.suppress(HonedError), self.client() as client:
            return client.live()
        return False

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def worker(self) -> psutil.Process | None:
        """The serving worker's process, once there is one. Beside it another may build kernels."""
        with contextlib.suppress(HonedError, psutil.Error), self.client() as client:
            if pid := client.status()["worker"]["pid"]:
                return psutil.Process(pid)
        return None

    def client(self, **options: Any) -> Client:
        """A client of it."""
        return Client(self.socket, **options)

    def wait_ready(self) -> None:
        """Until the worker is up and every model is loaded."""
        with self.client() as client:
            wait_for(lambda: self._alive() and client.ready(), "the service to be ready", self)

    def wait_listening(self) -> None:
        wait_for(lambda: self._alive() and self.answers(), "the service to listen", self)

    def kill(self) -> None:
        """As a power cut would: SIGKILL to the daemon alone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Tell it to stop and give its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _alive(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.log}")
        return True


def state_with(made_once: Made, small_model: Path, cache: Path) -> Path:
    """The state folder of a daemon to which the small model was added, as "small".

    A daemon that starts from a copy loads the model, which takes two processes less than adding it.
    """

    def make(state: Path) -> None:
        service = start(state, cache)
        try:
            with service.client() as client:
                client.add(small_model, name="small")
        finally:
            service.stop()

    return made_once("state-with-small", make)


@contextlib.contextmanager
def serving(
    folders: pytest.TempPathFactory, cache: Path, *, stored: Path | None = None, **options: Any
) -> Iterator[Service]:
    """A daemon with a state folder of its own, stopped at the end; `options` are those of `start`.

    The folder is a copy of `stored`, if that is given.
    """
    state = folders.mktemp("state")
    if stored is not None:
        shutil.copytree(stored, state, dirs_exist_ok=True)
    service = start(state, cache, **options)
    try:
        yield service
    finally:
        service.stop()


def start(
    state: Path,
    cache: Path,
    *,
    config: str = "",
    environment: Mapping[str, str] | None = None,
    socket: Path | None = None,
    wait: bool = True,
    prefix: tuple[str, ...] = (),
    patch: str = "",
) -> Service:
    """Start a daemon and wait until it is ready. `config` is the text of its configuration file.

    `patch` is Python that the service's own process runs before anything else, not its workers.
    """
    folder = Path(tempfile.mkdtemp(prefix="honed-"))  # a short path: sockets allow 107 bytes
    if patch:
        text = 'import sys\n\nif "honed.daemon.service" in sys.orig_argv:\n' + textwrap.indent(patch, "    ")
        (folder / "sitecustomize.py").write_text(text)
        given = {**os.environ, **(environment or {})}.get("PYTHONPATH", "")
        path = os.pathsep.join(filter(None, (str(folder), given)))
        environment = {**(environment or {}), "PYTHONPATH": path}
    config_file = folder / "honed.toml"
    config_file.write_text(_quiet(config))
    socket = socket or folder / "s"
    command = [
        *prefix,
        sys.executable,
        "-m",
        "honed.daemon.service",
        f"--socket={socket}",
        f"--state-dir={state}",
    ]
    command += [f"--cache-dir={cache}", f"--config={config_file}"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HONED_", "XDG_"))}
    service = Service(command, {**kept, **(environment or {})}, socket, state, folder)
    if wait:
        try:
            service.wait_listening()
            service.wait_ready()
        except BaseException:
            service.stop()
            raise
    return service


def _quiet(config: str) -> str:
    """Tests that tune, or that have the CPU engine serve, say so: everything else is quicker without."""
    config = config if "[tuner]" in config else config + NO_TUNER
    return _served_compiled(config)


def _served_compiled(config: str) -> str:
    return config if "[serve]" in config else config + COMPILED_ONLY


def wait_for(
    condition: Callable[[], T], what: str, service: Service | None = None, *, seconds: float = DEADLINE
) -> T:
    """Wait until the condition holds, and return what it gave; fail with the daemon's log if it does not.

    It asks the less often the longer it waits, and is at most a tenth late: asking costs both sides time.
    What a service does in the background has a high niceness, and would not go on where others keep the
    machine busy: after PATIENCE seconds it is given the niceness of tests.
    """
    begin = time.monotonic()
    while not (given := condition()):
        waited = time.monotonic() - begin
        if service is not None and waited > PATIENCE:
            service.hasten()
        if waited > seconds:
            raise AssertionError(f"waited in vain for {what}\n{service.log if service else ''}")
        time.sleep(min(max(0.01, waited / 10), 0.5))
    return given


def has_ended(process: psutil.Process) -> bool:
    """Whether it has, though nobody may have asked for its exit status."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # in between
        return True


def wait_for_end(pid: int) -> None:
    """Until the process of that number has ended, if it has not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        wait_for(lambda: has_ended(process), f"process {pid} to end")


def memory(pid: int) -> int:
    """Bytes of a process's own memory, wherever the machine keeps it."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(rows[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))


def descriptors(pid: int) -> int:
    """Open descriptors of a process, without files of the kernel, which the service reads now and then."""
    return sum(not target.startswith(("/proc/", "/sys/")) for target in _targets(pid))


def _targets(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{name}")
