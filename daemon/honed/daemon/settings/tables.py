"""The tables [service], [serve], [cpu] and [hub] of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from honed.protocol.errors import InvalidArgument

from .sections import RESTART, setting

ENGINES: Final = ("fastest", "gpu", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The [service] table.

    A device is a spec as `honed.machine.devices.select` takes it ("0", or part of a name).

    device: where models go that are not placed elsewhere; "": the first of `devices`, else a GPU before an
    accelerator before a CPU.
    devices: more that are used at the same time.
    placement: by model, one of these.
    fallback: serves the models of a device that is lost; "cpu": the first CPU, "": none.
    """

    socket: Path = field(metadata=RESTART)
    state_dir: Path = field(metadata=RESTART)
    cache_dir: Path = field(metadata=RESTART)
    device: str = setting("", effect="restart")
    devices: tuple[str, ...] = setting((), effect="restart")
    placement: dict[str, str] = field(default_factory=dict, metadata=RESTART)
    fallback: str = setting("cpu", effect="restart")


def check_engine(name: str) -> None:
    """Raise InvalidArgument for what is none of ENGINES."""
    if name not in ENGINES:
        raise InvalidArgument(f"use one of {', '.join(ENGINES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The [serve] table.

    engine: which serves models that do not ask for one: "fastest", by comparison; "gpu", compiled forms only;
    "cpu", the CPU engine wherever it can.
    """

    engine: str = setting("fastest", effect="restart", check=check_engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSettings:
    """The [cpu] table, of the CPU engine.

    threads: of one run of a model or part; 0: as many as ONNX Runtime takes by itself, one for each core.
    memory_mib: what its process, the one that tries models out, and those that run parts of models may each
        write, MiB; 0: no limit.
    """

    threads: int = setting(0, minimum=0, effect="restart")
    memory_mib: int = setting(4096, unit="MiB", minimum=0, effect="restart")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The [hub] table (docs/hub.md). The service uses `trials` alone: the network is honed-hub's.

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
