"""Runs Mesa's compilers for Valhall, each in its own root, which `benchmarks/valhall/build` makes."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from honed.protocol.errors import DeviceError
from honed.tuner.lower import DOT, DOT_ADD

# Keyed by version of Mesa. All roots but the first are arm64, and emulated.
ROOTS = {
    "25.0": Path("/var/cache/honed-valhall"),
    "26.1": Path("/var/cache/honed-valhall-26.1"),
    "26.2": Path("/var/cache/honed-valhall-26.2"),
}
ROOT = ROOTS["25.0"]
SECONDS = 60  # CPU seconds for one program
_DEADLINE = 5.0 * SECONDS  # Limit for a program that waits, or shares the machine
_SERVER = "/root/server"
_EMULATOR = "/usr/bin/qemu-aarch64-static"
_START_SECONDS = 600.0  # Emulated, the start takes 43 s of processor time
_ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "RUSTICL_ENABLE": "panfrost",
    "RUSTICL_FEATURES": "fp16",
    "PAN_GPU_ID": "a867",  # Mali-G610, as Mesa's own tables have it
    "BIFROST_MESA_DEBUG": "shaders,shaderdb",
    "MESA_SHADER_CACHE_DISABLE": "true",
    "SECONDS": str(SECONDS),
}

# Mesa writes dot products of bytes out, where Arm's compiler has an instruction (IDP) with three operands and
# one result. A multiply-add of floats replaces it, of the same pipe and rate: clpeak has 1,882 GOP/s on this
# chip, 92 % of eight operations a lane and clock, as 470 GFLOP/s are of two. Its result is meaningless.
_DOTS = (
    f"#define {DOT_ADD}(a, b, c) as_int(fma(as_float(a), as_float(b), as_float(c)))\n"
    f"#define {DOT}(a, b) as_int(as_float(a) * as_float(b))"
)


@dataclass(frozen=True, slots=True)
class Dump:
    """The compiler's output for one program: its intermediate forms and machine code, and its totals."""

    code: str
    stats: str


class OfflineCompileFailed(Exception):
    """Raised when the compiler refuses a program, crashes on it, or takes too long; the text says which."""


class OfflineCompiler:
    """A pool of `jobs` servers in the root, each building one program at a time; a context manager.

    A program that takes too long or crashes ends its server, and the next program gets a new one.
    """

    def __init__(self, root: Path = ROOT, jobs: int | None = None) -> None:
        """Start the pool; raise DeviceError if the compiler has not been made, or this is not root."""
        if not (root / _SERVER.lstrip("/")).exists():
            version = next((name for name, known in ROOTS.items() if known == root), "25.0")
            options = "" if version == "25.0" else f"--mesa {version} "
            command = f"benchmarks/valhall/build {options}{root}"
            raise DeviceError(f"the offline compiler is not in {root}; make it with `{command}`")
        if os.geteuid() != 0:
            raise DeviceError(f"the offline compiler in {root} runs in a root of its own; run this as root")
        self._root = root
        count = jobs or os.cpu_count() or 1
        self._folder = tempfile.TemporaryDirectory(prefix="kernels-", dir=root / "work")
        self._pool = ThreadPoolExecutor(count, "valhall")
        self._free: queue.SimpleQueue[_Server | None] = queue.SimpleQueue()
        self._servers: list[_Server] = []
        for _ in range(count):
            self._free.put(None)
        self._count = 0

    def __enter__(self) -> OfflineCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers, with what they are building."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.close()
        self._pool.shutdown()
        self._folder.cleanup()

    def build(self, source: str) -> Future[Dump]:
        """Return a future of a program's dump; its exception is OfflineCompileFailed if there is none."""
        self._count += 1
        return self._pool.submit(self._build, Path(self._folder.name) / f"{self._count}.cl", source)

    def _build(self, path: Path, source: str) -> Dump:
        server = self._free.get()
        try:
            if server is None:
                server = _Server(self._root)
                self._servers.append(server)
            path.write_text(f"{_DOTS}\n{source}")
            status = server.build(f"/{path.relative_to(self._root)}")
        except (OSError, DeviceError, OfflineCompileFailed):
            server = None
            raise
        finally:
            self._free.put(server)
        written = (path.with_name(path.name + end) for end in (".dump", ".stats"))
        dump = Dump(*(each.read_text(errors="replace") if each.exists() else "" for each in written))
        for end in ("", ".dump", ".stats"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        if status != "built":
            log = " ".join(dump.stats.split())[-300:]
            raise OfflineCompileFailed(f"the compiler {status}{f': {log}' if log else ''}")
        return dump


class _Server:
    """A process of `benchmarks/valhall/server.c`."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            _command(root),
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is meant for the parent
        )
        if self._line(_START_SECONDS) is None:
            self.close()
            raise _compiler_lost()

    def build(self, path: str) -> str:
        """Build a file, and return the server's word for how that ended.

        Raises OfflineCompileFailed, and ends the server, if it crashes or does not end in time.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path}\n".encode())
        self._process.stdin.flush()
        try:
            status = self._line(_DEADLINE)
        except DeviceError:
            if self._process.returncode < 0:
                by = signal.strsignal(-self._process.returncode)
                raise OfflineCompileFailed(f"the compiler was ended by {by}") from None
            raise
        if status is None:
            self.close()
            raise OfflineCompileFailed(f"the compiler did not end within {_DEADLINE:g} seconds")
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self, seconds: float) -> str | None:
        """Return the server's next line; None if none arrives within `seconds`.

        The server writes one at a time. Raises DeviceError if it has ended.
        """
        stream = self._process.stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], seconds)
        if not ready:
            return None
        line = stream.readline()
        if not line:
            self._process.wait()
            raise _compiler_lost()
        return line.decode(errors="replace").strip()


def _command(root: Path) -> list[str]:
    emulator = [_EMULATOR] if (root / _EMULATOR.lstrip("/")).exists() else []
    return ["chroot", str(root), *emulator, _SERVER]


def _compiler_lost() -> DeviceError:
    return DeviceError("the offline compiler ended or hangs; make it again with benchmarks/valhall/build")
