"""The checks a candidate must pass: each a pure function that gives a refusal or None, and a row of a table.

The tables stand here in the order in which a candidate meets them, as their rows do. docs/verdicts.md says
what each refusal means and where the figures come from.
"""

from __future__ import annotations

from .answers import LEFT
from .clocks import CLAIMED, TIMED, WAITED
from .row import Refusal, VerdictCheck, first_refusal
from .submitted import SUBMITTED

__all__ = [
    "CLAIMED",
    "LEFT",
    "NAMES",
    "SUBMITTED",
    "TIMED",
    "WAITED",
    "Refusal",
    "VerdictCheck",
    "first_refusal",
]

# Of all checks, in order. The last three are no functions of what was read: "stale" is how the last set of
# inputs is run, "fence" a run that ends the process where it leaves its buffers, "clean" what the kernel log
# says.
NAMES = (
    *dict.fromkeys(check.name for table in (SUBMITTED, WAITED, CLAIMED, LEFT, TIMED) for check in table),
    "stale",
    "fence",
    "clean",
)
