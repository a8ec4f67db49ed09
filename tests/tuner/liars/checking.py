"""A measuring child that makes other checks when it is told to, and the measurer that tells it.

A child takes half a second to start, and tests leave out a dozen sets of checks. Everything but which of them
are made is the real child.
"""

from __future__ import annotations

import sys
from typing import ClassVar

from honed.process.rpc import by_name, connect
from honed.tuner.measure import timing
from honed.tuner.measure.candidate import OpenSession
from honed.tuner.measure.checks import AFTER_RUN, AFTER_WAIT, SUBMITTED, TIME_CLAIMS, TIMED
from honed.tuner.measure.child import MeasuringChild
from honed.tuner.measure.measurer import Measurer

COMMAND = (sys.executable, "-m", "tests.tuner.liars.checking")

# The names of all checks, in order. The last three are not functions of observations: "stale" is how the last
# set of inputs is run, "fence" a run that ends the process where it leaves its buffers, "clean" what the
# kernel log says.
NAMES = (
    *dict.fromkeys(
        check.name for table in (SUBMITTED, AFTER_WAIT, TIME_CLAIMS, AFTER_RUN, TIMED) for check in table
    ),
    "stale",
    "fence",
    "clean",
)


class ChildOfManyChecks(MeasuringChild):
    """The child: it opens its device once, and takes the checks of each further call."""

    def _reopen(self, call: OpenSession) -> None:
        if self._session is None:
            self._open(call)
        else:
            self._session.without = frozenset(call.without)

    METHODS: ClassVar = MeasuringChild.METHODS | by_name({OpenSession: _reopen})


class MeasurerOfManyChecks(Measurer):
    """Leaves out other checks from now on when it is told to."""

    def leave_out(self, without: frozenset[str]) -> None:
        self._without = without
        if self._child is not None:
            call = OpenSession(
                device=self._device,
                profile=self._profile,
                limits=self._limits,
                without=tuple(sorted(without)),
            )
            self._ask(self._child, call)


if __name__ == "__main__":
    ChildOfManyChecks(connect(None), timing.reading).serve()
    sys.stdout.flush()
