"""Reads untrusted model files for the service, in a child process.

python -m honed.daemon.store.inspector FD

A malicious file may take seconds and gigabytes to read, and a failing disk kills the process that maps it.
For each `Inspect` on the socket FD this process verifies every byte of a compiled file, within limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from honed.daemon.settings.schema import INSPECTION_MIB
from honed.process.rpc import Call, RpcServer, by_name, connect
from honed.protocol import strict, wire
from honed.protocol.decoder import FrameDecoder
from honed.protocol.errors import HonedError, ModelFileError

from .compiled import CompiledFileInfo, summarise
from .declared import Declared, read_declared

# 2 MiB and 200,000 values hold about 20,000 kernels; decoding more would block the service.
ANSWER = wire.FrameLimits(max_bytes=2 << 20, max_values=200_000, max_depth=8, max_text=1 << 16)
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


class InspectorServer(RpcServer):
    """A server of inspections, whose answers respect the limits ANSWER."""

    def _inspect(self, call: Inspect) -> CompiledFileInfo:
        from honed.runtime.compiled import modelfile  # The service imports this module without it

        def read() -> CompiledFileInfo:
            with modelfile.read(call.path) as file:
                return summarise(file.model)

        return self._within_limits(call.path, read)

    def _inspect_source(self, call: InspectSource) -> Declared:
        return self._within_limits(call.path, lambda: read_declared(call.path))

    def _within_limits(self, path: Path, read: Callable[[], T]) -> T:
        """Return the result of `read`; raise ModelFileError if it fails or exceeds ANSWER."""
        try:
            found = read()
            answer = wire.Response(msgid=0, error=None, result=strict.to_plain(found))
            decoder = FrameDecoder(ANSWER)
            decoder.feed(wire.encode(answer, ANSWER))
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
