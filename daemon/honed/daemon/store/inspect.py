"""Has compiled files read by a child process (see `inspector`), and survives whatever they do to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.settings.schema import INSPECTION_MIB, INSPECTIONS
from honed.machine.aiochildren import spawn
from honed.machine.children import Bounds, kill_group, python
from honed.protocol import strict, wire
from honed.protocol.decoder import Decoder
from honed.protocol.errors import HonedError, Internal, ModelFileError, Unavailable, error_from_map

from .compiled import Compiled
from .inspector import ANSWER

SECONDS = 120.0  # 2 GiB, from a slow card
_CHUNK = 128 << 10  # bytes
_ATTEMPTS = 2  # where somebody ends the process


class Inspector:
    """Reads so many files at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(INSPECTIONS)

    async def inspect(self, path: Path) -> Compiled:
        """What a compiled file says, every byte of it checked; raises ModelFileError or NotFound."""
        async with self._places:
            [(_, found)] = [answer async for answer in inspect_all([path])]
        if isinstance(found, HonedError):
            raise found
        return found


async def inspect_all(
    paths: Sequence[Path], seconds: float = SECONDS
) -> AsyncIterator[tuple[Path, Compiled | HonedError]]:
    """Several files one after the other, each with what it says or what is wrong with it.

    A file may take `seconds`. One that ends the child is at fault itself, unless somebody else ended it; the
    others are read in the next child.
    """
    done, interrupted = 0, 0
    while done < len(paths):
        async for found in _one_child(paths[done:], seconds):
            if isinstance(found, Unavailable) and interrupted < _ATTEMPTS:
                interrupted += 1
                break
            yield paths[done], found
            done, interrupted = done + 1, 0


async def _one_child(paths: Sequence[Path], seconds: float) -> AsyncIterator[Compiled | HonedError]:
    """Answers for the first of `paths`, at least one."""
    program = python("honed.daemon.store.inspector", *map(str, paths))
    process = await spawn(program, Bounds(memory_mib=INSPECTION_MIB), stdout=True)
    assert process.stdout is not None
    decoder = Decoder(ANSWER)
    answered = 0
    try:
        while answered < len(paths):
            try:
                async with asyncio.timeout(seconds):
                    message = await _next(process.stdout, decoder)
            except TimeoutError:
                yield ModelFileError(f"{paths[answered]} takes longer than {seconds:g} s to read")
                return
            if message is None:
                kill_group(process.pid)
                death = await process.wait()
                ended = f"{paths[answered]} cannot be read, the process that tried: {death}"
                yield Unavailable(ended) if death.from_outside else ModelFileError(ended)
                return
            yield await in_thread(_found, message)
            answered += 1
    finally:
        await process.end()


async def _next(stream: asyncio.StreamReader, decoder: Decoder) -> wire.Message | None:
    """The next message of a child; None where it has ended, or says what is none."""
    with suppress(wire.PeerFault):
        while (message := decoder.next_message()) is None:
            data = await stream.read(_CHUNK)
            if not data:
                return None
            decoder.feed(data)
        return message
    return None


def _found(message: wire.Message) -> Compiled | HonedError:
    if not isinstance(message, wire.Response):
        return Internal("the process that reads compiled files gave no answer")
    if message.error is not None:
        return error_from_map(message.error)
    try:
        return strict.from_plain(Compiled, message.result, where="compiled")
    except strict.Mismatch as error:
        return Internal(f"the process that reads compiled files said what it should not: {error}")
