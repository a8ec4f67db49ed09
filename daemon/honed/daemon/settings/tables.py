"""The tables [service], [serve] and [cpu] of the configuration."""

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
    device: str = field(metadata=RESTART)
    devices: tuple[str, ...] = field(metadata=RESTART)
    placement: dict[str, str] = field(metadata=RESTART)
    fallback: str = field(metadata=RESTART)


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
