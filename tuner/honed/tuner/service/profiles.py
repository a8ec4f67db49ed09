"""Which models the service is asked to profile, so that their use is known kernel by kernel. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from honed.protocol.service import TimeSpent
from honed.protocol.versions import LatencyPoint

# Of one inference: a request that comes meanwhile waits for the two that a profile runs.
LONGEST_SECONDS = 1.0
# For its answer, the wait for requests that came before included.
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Unprofiled:
    """What is to be profiled."""

    model: str
    sha256: str  # of the compiled file


def wanted(version: Unprofiled, spent: TimeSpent, latency: Sequence[LatencyPoint]) -> bool:
    """Whether a model's present version is used, was not profiled yet, and is fast enough for that."""
    if not spent.seconds or spent.profiled == version.sha256:
        return False
    # The last point may be of the version before, which was slower if anything.
    return bool(latency) and latency[-1].us <= LONGEST_SECONDS * 1e6
