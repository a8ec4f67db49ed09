"""Takes in the files that a user brings, which may be on a file system of his own making and never end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from honed.daemon.blocking import in_thread
from honed.daemon.changes.compilation import Staged, is_compiled
from honed.daemon.store.files import StoredFile, receive
from honed.protocol.errors import Busy, DeadlineExceeded, InvalidArgument, PermissionDenied
from honed.protocol.params import BringOptions, BringParams

_MAX_READING = 2  # files of one user that are being read: one, and one that was given up
_Received = tuple[StoredFile, Path]


class Receiver:
    """Reads users' files, each in a thread of its own, which holds up nothing else."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: what reading the files of one model may take."""
        self._seconds = seconds
        self._reading: Counter[int] = Counter()  # by user

    async def receive(
        self, params: BringParams, descriptors: Sequence[int], folder: Path, user: int, limit: int
    ) -> Staged:
        """The files of a user's own model, of `limit` bytes at most, which must be what the user says.

        Raises InvalidArgument where they are not, PermissionDenied for a compiled file, ResourceExhausted
        where they are larger, and DeadlineExceeded.
        """
        options = params.parameters or BringOptions()
        files: list[_Received] = []
        try:
            async with asyncio.timeout(self._seconds):
                for name, sha256, descriptor in zip(params.files, params.sha256, descriptors, strict=True):
                    file, path = await self._read(user, descriptor, name, folder / "given", limit)
                    if file.sha256 != sha256:
                        raise InvalidArgument(
                            f"the SHA-256 of {name[:80]!r} is {file.sha256} and not {sha256}; "
                            "send what the file holds"
                        )
                    limit -= file.nbytes
                    files.append((file, path))
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"reading the files took longer than {self._seconds:g} s; copy them to a local disk"
            ) from error
        if await in_thread(is_compiled, files[0][1]):
            raise PermissionDenied(
                "compiled files are taken from administrators only (hone add); bring the ONNX file"
            )
        return Staged(
            folder=folder,
            sources=tuple(files),
            given=files[0][1],
            shapes=dict(options.shapes or {}),
            precision=options.precision or "auto",
            device=None,
            owner=user,
        )

    async def _read(self, user: int, descriptor: int, name: str, folder: Path, limit: int) -> _Received:
        """As `received.receive`; where this is cancelled the thread ends when the file lets it."""
        if self._reading[user] >= _MAX_READING:
            raise Busy("files that you brought before are still being read; let them end first")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_Received] = loop.create_future()
        copy = os.dup(descriptor)

        def ended(found: _Received | None, error: Exception | None) -> None:
            self._reading[user] -= 1
            if not self._reading[user]:
                del self._reading[user]
            if result.done():
                return
            if found is not None:
                result.set_result(found)
            elif error is not None:
                result.set_exception(error)

        def read() -> None:
            found: _Received | None = None
            failure: Exception | None = None
            try:
                found = receive(copy, name, folder, limit)
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                failure = error
            finally:
                os.close(copy)
            _tell(loop, ended, found, failure)

        self._reading[user] += 1
        threading.Thread(target=read, daemon=True, name=f"file of user {user}").start()
        return await result


def _tell(
    loop: asyncio.AbstractEventLoop,
    ended: Callable[[_Received | None, Exception | None], None],
    found: _Received | None,
    failure: Exception | None,
) -> None:
    if not loop.is_closed():  # else the service ended meanwhile
        loop.call_soon_threadsafe(ended, found, failure)
