"""Reads untrusted model files in a child process, so that a malicious one cannot harm the service.

python -m honed.daemon.store.inspector FD

A malicious file may take seconds and gigabytes to read, and a failing disk kills the process that maps it.
For each `Inspect` on the socket FD the child verifies every byte of a compiled file, within limits. It starts
without asyncio, which only the service's side imports.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from honed.daemon.settings.schema import INSPECTION_MIB, INSPECTIONS
from honed.process.children import ResourceLimits, kill_group, python
from honed.process.rpc import Call, RpcServer, by_name, connect
from honed.protocol import strict, wire
from honed.protocol.decoder import FrameDecoder
from honed.protocol.errors import HonedError, Internal, ModelFileError, Unavailable

from .compiled import CompiledFileInfo, summarise
from .declared import Declared, read_declared

SECONDS = 120.0  # Limit for a file: 2 GiB from a slow card
_ATTEMPTS = 2  # Retries if the process is ended from outside
# 2 MiB and 200,000 values hold about 20,000 kernels; decoding more would block the service.
_ANSWER = wire.FrameLimits(max_bytes=2 << 20, max_values=200_000, max_depth=8, max_text=1 << 16)
_REASON = 1000  # Maximum letters of an error
T = TypeVar("T", CompiledFileInfo, Declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect(Call[CompiledFileInfo]):
    """Read and check a compiled file."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectSource(Call[Declared]):
    """Read the interface that an ONNX file declares."""

    path: Path


class Inspector:
    """An inspector of model files, which reads a limited number at a time."""

    def __init__(self) -> None:
        import asyncio

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
    import asyncio

    from honed.daemon.aio import in_thread
    from honed.process import aio

    lost = Unavailable("the process that reads model files has ended")
    program, bounds = python("honed.daemon.store.inspector"), ResourceLimits(memory_mib=INSPECTION_MIB)
    process, link = await aio.spawn_rpc(program, bounds, lost=lambda: lost, frames=_ANSWER)
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


class InspectorServer(RpcServer):
    """A server of inspections, whose answers respect the limits _ANSWER."""

    def _inspect(self, call: Inspect) -> CompiledFileInfo:
        from honed.runtime.compiled import modelfile  # The service imports this module without it

        def read() -> CompiledFileInfo:
            with modelfile.read(call.path) as file:
                return summarise(file.model)

        return self._within_limits(call.path, read)

    def _inspect_source(self, call: InspectSource) -> Declared:
        return self._within_limits(call.path, lambda: read_declared(call.path))

    def _within_limits(self, path: Path, read: Callable[[], T]) -> T:
        """Return the result of `read`; raise ModelFileError if it fails or exceeds _ANSWER."""
        try:
            found = read()
            answer = wire.Response(msgid=0, error=None, result=strict.to_plain(found))
            decoder = FrameDecoder(_ANSWER)
            decoder.feed(wire.encode(answer, _ANSWER))
            decoder.next_message()
        except wire.ProtocolError as fault:
            raise ModelFileError(f"{path} says too much of itself: {fault.error}") from fault
        except MemoryError as error:
            raise ModelFileError(f"{path} takes more than {INSPECTION_MIB} MiB to read") from error
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
        return found

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Return the error to answer, shortened, because it may quote the file."""
        raised.args = (str(raised)[:_REASON], *raised.args[1:])
        return super().error_of(raised, method)

    METHODS = by_name({Inspect: _inspect, InspectSource: _inspect_source})


if __name__ == "__main__":
    InspectorServer(connect()).serve()
