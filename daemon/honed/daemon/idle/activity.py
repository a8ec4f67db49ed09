"""What the service itself has to do: requests, by model, and what waits. No clock: times are arguments."""

from __future__ import annotations

from .readings import Sample


class Activity:
    """Requests that came and went; times in seconds of a steady clock."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._last: dict[str, float] = {}  # by model
        self._latest = started
        self._under_way = 0
        self._adding = 0

    def begin(self, model: str, now: float) -> None:
        """A request came."""
        self._under_way += 1
        self._last[model] = self._latest = now

    def end(self, model: str, now: float) -> None:
        """A request was answered."""
        self._under_way -= 1
        self._latest = now
        if model in self._last:  # it was not removed meanwhile
            self._last[model] = now

    def adding(self, change: int) -> None:
        """A model begins (1) or ends (-1) to be added, or tuned by hand."""
        self._adding += change

    def forget(self, model: str) -> None:
        """The model was removed."""
        self._last.pop(model, None)

    def since(self, now: float) -> dict[str, float]:
        """Seconds since the last request, by model."""
        return {model: max(0.0, now - last) for model, last in sorted(self._last.items())}

    def samples(self, now: float) -> list[Sample]:
        """Seconds since the last request of any model, and how much is not done yet."""
        if self._latest > self._started and self._last:
            text = f"since the last request, for {max(self._last, key=self._last.__getitem__)}"
        else:
            text = "since the service started; no request yet"
        return [
            Sample(signal="requests", value=max(0.0, now - self._latest), unit="s", text=text),
            Sample(signal="queue", value=float(self._under_way), unit="", text="requests not answered yet"),
            Sample(signal="adding", value=float(self._adding), unit="", text="models added or tuned by hand"),
        ]
