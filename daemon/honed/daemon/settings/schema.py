"""Defines settings of the configuration file, and most of its tables."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from honed.process.limits import MEMORY_PERCENT, memory_mib
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import ENGINE_NAMES, engine_word

Effect = Literal["at once", "new connections", "restart"]
RESTART: Final = MappingProxyType({"effect": "restart"})  # Metadata of a field
ENGINES: Final = ("fastest", "gpu", "cpu")
USABLE: Final = f"use one of {', '.join((*ENGINES, ENGINE_NAMES['gpu'], ENGINE_NAMES['cpu']))}"
MAX_MESSAGE_DEPTH = 16
MAX_MESSAGE_VALUES = 8_192  # Few enough that no message keeps the event loop for long
MAX_TEXT_BYTES = 262_144  # Limit of all str in a message, for the same reason
# Limits of children, and of their memory if no setting limits it.
INSPECTIONS, INSPECTION_MIB = 2, 512  # Compiled files being read at a time
CHECKING_MIB = 2048  # A model that is checked while another is compiled
OPTIMISED_MIB = 2048  # Limit of each of the two processes that check ONNX Runtime's optimisations
RECORDS_COMMANDS, RECORDS_MIB = 2, 1024  # Simultaneous commands on the records
HINTS_MIB = 256  # Limit of a file of hints; half of that for one of a hub
DAEMON_MIB = 96  # The daemon itself, without messages


# ---- Defaults that follow from the memory of the machine ----


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """The default limits in MiB for a machine's memory, of which simultaneous processes take at most 60 %.

    24 % are for compiling or tuning, which take turns. The rest is for serving: the daemon with its messages,
    the worker, the CPU engine, and the engines of users. Processes that live for seconds, such as a builder,
    are not counted; the units' MemoryMax= limits all together.
    """

    message: int
    messages: int  # Messages of all users
    worker: int  # The process that serves a device
    cpu: int  # The CPU engine
    app: int  # The CPU engine of one user
    users: int
    variants: int  # Variants, within the worker's limit
    compiler: int
    tuner: int


MAKING_PERCENT = 24  # Share for compiling or tuning, within MEMORY_PERCENT


def shares(mib: int) -> MemoryShares:
    """Return the defaults for a machine, or cgroup, of `mib` MiB."""
    message, messages = max(1, min(64, mib // 128)), max(1, min(1024, mib // 32))
    making = mib * MAKING_PERCENT // 100
    serving = mib * (MEMORY_PERCENT - MAKING_PERCENT) // 100 - DAEMON_MIB - messages - 2 * message
    worker, cpu = (max(1, min(4096, serving * percent // 100)) for percent in (44, 33))
    apps = max(1, serving - worker - cpu)
    users = max(1, min(16, apps // 300))
    return MemoryShares(
        message=message,
        messages=messages,
        worker=worker,
        cpu=cpu,
        app=min(2048, apps // users),
        users=users,
        variants=min(1024, worker // 2),
        compiler=min(6144, making),
        tuner=min(4096, making),
    )


@cache
def own_shares() -> MemoryShares:
    """Return the defaults for this machine."""
    return shares(memory_mib())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting: its place, type, unit ("" for none), minimum (of numbers), and when a change takes effect.

    `effect` says when a running service that reads its files again uses a new value. `check` raises
    InvalidArgument with what to give instead for values that are wrong in another way.
    """

    table: str
    key: str
    kind: Any
    unit: str
    minimum: float
    effect: Effect
    check: Callable[[Any], object] | None = None

    @property
    def name(self) -> str:
        """The full name, such as `limits.max_queue`."""
        return f"{self.table}.{self.key}"


