"""What a driver and the host's clock say of launches that have ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launched:
    """What the driver says of one launch: execution status, START and END in nanoseconds."""

    status: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Everything between two waits for the device; `wall` in seconds by the host's clock."""

    launches: tuple[Launched, ...]
    wall: float

    @property
    def seconds(self) -> float:
        """The device's time in all launches."""
        return sum(launch.end - launch.start for launch in self.launches) * 1e-9
