"""Reads model files in a child process (see `inspector`), so that a malicious one cannot harm the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from honed.daemon.aio import in_thread
from honed.daemon.settings.schema import INSPECTION_MIB, INSPECTIONS
from honed.process import aio
from honed.process.children import ResourceLimits, kill_group, python
from honed.protocol import strict
from honed.protocol.errors import HonedError, Internal, ModelFileError, Unavailable

from .compiled import CompiledFileInfo
from .declared import Declared
from .inspector import ANSWER, Inspect, InspectSource

SECONDS = 120.0  # Limit for a file: 2 GiB from a slow card
_ATTEMPTS = 2  # Retries if the process is ended from outside


class Inspector:
    """An inspector of model files, which reads a limited number at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(INSPECTIONS)

    async def inspect(self, path: Path) -> CompiledFileInfo:
        """Read and check a whole compiled file; raise ModelFileError or NotFound."""
        found: CompiledFileInfo = await self._one(Inspect(path=path))
        return found

    async def inspect_source(self, path: Path) -> Declared:
        """Read the interface that an ONNX file declares; raise ModelFileError or ModelRefused."""
        found: Declared = await self._one(InspectSource(path=path))
        return found

    async def _one(self, call: Inspect | InspectSource) -> Any:
        async with self._places:
            [found] = [answer async for answer in _answers([call])]
        if isinstance(found, HonedError):
            raise found
        return found


async def inspect_all(paths: Sequence[Path]) -> AsyncIterator[tuple[Path, CompiledFileInfo | HonedError]]:
    """Inspect several compiled files one after the other; yield each with its summary or error.

    A file may take SECONDS. A file that crashes the child is to blame, unless the child was ended from
    outside; the others are read in the next child.
    """
    at = 0
    async for found in _answers([Inspect(path=path) for path in paths]):
        yield paths[at], found
        at += 1


async def _answers(calls: Sequence[Inspect | InspectSource]) -> AsyncIterator[Any]:
    done, interrupted = 0, 0
    while done < len(calls):
        async for found in _one_child(calls[done:]):
            if isinstance(found, Unavailable) and interrupted < _ATTEMPTS:
                interrupted += 1
                break
            yield found
            done, interrupted = done + 1, 0


async def _one_child(calls: Sequence[Inspect | InspectSource]) -> AsyncIterator[Any]:
    """Yield the answers of a child for the first of `calls`, at least one."""
    lost = Unavailable("the process that reads model files has ended")
    program, bounds = python("honed.daemon.store.inspector"), ResourceLimits(memory_mib=INSPECTION_MIB)
    process, link = await aio.spawn_rpc(program, bounds, lost=lambda: lost, frames=ANSWER)
    try:
        for call in calls:
            path = call.path
            try:
                async with asyncio.timeout(SECONDS):
                    answered = await aio.begin(link, call)
                found = await in_thread(call.decode, answered)
            except TimeoutError:
                yield ModelFileError(f"{path} takes longer than {SECONDS:g} s to read")
                return
            except strict.SchemaError as error:
                yield Internal(f"the process that reads model files said what it should not: {error}")
            except HonedError as error:
                if link.broken is None:
                    yield error
                    continue
                kill_group(process.pid)
                death = await process.wait()
                ended = f"{path} cannot be read, the process that tried: {death}"
                yield Unavailable(ended) if death.from_outside else ModelFileError(ended)
                return
            else:
                yield found
    finally:
        link.fail(lost)
        await process.end()
