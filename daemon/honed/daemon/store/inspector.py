"""The child process that reads compiled files for the service, because they may come from anywhere.

python -m honed.daemon.store.inspector PATH...

A file can be made to take seconds and gigabytes to read, and a failing disk ends who has it mapped. Here
every byte is verified, within limits. There is an answer for one path after the other: a response each, whose
number is the path's place on the command line and whose result is a `Compiled`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from honed.daemon.settings.schema import INSPECTION_MIB
from honed.protocol import strict, wire
from honed.protocol.decoder import Decoder
from honed.protocol.errors import HonedError, ModelFileError, error_to_map
from honed.runtime.compiled import modelfile

from .compiled import summarise

# 2 MiB and 200,000 values are some 20,000 kernels; reading more would hold up the service.
ANSWER = wire.FrameLimits(max_bytes=2 << 20, max_values=200_000, max_depth=8, max_text=1 << 16)
_REASON = 1000  # letters


def _answer(number: int, path: str) -> bytes:
    """A frame that keeps within ANSWER."""
    try:
        with modelfile.read(path) as file:
            result: Any = strict.to_plain(summarise(file.model))
        frame = wire.encode(wire.Response(msgid=number, error=None, result=result), ANSWER)
        decoder = Decoder(ANSWER)
        decoder.feed(frame)
        decoder.next_message()
        return frame
    except HonedError as raised:
        error = raised
    except wire.PeerFault as fault:
        error = ModelFileError(f"{path} says too much of itself: {fault.error}")
    except MemoryError:
        error = ModelFileError(f"{path} takes more than {INSPECTION_MIB} MiB to read")
    except OSError as raised:
        error = ModelFileError(f"{path} cannot be read: {raised.strerror or raised}")
    plain = error_to_map(error)
    plain["message"] = plain["message"][:_REASON]
    return wire.encode(wire.Response(msgid=number, error=plain, result=None), ANSWER)


def main(paths: Sequence[str]) -> None:
    """Answer for each path on standard output."""
    answers = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answers, "wb") as stream:
        for number, path in enumerate(paths):
            stream.write(_answer(number, path))
            stream.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
