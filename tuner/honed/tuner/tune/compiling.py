"""Compiles a model in a child, as untrusted models always are."""

from __future__ import annotations

from honed.jobs.commands import Compile
from honed.jobs.listening import Died, do
from honed.protocol.errors import DeviceError, HonedError, ModelRefused

_SECONDS = 900.0


def compile_apart(job: Compile) -> None:
    """Compile; raises ModelRefused with the compiler's reasons, DeviceError where it fails.

    A file that fell back to default rules is refused, too: these schedules were what was wanted.
    """
    try:
        compiled = do(job, seconds=_SECONDS)
    except ModelRefused:
        raise
    except HonedError as error:
        raise DeviceError(str(error)) from error
    except Died as died:
        raise DeviceError(f"compiling with the best schedules failed: {died}") from died
    if compiled.fell_back:
        raise ModelRefused(compiled.fell_back)