def setting(
    default: Any = dataclasses.MISSING,
    *,
    share: Callable[[MemoryShares], Any] | None = None,
    unit: str = "",
    minimum: float = 1,
    effect: Effect = "at once",
    check: Callable[[Any], object] | None = None,
) -> Any:
    """Return a field of a table; the arguments are those of `Setting`.

    `share` returns the default from the shares of memory.
    """
    metadata = {"unit": unit, "minimum": minimum, "effect": effect, "check": check}
    if share is not None:
        return dataclasses.field(default_factory=lambda: share(own_shares()), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def of_table(table: str, kind: type[Any]) -> list[Setting]:
    """Return the settings of a table, in the order of its fields."""
    hints = typing.get_type_hints(kind)
    return [
        Setting(
            table=table,
            key=field.name,
            kind=hints[field.name],
            unit=field.metadata.get("unit", ""),
            minimum=float(field.metadata.get("minimum", 1 if hints[field.name] is int else 0)),
            effect=field.metadata.get("effect", "at once"),
            check=field.metadata.get("check"),
        )
        for field in dataclasses.fields(kind)
    ]


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
    """Raise InvalidArgument unless the name is one of ENGINES."""
    if engine_word(name) not in ENGINES:
        raise InvalidArgument(USABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The [serve] table.

    engine: the engine of models that request none: "fastest", by comparison; "opencl" or "gpu",
    compiled forms only; "onnxruntime" or "cpu", the CPU engine wherever it can.
    """

    engine: str = setting("fastest", effect="restart", check=check_engine)

    def __post_init__(self) -> None:
        """Convert the name of an engine to its kind."""
        object.__setattr__(self, "engine", engine_word(self.engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSettings:
    """The [cpu] table, of the CPU engine.

    threads: of one run of a model or part; 0: one for each core, or for each big one where there are kinds.
    memory_mib: what its process, the one that tries models out, and those that run parts of models may each
        write, MiB; 0: no limit.
    """

    threads: int = setting(0, minimum=0, effect="restart")
    memory_mib: int = setting(share=lambda its: its.cpu, unit="MiB", minimum=0, effect="restart")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The [hub] table (docs/hub.md). The service uses `trials` alone: the network is honed-hub's.

    url: address of the hub; "": none. push_url: address for this machine's records; "": the same.
    owner: the key of the hub's owner, who may name other keys; "": none.
    keys: keys whose records are accepted, by a name for each.
    pull, push: whether honed-hub does so by itself. hold: it reads the hub, and accepts nothing.
    hours: interval of pulls.
    trials: trials of a task that others' records may cost in a day.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSettings:
    """The [variants] table: models compiled for further shapes and sizes.

    requests: after so many requests in the same shapes, which count less with time as [usage] says, a model
    gets a variant for these when the machine is idle.
    per_model: variants that are kept of a model, those asked for by hand among them; 0: none is made in idle
    time.
    disk_mib: files of all variants, MiB.
    sizes: sizes that a part whose sizes depend on the data is compiled for when the machine is idle, once it
    was met in some `requests` times; 0: none.
    memory_mib: device memory of all loaded variants, MiB.
    """

    requests: float = setting(20.0, minimum=1)
    per_model: int = setting(16, minimum=0)
    sizes: int = setting(4, minimum=0)
    disk_mib: int = setting(4096, unit="MiB", minimum=0)
    memory_mib: int = setting(share=lambda its: its.variants, unit="MiB", minimum=0)

    @property
    def disk_bytes(self) -> int:
        """The limit `disk_mib` in bytes."""
        return self.disk_mib << 20

    @property
    def memory_bytes(self) -> int:
        """The limit `memory_mib` in bytes."""
        return self.memory_mib << 20


@dataclass(slots=True, kw_only=True)
class Limits:
    """The [limits] table; sizes in bytes unless the name says MiB, times in seconds.

    The service has one instance, which changes when its configuration is read again: take a value from it
    when it is needed.

    max_connections: open connections, all users together.
    max_user_connections: open connections of one user.
    max_unanswered: requests of one connection; it is not read further until one is answered.
    max_message_bytes: one message; larger tensors go through shared memory.
    max_user_bytes: unanswered messages of one user, and its unread answers.
    max_all_bytes: those of all users; beyond it the user that holds most loses a connection.
    message_seconds: from the first byte of a message to its last.
    write_seconds: without progress while a client does not read its answers.
    max_regions: shared-memory regions of one connection.
    max_queue: inferences that wait.
    run_seconds: one inference on the device; beyond it the worker counts as hung.
    load_seconds: the worker's start, or building one kernel of a model.
    worker_memory_mib: memory of a worker, and of the process that builds for it, MiB; 0: no limit.
    max_models: models in the store.
    max_model_bytes: a model with its external data.
    max_jobs: models being added; they are compiled one after the other.
    compile_seconds: compiling one model.
    compile_memory_mib: memory of the compiler, MiB.
    stop_seconds: finishing queued requests when the service stops.
    """

    max_connections: int = setting(256)
    max_user_connections: int = setting(128)
    max_unanswered: int = setting(64)
    max_message_bytes: int = setting(
        share=lambda its: its.message << 20, unit="bytes", minimum=4096, effect="new connections"
    )
    max_user_bytes: int = setting(share=lambda its: min(256, its.messages) << 20, unit="bytes", minimum=4096)
    max_all_bytes: int = setting(share=lambda its: its.messages << 20, unit="bytes", minimum=4096)
    message_seconds: float = setting(30.0, unit="s", minimum=0.1, effect="new connections")
    write_seconds: float = setting(30.0, unit="s", minimum=0.1, effect="new connections")
    max_regions: int = setting(64, effect="new connections")
    max_queue: int = setting(256)
    run_seconds: float = setting(60.0, unit="s", minimum=0.1)
    load_seconds: float = setting(300.0, unit="s", minimum=1)
    worker_memory_mib: int = setting(share=lambda its: its.worker, unit="MiB", minimum=0, effect="restart")
    max_models: int = setting(256)
    max_model_bytes: int = setting(2 << 30, unit="bytes")
    max_jobs: int = setting(8)
    compile_seconds: float = setting(1800.0, unit="s", minimum=1)
    compile_memory_mib: int = setting(share=lambda its: its.compiler, unit="MiB", minimum=128)
    stop_seconds: float = setting(20.0, unit="s", minimum=0)

    @property
    def max_answer_bytes(self) -> int:
        """The maximum bytes of an answer."""
        return 2 * self.max_message_bytes

    def memory_mib(self, *, devices: int, tuner_mib: int, cpu_mib: int, apps_mib: int) -> int:
        """Return the maximum memory of simultaneous processes in MiB, counted as in `MemoryShares`.

        `tuner_mib` is tuner.memory_mib, `cpu_mib` cpu.memory_mib and `apps_mib` that of all users' engines.
        """
        messages = self.max_all_bytes + devices * self.max_answer_bytes
        serving = DAEMON_MIB + (messages >> 20) + devices * self.worker_memory_mib + cpu_mib + apps_mib
        return serving + max(self.compile_memory_mib, tuner_mib)

    def become(self, other: Limits) -> None:
        """Copy every value of `other`."""
        for each in dataclasses.fields(self):
            setattr(self, each.name, getattr(other, each.name))
