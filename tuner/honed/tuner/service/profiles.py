"""Which models the service is asked to profile, so that their use is known kernel by kernel. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of one inference: a request that comes meanwhile waits for the two that a profile runs.
LONGEST_SECONDS = 1.0
# For its answer, the wait for requests that came before included.
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Unprofiled:
    """What is to be profiled."""

    model: str
    sha256: str  # of the compiled file


def wanted(model: Mapping[str, Any], latency: Sequence[Mapping[str, Any]]) -> Unprofiled | None:
    """The model's present version, if it is used, was not profiled yet, and is fast enough for that.

    `model` is from Metrics, `latency` the curve of ModelHistory.
    """
    spent, version = model["spent"], Unprofiled(model["name"], model["sha256"])
    if not spent["seconds"] or spent["profiled"] == version.sha256:
        return None
    # The last point may be of the version before, which was slower if anything.
    if not latency or latency[-1]["us"] > LONGEST_SECONDS * 1e6:
        return None
    return version
