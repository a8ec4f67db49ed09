"""The [hub] table of the configuration. The service uses `trials` alone: the network is honed-hub's."""

from __future__ import annotations

from dataclasses import dataclass, field

from .sections import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The [hub] table (docs/hub.md).

    url: where the hub is read; "": none is. push_url: where this machine's records go; "": the same.
    owner: the key of whoever made the hub, which may name others; "": nobody may.
    keys: whose records are taken, by a name for each.
    pull, push: whether honed-hub does so by itself. hold: it looks, and takes nothing.
    hours: between two pulls.
    trials: of one task that others' records may cost in a day.
    """

    url: str = setting("")
    push_url: str = setting("")
    owner: str = setting("")
    keys: dict[str, str] = field(default_factory=dict)
    pull: bool = setting(True)
    push: bool = setting(True)
    hold: bool = setting(False)
    hours: float = setting(6.0, unit="h", minimum=0.1)
    trials: int = setting(4, minimum=0)
