"""The [hub] table of the service's configuration, as the service tells it: nothing is read from its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from honed.protocol.errors import InvalidArgument, Unimplemented
from honed.protocol.methods import check_name
from honed.protocol.service import ConfigShown

from .minisign import PublicKey

_TABLE: Final = "hub."


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """What docs/configuration.md says of [hub], with its keys parsed."""

    url: str
    push_url: str
    owner: PublicKey | None
    keys: dict[str, PublicKey]
    pull: bool
    push: bool
    hold: bool
    hours: float

    @classmethod
    def of(cls, config: ConfigShown) -> HubConfig:
        """Those in force. Raises InvalidArgument for a key that is none."""
        told: dict[str, Any] = {
            each.name.removeprefix(_TABLE): each.value
            for each in config.settings
            if each.name.startswith(_TABLE)
        }
        if not told:
            raise Unimplemented("the service knows of no hub; update it")
        return cls(
            url=told["url"],
            push_url=told["push_url"] or told["url"],
            owner=_key("owner", told["owner"]) if told["owner"] else None,
            keys={check_name(name, "key"): _key(name, text) for name, text in told["keys"].items()},
            pull=told["pull"],
            push=told["push"],
            hold=told["hold"],
            hours=told["hours"],
        )


def _key(name: str, text: str) -> PublicKey:
    try:
        return PublicKey.parse(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"[hub] key {name}: {error}") from error
