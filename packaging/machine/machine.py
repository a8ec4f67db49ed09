"""An emulated arm64 machine: boots an image, runs lines of shell in it, carries files in and out, and ends.

Files travel as a tar archive on a disk of their own: the kernel of Debian's cloud images knows no file system
that could be shared with us.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

EXCHANGE_BYTES = 1 << 30
_UP = b"machine-test: up"
_DONE = re.compile(rb"machine-test: exit (\d+)\r?\n")  # after what may not end a line
_QEMU = (
    *("setpriv", "--pdeathsig", "KILL"),  # it does not outlive us
    *("qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a76", "-accel", "tcg,thread=multi"),
    *("-nic", "none", "-display", "none", "-no-reboot", "-device", "virtio-rng-pci"),
)


class MachineError(Exception):
    """The machine, or a command in it, did not do what it should."""


class CommandError(MachineError):
    """A command ended with another status than 0; `said` is what it said."""

    def __init__(self, command: str, status: int, said: str, told: bool) -> None:
        super().__init__(f"exit status {status} of: {command}" + ("" if told else f"\n{said}"))
        self.said = said


class Machine:
    """One machine on the disk `run`/disk.img; `boot` starts it, as often as it was powered off."""

    def __init__(self, run: Path, *, kernel: Path, initrd: Path, cores: int, memory_mib: int) -> None:
        self._run, self._kernel, self._initrd = run, kernel, initrd
        self._cores, self._memory_mib = cores, memory_mib
        self._qemu: subprocess.Popen[bytes] | None = None
        self._port: socket.socket | None = None
        self._left = b""
        self.console = run / "console"
        self.exchange = run / "exchange.img"
        self.started = 0.0  # time.monotonic() when it was switched on
        with self.exchange.open("wb") as file:
            file.truncate(EXCHANGE_BYTES)

    def boot(self, seconds: float) -> float:
        """Switch it on and wait for its agent; gives the seconds that took."""
        path = self._run / "port"
        path.unlink(missing_ok=True)
        self._left = b""
        command = [*_QEMU, "-smp", str(self._cores), "-m", str(self._memory_mib)]
        command += ["-kernel", str(self._kernel), "-initrd", str(self._initrd)]
        command += ["-append", "root=/dev/vda rw console=ttyAMA0 quiet"]
        for number, disk in enumerate((self._run / "disk.img", self.exchange)):
            command += ["-drive", f"file={disk},format=raw,if=none,id=disk{number},cache=unsafe"]
            command += ["-device", f"virtio-blk-pci,drive=disk{number}"]
        command += [
            "-device",
            "virtio-serial-pci",
            "-chardev",
            f"socket,id=port,path={path},server=on,wait=off",
        ]
        command += ["-device", "virtserialport,chardev=port,name=honed.test"]
        command += ["-serial", f"file:{self.console}", "-monitor", f"unix:{self._run}/monitor,server,nowait"]
        self.console.write_bytes(b"")
        self.started = time.monotonic()
        self._qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        end = self.started + seconds
        while self._port is None:
            self._check(end, "did not start")
            with contextlib.suppress(OSError):
                port = socket.socket(socket.AF_UNIX)
                port.connect(str(path))
                self._port = port
            time.sleep(0.05)
        while _UP not in self._left:
            self._receive(end, "did not come up")
        return time.monotonic() - self.started

    def run(self, command: str, seconds: float, hear: Callable[[str], None] | None = None) -> str:
        """What a line of shell says; raises MachineError where it fails. `hear` gets it as it comes."""
        assert self._port is not None
        # Said since the last command: by an agent that was started anew, or by what a test left running.
        while select.select([self._port], [], [], 0)[0]:
            self._receive(math.inf, "")
        self._left = b""
        self._port.sendall(command.encode() + b"\n")
        end = time.monotonic() + seconds
        heard = 0
        while (done := _DONE.search(self._left)) is None:
            if _UP in self._left:
                raise MachineError(f"the machine's agent was started anew during: {command}")
            whole = self._left.rfind(b"\n") + 1
            if hear is not None and whole > heard:
                hear(self._left[heard:whole].decode(errors="replace"))
                heard = whole
            self._receive(end, f"did not finish: {command}")
        said, self._left = self._left[: done.start()], self._left[done.end() :]
        if hear is not None and len(said) > heard:
            hear(said[heard:].decode(errors="replace"))
        text = said.decode(errors="replace").replace("\r\n", "\n")
        if int(done[1]):
            raise CommandError(command, int(done[1]), text, told=hear is not None)
        return text

    def put(self, files: Iterable[tuple[Path, str]], folder: str, seconds: float = 300) -> None:
        """Copy files or folders into `folder` of the machine, each under the name given."""
        with self.exchange.open("r+b") as disk, tarfile.open(fileobj=disk, mode="w|") as archive:
            for path, name in files:
                archive.add(path, name)
        os.sync()
        self.run(
            f"blockdev --flushbufs /dev/vdb && mkdir -p {folder} && tar -xf /dev/vdb -C {folder}", seconds
        )

    def get(self, folder: str, into: Path, seconds: float = 300) -> None:
        """Copy the contents of a folder of the machine."""
        self.run(f"tar -cf /dev/vdb -C {folder} . && sync && blockdev --flushbufs /dev/vdb", seconds)
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        with tarfile.open(self.exchange) as archive:
            archive.extractall(into, filter="data")

    def said(self, wanted: str, seconds: float) -> float:
        """Wait for a text on the console; gives the time, as time.monotonic(), when it was seen."""
        end = time.monotonic() + seconds
        while wanted.encode() not in self.console.read_bytes():
            self._check(end, f"did not say {wanted!r}")
            time.sleep(0.02)
        return time.monotonic()

    def power_off(self, seconds: float = 120) -> None:
        """Shut it down in order, or not at all: raises MachineError where it does not end."""
        assert self._qemu is not None
        assert self._port is not None
        self._port.sendall(b"systemctl poweroff\n")
        try:
            self._qemu.wait(seconds)
        except subprocess.TimeoutExpired:
            raise MachineError("the machine does not power off") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Switch it off as it stands."""
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
            self._qemu = None

    def _receive(self, end: float, otherwise: str) -> None:
        assert self._port is not None
        if select.select([self._port], [], [], 1.0)[0]:
            self._left += self._port.recv(65536)
        self._check(end, otherwise)

    def _check(self, end: float, otherwise: str) -> None:
        assert self._qemu is not None
        if self._qemu.poll() is None and time.monotonic() < end:
            return
        sys.stderr.write(self.console.read_bytes()[-4000:].decode(errors="replace"))
        raise MachineError(f"the machine {'ended' if self._qemu.poll() is not None else otherwise}")
