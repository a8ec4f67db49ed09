"""The measuring child: `python -m honed.tuner.measure.child FD`, started by `measurer`.

It owns an OpenCL context and nothing else of value, and may be killed at any moment. It answers the calls of
`candidate` on the socket FD; what the driver prints goes to standard error.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from honed.machine import devices
from honed.machine.opencl import cl, failure
from honed.process.limits import data_bytes, limit_data
from honed.process.rpc import RpcServer, by_name, connect
from honed.protocol.errors import HonedError

from . import timing
from .candidate import Examined, LoadWorkload, MeasureCandidate, Measured, OpenSession, PrepareCandidate
from .examine import Examination
from .session import DeviceSession
from .timing import Reader

# Drivers leak a little with every program. A child whose memory has grown by this share of its allowance
# since it loaded its workload is replaced, before a candidate is refused for memory that others took.
_WORN = 0.25


class MeasuringChild(RpcServer):
    """Measures candidates on one device, which is opened first. `read` reads the driver's events."""

    def __init__(self, connected: socket.socket, read: Reader) -> None:
        super().__init__(connected)
        self._read = read
        self._session: DeviceSession | None = None
        self._loaded_at = 0

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Return the error to answer with, also for errors of the OpenCL driver."""
        if isinstance(raised, cl.Error):
            return failure("measure", raised)
        return super().error_of(raised, method)

    @property
    def session(self) -> DeviceSession:
        """The session on the device opened first."""
        assert self._session is not None, "the first call must open a device"
        return self._session

    def _open(self, call: OpenSession) -> None:
        self._session = DeviceSession(
            devices.select(call.device),
            call.profile,
            call.limits,
            frozenset(call.without),
            lambda phase, seconds: self.progress(phase=phase, seconds=seconds),
            self._read,
        )
        limit_data(data_bytes() + call.limits.memory_bytes)

    def _load(self, call: LoadWorkload) -> float:
        traffic = self.session.load(call.workload, call.traffic)
        self._loaded_at = data_bytes()
        return traffic

    def _prepare(self, call: PrepareCandidate) -> None:
        self.session.prepare(call.candidate)

    def _measure(self, call: MeasureCandidate) -> Measured:
        session, loaded = self.session, self.session.loaded
        assert loaded is not None, "a workload must be loaded before a candidate is measured"
        examination = Examination(session, loaded, call.candidate, call.give_up)
        examined = Examined(
            verdict=examination.verdict(),
            tainted=examination.tainted,
            ran_at=examination.ran_at,
            spent=examination.spent,
        )
        worn = data_bytes() - self._loaded_at > session.limits.memory_bytes * _WORN
        return Measured(examined=examined, peaks=session.peaks, worn=worn)

    METHODS = by_name(
        {OpenSession: _open, LoadWorkload: _load, PrepareCandidate: _prepare, MeasureCandidate: _measure}
    )


def main(arguments: Sequence[str] | None = None, read: Reader = timing.reading) -> int:
    """Serve until the parent hangs up; tests replace `read`."""
    MeasuringChild(connect(arguments), read).serve()
    # Exits without cleanup: threads of the driver may hang, and a faulted context must not be released.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
