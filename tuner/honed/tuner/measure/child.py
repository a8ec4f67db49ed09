"""The measuring child: `python -m honed.tuner.measure.child --channel FD`, started by `process`.

It owns an OpenCL context and nothing else of value, and may be killed at any moment. Messages (msgpack
maps, `codec`) come and go on the socket FD; what the driver prints goes to standard error.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from honed.machine import devices
from honed.machine.limits import data_bytes, limit_data
from honed.machine.opencl import cl, failure
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import HonedError
from honed.protocol.strict import from_plain, to_plain

from . import codec, timing
from .candidate import MeasureLimits
from .examine import Examination
from .session import DeviceSession
from .timing import Reader

# Drivers leak a little with every program. A child that grew by this share of what it may since it loaded
# its workload is replaced, before a candidate is refused for memory that others took.
_WORN = 0.25


def main(argv: list[str] | None = None, read: Reader = timing.reading) -> int:
    """Serve the channel until it closes. `read` is how events are read, another one in tests only."""
    channel = codec.channel(argv, "honed.tuner.measure.child")
    with suppress(codec.ChannelClosed):
        _serve(channel, read)
    # Not sys.exit: threads of the driver may hang, and a faulted context must not be released.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(channel: socket.socket, read: Reader) -> None:
    session: DeviceSession | None = None
    loaded_at = 0
    while True:
        message = codec.receive(channel)
        do = message["do"]
        try:
            if do == "open":
                session = _opened(message, lambda phase, s: _announce(channel, phase, s), read)
                codec.send(channel, {"opened": True})
            elif session is None:
                raise codec.ChannelClosed("the first message must open a device")
            elif do == "load":
                traffic = session.load(codec.workload_from_plain(message["workload"]), message["traffic"])
                loaded_at = data_bytes()
                codec.send(channel, {"loaded": traffic})
            elif do == "prepare":
                session.prepare(codec.candidate_from_plain(message["candidate"]))
            else:
                answer = _measured(session, message)
                worn = data_bytes() - loaded_at > session.limits.memory_bytes * _WORN
                codec.send(channel, {**answer, "worn": worn})
        except HonedError as error:
            codec.send(channel, {"failed": str(error), "code": error.code})
        except cl.Error as error:
            failed = failure("measure", error)
            codec.send(channel, {"failed": str(failed), "code": failed.code})


def _opened(message: codec.Message, announce: Callable[[str, float], None], read: Reader) -> DeviceSession:
    limits = from_plain(MeasureLimits, message["limits"], where="limits")
    session = DeviceSession(
        devices.select(message["device"]),
        from_plain(DeviceProfile, message["profile"], where="profile"),
        limits,
        frozenset(message["without"]),
        announce,
        read,
    )
    limit_data(data_bytes() + limits.memory_bytes)
    return session


def _measured(session: DeviceSession, message: codec.Message) -> codec.Message:
    if session.loaded is None:
        raise codec.ChannelClosed("a workload must be loaded before a candidate is measured")
    candidate = codec.candidate_from_plain(message["candidate"])
    examination = Examination(session, session.loaded, candidate, message["give_up"])
    return {
        "verdict": to_plain(examination.verdict()),
        "tainted": examination.tainted,
        "ran_at": examination.ran_at,
        "spent": examination.spent,
        "peaks": to_plain(session.peaks),
    }


def _announce(channel: socket.socket, phase: str, seconds: float) -> None:
    codec.send(channel, {"phase": phase, "seconds": seconds})


if __name__ == "__main__":
    sys.exit(main())
