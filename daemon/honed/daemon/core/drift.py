"""Whether requests take longer by now than when the engine that serves was chosen. No I/O."""

from __future__ import annotations

from collections import deque

from honed.runtime.engines import TIE

DRIFT_RUNS = 20  # requests in a row that tell how long they take now
DRIFT_SECONDS = 600.0  # between two comparisons for want of speed


class Drift:
    """What the latest requests for a model took on one engine, in milliseconds."""

    def __init__(self) -> None:
        self._engine = ""
        self._latest: deque[float] = deque(maxlen=DRIFT_RUNS)

    def note(self, engine: str, ms: float, chosen_ms: float) -> bool:
        """A request ran; True where even the faster ones of the latest took more than a tie allows.

        They count anew then, and on another engine.
        """
        if engine != self._engine:
            self._engine = engine
            self._latest.clear()
        self._latest.append(ms)
        if len(self._latest) < DRIFT_RUNS:
            return False
        slower = sorted(self._latest)[(DRIFT_RUNS - 1) // 4] > TIE * chosen_ms
        self._latest.clear()
        return slower
