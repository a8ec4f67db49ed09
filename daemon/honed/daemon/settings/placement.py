"""Decides which of the configured devices a model is placed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from honed.protocol.errors import InvalidArgument, NotFound

FASTEST = "fastest"  # Selects the fastest device by measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The configured name of a model's device, and the reason."""

    device: str
    why: str


class Placement:
    """The placement by `device`, `devices` and `placement` of [service]; device names ignore case.

    `names` has the name of every device, as configured, the default first; "" is the best there is.
    """

    def __init__(self, device: str, devices: Sequence[str], by_model: Mapping[str, str]) -> None:
        self.default = device or (devices[0] if devices else "")
        self._by_model = by_model
        self._names: dict[str, str] = {}
        for name in (self.default, *devices):
            self._names.setdefault(name.casefold(), name)
        self.names = tuple(self._names.values())

    def find(self, device: str) -> str | None:
        """Return the configured name of a device, or None if no such device is configured."""
        return self._names.get(device.casefold())

    def home(self, model: str, kept: str, why: str) -> PlacementDecision:
        """Return a model's device; `kept` is the one it was added for, "" for none, and `why` the reason.

        The configuration has priority. A device that is no longer configured is replaced by the default.
        """
        configured = self._by_model.get(model)
        if configured is not None:
            return PlacementDecision(
                device=self.find(configured) or self.default, why="placed by the configuration"
            )
        if not kept:
            return PlacementDecision(device=self.default, why="")
        found = self.find(kept)
        if found is None:
            return PlacementDecision(
                device=self.default, why=f"it was added for {kept}, which is not configured any more"
            )
        return PlacementDecision(device=found, why=why)

    def select(self, model: str, device: str, specs: Mapping[str, str]) -> tuple[str, ...]:
        """Return the configured names of the devices that a user requests.

        The user gives a device by its name or a part of `specs`, or all: FASTEST means all. `specs` are the
        full names, by configured name, of devices seen so far. Raises InvalidArgument if the configuration
        places the model elsewhere, NotFound if none or several fit.
        """
        found = self.names if device == FASTEST else (self._matching(device, specs),)
        configured = self._by_model.get(model)
        if configured is not None and found != (self.find(configured),):
            raise InvalidArgument(
                f"the configuration places {model} on {configured}; change service.placement there, or do "
                "not ask for a device"
            )
        return found

    def _matching(self, device: str, specs: Mapping[str, str]) -> str:
        found = self.find(device)
        if found is not None:
            return found
        fitting = [name for name, full in specs.items() if device.casefold() in full.casefold()]
        if len(fitting) != 1:
            shown = "; ".join(specs.get(name) or name for name in self.names) or "none"
            problem = "fits several devices" if fitting else "is none of the devices"
            raise NotFound(
                f"{device[:80]!r} {problem} of this service; use one of: {shown}; or add it to "
                "service.devices in the configuration"
            )
        return fitting[0]
