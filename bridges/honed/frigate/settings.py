"""What `honed-frigate.toml` says."""

from __future__ import annotations

from dataclasses import dataclass

from honed.bridge.addresses import check_endpoint
from honed.bridge.settings import check_numbers
from honed.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class FrigateSettings:
    """Every setting with its default; raises InvalidArgument for values that are not allowed.

    endpoint: where Frigate connects to, ipc://PATH or tcp://ADDRESS:PORT.
    network: whether the address may be one that other machines reach.
    model: the honed model that serves, whatever file Frigate names; "": the one of that file's name.
    take_models: whether a file that Frigate sends is added to honed.
    retry_seconds: how long a picture waits for a service that is being started anew.
    ready_seconds: how long Frigate waits, when it asks for a model, for that to be ready; it allows 30.
    max_message_mib: of one frame; files of models are one.
    max_requests: that are answered at a time, of all clients together.
    """

    endpoint: str = "ipc:///run/honed-frigate/detector"
    network: bool = False
    model: str = ""
    take_models: bool = True
    retry_seconds: float = 5.0
    ready_seconds: float = 25.0
    max_message_mib: int = 512
    max_requests: int = 16

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint, network=self.network)
        check_numbers(self, retry_seconds=0, ready_seconds=0, max_message_mib=1, max_requests=1)
        if self.max_message_mib > 16384:
            raise InvalidArgument(f"max_message_mib is {self.max_message_mib}; give at most 16384")
