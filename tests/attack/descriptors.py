"""Descriptors that are no memfds, memfds that lie, and regions used when they are gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from tests.daemon.raw import Raw, packed

from .attack import Attack
from .bed import VICTIM, Bed
from .frames import HARMLESS, note

_NBYTES = 4 * VICTIM.n
_MFD_HUGETLB = 0x0004
_REGISTER, _UNREGISTER = "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"
_FUTURE_WRITE = 0x0010  # F_SEAL_FUTURE_WRITE, linux/fcntl.h


def memfd(size: int, seals: int = fcntl.F_SEAL_SHRINK, flags: int = os.MFD_ALLOW_SEALING) -> int:
    """A memfd of so many bytes; raises OSError where the machine has no such."""
    descriptor = os.memfd_create("attack", flags)
    try:
        os.ftruncate(descriptor, size)
        if seals:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def strange(rng: random.Random, folder: str) -> Iterator[tuple[int, str]]:
    """A descriptor that is no region, with its name."""
    with ExitStack() as held:
        makers = {
            "a pipe": lambda: _first(os.pipe(), held),
            "a socket": lambda: held.enter_context(socket.socket(socket.AF_UNIX)).fileno(),
            "a folder": lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY),
            "/dev/zero": lambda: os.open("/dev/zero", os.O_RDWR),
            "/dev/null": lambda: os.open("/dev/null", os.O_RDWR),
            "a file": lambda: os.open(folder, os.O_RDWR | os.O_TMPFILE),
            "an O_PATH": lambda: os.open(folder, os.O_PATH),
            "a memfd without seals": lambda: memfd(8192, 0),
            "a memfd that cannot be sealed": lambda: memfd(8192, 0, 0),
            "a memfd sealed for writing": lambda: memfd(8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
            "a memfd sealed for later writing": lambda: memfd(8192, fcntl.F_SEAL_SHRINK | _FUTURE_WRITE),
            "a read-only memfd": lambda: _read_only(held),
            "an empty memfd": lambda: memfd(0),
            "a memfd of huge pages": lambda: memfd(2 << 20, flags=os.MFD_ALLOW_SEALING | _MFD_HUGETLB),
            "a memfd of many huge pages": lambda: memfd(1 << 40, flags=os.MFD_ALLOW_SEALING | _MFD_HUGETLB),
            "a memfd of 4 EiB": lambda: memfd(1 << 62),
            "a memfd of 8 EiB": lambda: memfd(2**63 - 4096),
            "a memfd of 1 TiB": lambda: memfd(1 << 40),
            "a good memfd": lambda: memfd(8192),
        }
        name = rng.choice(list(makers))
        try:
            descriptor = makers[name]()
        except OSError:
            name, descriptor = "a good memfd", memfd(8192)
        if name != "a socket":
            held.callback(os.close, descriptor)
        yield descriptor, name


class Descriptors(Attack):
    """Registers what should not be registered, and misuses what was."""

    name = "descriptors"
    what = "no memfds, sparse and huge ones, seals that come later, regions gone or written meanwhile"

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        kinds: tuple[Callable[[Bed, Raw, random.Random], None], ...] = (
            self._strange,
            self._strange,
            self._strange,
            self._later,
            self._gone,
            self._many,
            self._unwanted,
        )
        kinds += (self._written,)
        turn = rng.randrange(len(kinds))
        while time.monotonic() < end:
            with bed.raw() as raw, contextlib.suppress(ConnectionError):
                kinds[turn % len(kinds)](bed, raw, rng)
            turn += 1

    def _call(self, bed: Bed, raw: Raw, label: str, method: str, params: Any, fds: Any = ()) -> str:
        bed.findings.offered(label, packed(1, method, params))
        message = raw.call(method, params, fds)
        note(bed, message, label)
        return "OK" if message[2] is None else str(message[2]["code"])

    def _infer(self, bed: Bed, raw: Raw, label: str, offset: int = 0, *, output: bool = False) -> str:
        place = {
            "shared_memory_region": "r",
            "shared_memory_offset": offset,
            "shared_memory_byte_size": _NBYTES,
        }
        x = np.zeros(VICTIM.n, np.float32)
        params = VICTIM.request("victim", x)
        if output:
            params["outputs"] = [{"name": "y", "parameters": place}]
        else:
            params["inputs"][0]["parameters"] = place
            params["raw_input_contents"] = []
        code = self._call(bed, raw, label, "ModelInfer", params)
        if code == "UNAVAILABLE":
            bed.findings.problem(
                f"UNAVAILABLE for {label}: the worker or the model suffers from a client's region"
            )
        return code

    def _strange(self, bed: Bed, raw: Raw, rng: random.Random) -> None:
        with strange(rng, str(bed.scratch)) as (descriptor, name):
            size = os.fstat(descriptor).st_size
            params: dict[str, Any] = {
                "name": "r",
                "offset": rng.choice((0, 0, 0, 4096, 1 << 40, size & ~4095, -4096, 2**62)),
                "byte_size": rng.choice((size, size, 4096, _NBYTES, 1 << 45, 2**63 - 1, 0, -1)),
            }
            label = f"{name}, offset {params['offset']}, size {params['byte_size']}"
            if self._call(bed, raw, label, _REGISTER, params, [descriptor]) == "OK":
                for output in (False, True):
                    last = params["byte_size"] - _NBYTES
                    self._infer(bed, raw, label, rng.choice((0, 0, max(0, last))), output=output)

    def _later(self, bed: Bed, raw: Raw, rng: random.Random) -> None:
        """Seals added, and shrinking tried, when it is registered; before or after the worker mapped it."""
        descriptor = memfd(8192)
        try:
            self._call(bed, raw, "a region", _REGISTER, {"name": "r", "byte_size": 8192}, [descriptor])
            if rng.random() < 0.5:
                self._infer(bed, raw, "a region")
            seal = rng.choice((fcntl.F_SEAL_WRITE, _FUTURE_WRITE, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL))
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seal)
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                bed.findings.problem("a registered memfd could be shrunk")
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 1 << 62)
            for output in (False, True):
                self._infer(bed, raw, f"a region sealed with {seal} later", output=output)
        finally:
            os.close(descriptor)

    def _gone(self, bed: Bed, raw: Raw, rng: random.Random) -> None:
        """Used after, and while, it is unregistered."""
        descriptor = memfd(8192)
        try:
            self._call(bed, raw, "a region", _REGISTER, {"name": "r", "byte_size": 8192}, [descriptor])
            self._infer(bed, raw, "a region")
        finally:
            os.close(descriptor)
        self._call(bed, raw, "unregister", _UNREGISTER, {"name": rng.choice(("r", ""))})
        if (code := self._infer(bed, raw, "a region that is gone")) != "NOT_FOUND":
            bed.findings.problem(f"a region that is gone gave {code}")

    def _many(self, bed: Bed, raw: Raw, rng: random.Random) -> None:
        """33 descriptors and more with one message, in one piece or several."""
        with ExitStack() as held:
            count = rng.choice((2, 32, 33, 64, 65, 100, 253))
            fds = [_closed_later(held, os.open("/dev/null", os.O_RDWR)) for _ in range(count)]
            params = {"name": "r", "byte_size": 4096}
            label = f"{count} descriptors"
            bed.findings.offered(label)
            data = packed(9, _REGISTER, params)
            pieces = rng.choice((1, 1, 3))
            step = -(-len(data) // pieces)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for at in range(0, len(data), step):
                    raw.send(data[at : at + step], fds)
            message = raw.read()
            if message is not None:
                note(bed, message, label)

    def _unwanted(self, bed: Bed, raw: Raw, rng: random.Random) -> None:
        """Descriptors with requests that want none, and none with those that want some."""
        method = rng.choice([name for name in HARMLESS if name != "ModelProfile"])
        with strange(rng, str(bed.scratch)) as (descriptor, name):
            label = f"{name} with {method}"
            self._call(bed, raw, label, method, HARMLESS[method], [descriptor] * rng.choice((1, 2, 32)))
            load = {"model_name": "nosuch", "files": ["m.honed"] * rng.choice((1, 1, 2, 3))}
            self._call(bed, raw, f"{name} as a model", "RepositoryModelLoad", load, [descriptor])
        self._call(bed, raw, "no descriptor", _REGISTER, {"name": "r", "byte_size": 4096})

    def _written(self, bed: Bed, raw: Raw, rng: random.Random) -> None:
        """Bytes change all the time while the region is read and written by inferences."""
        descriptor, done = memfd(8192), threading.Event()

        def write() -> None:
            while not done.is_set():
                os.pwrite(descriptor, os.urandom(_NBYTES), 0)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            self._call(bed, raw, "a region", _REGISTER, {"name": "r", "byte_size": 8192}, [descriptor])
            for _ in range(10):
                self._infer(bed, raw, "a region written meanwhile", output=rng.random() < 0.3)
        finally:
            done.set()
            writer.join()
            os.close(descriptor)


def _first(pair: tuple[int, int], held: ExitStack) -> int:
    held.callback(os.close, pair[1])
    return pair[0]


def _read_only(held: ExitStack) -> int:
    descriptor = _closed_later(held, memfd(8192))
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)


def _closed_later(held: ExitStack, descriptor: int) -> int:
    held.callback(os.close, descriptor)
    return descriptor
