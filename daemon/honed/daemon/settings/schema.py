"""Defines settings of the configuration file, and most of its tables."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from honed.process.limits import MEMORY_PERCENT, memory_mib
from honed.protocol.errors import InvalidArgument
from honed.protocol.values import ENGINE_NAMES, engine_word

Effect = Literal["at once", "new connections", "restart"]
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
    """A setting: its place, type, meaning, unit ("" for none), and minimum of numbers.

    `meaning` is for pages, in Markdown, without a full stop. `effect` says when a running service that reads
    its files again uses a new value. `check` raises InvalidArgument with what to give instead for values that
    are wrong in another way.
    """

    table: str
    key: str
    kind: Any
    meaning: str
    unit: str
    minimum: float
    effect: Effect
    check: Callable[[Any], object] | None

    @property
    def name(self) -> str:
        """The full name, such as `limits.max_queue`."""
        return f"{self.table}.{self.key}"


def setting(
    meaning: str,
    default: Any = dataclasses.MISSING,
    *,
    share: Callable[[MemoryShares], Any] | None = None,
    unit: str = "",
    minimum: float = 1,
    effect: Effect = "at once",
    check: Callable[[Any], object] | None = None,
) -> Any:
    """Return a field of a table; `share` returns the default, and the other arguments are `Setting`'s."""
    metadata = {"meaning": meaning, "unit": unit, "minimum": minimum, "effect": effect, "check": check}
    if share is not None:
        return field(default_factory=lambda: share(own_shares()), metadata=metadata)
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def of_table(table: str, kind: type[Any]) -> list[Setting]:
    """Return the settings of a table, in the order of its fields."""
    hints = typing.get_type_hints(kind)
    return [
        Setting(table=table, key=each.name, kind=hints[each.name], **each.metadata)
        for each in dataclasses.fields(kind)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The [service] table. A device is a spec as `honed.machine.devices.select` takes it."""

    socket: Path = setting("The Unix socket, unless systemd passes one (honed.socket)", effect="restart")
    state_dir: Path = setting("Models and records. Losing this folder loses the models", effect="restart")
    cache_dir: Path = setting(
        "Built kernels, measured peaks, verifications. May be emptied while the service is stopped",
        effect="restart",
    )
    device: str = setting(
        "The default OpenCL device, by number, kind or part of its name. Empty: the first of `devices`, else "
        "a GPU, an accelerator or the CPU",
        "",
        effect="restart",
    )
    devices: tuple[str, ...] = setting(
        "More devices to use at the same time, each with its own worker", (), effect="restart"
    )
    placement: dict[str, str] = setting(
        'Devices of single models, as `{lightglue = "mali"}`. It overrides `hone add --device`',
        {},
        effect="restart",
    )
    fallback: str = setting(
        "The device that serves the models of a lost device until it is back. Empty: none",
        "cpu",
        effect="restart",
    )


def check_engine(name: str) -> None:
    """Raise InvalidArgument unless the name is one of ENGINES."""
    if engine_word(name) not in ENGINES:
        raise InvalidArgument(USABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The [serve] table; `engine` is that of models that request none."""

    engine: str = setting(
        "The engine for models without `hone add --engine`: `fastest`, `opencl` (compiled forms only) or "
        "`onnxruntime` (nothing is compiled)",
        "fastest",
        effect="restart",
        check=check_engine,
    )

    def __post_init__(self) -> None:
        """Convert the name of an engine to its kind."""
        object.__setattr__(self, "engine", engine_word(self.engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSettings:
    """The [cpu] table, of the CPU engine.

    `memory_mib` limits its process, the one that tries models out, and those that run partitions, each.
    """

    threads: int = setting(
        "Threads of one model, or of one partition, in the CPU engine. 0: one for each core, or for "
        "each big core",
        0,
        minimum=0,
        effect="restart",
    )
    memory_mib: int = setting(
        "Memory of each process of the CPU engine. 0: no limit",
        share=lambda its: its.cpu,
        unit="MiB",
        minimum=0,
        effect="restart",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The [hub] table. The service uses `trials` alone: the network is honed-hub's."""

    url: str = setting("The hub to read: a URL, or the path of a folder. Empty: nothing is shared", "")
    push_url: str = setting("Where records of this machine go. Empty: `hub.url`", "")
    owner: str = setting(
        "The key of the hub's owner, whose list names trusted machines. Empty: trust no list", ""
    )
    keys: dict[str, str] = setting('Trusted keys, by a name for each: `{attic = "RW..."}`', {})
    pull: bool = setting("honed-hub pulls when a model was added, and every `hub.hours`", True)
    push: bool = setting("honed-hub pushes once a day after something was tuned", True)
    hold: bool = setting("true: honed-hub only looks; `hone hub pull` takes the records", False)
    hours: float = setting(
        "Interval between two pulls; up to four times as long on a busy machine", 6.0, unit="h", minimum=0.1
    )
    trials: int = setting(
        "Trials of one task in a day that others' records may cost. 0: try none", 4, minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSettings:
    """The [variants] table: models compiled for further shapes and sizes."""

    requests: float = setting(
        "Recent requests in the same shapes after which a variant is compiled in idle time", 20.0, minimum=1
    )
    per_model: int = setting("Variants of one model. 0: none is compiled in idle time", 16, minimum=0)
    sizes: int = setting(
        "Size specialisations of a partition whose sizes depend on the data. 0: none", 4, minimum=0
    )
    disk_mib: int = setting("Files of all variants", 4096, unit="MiB", minimum=0)
    memory_mib: int = setting(
        "Device memory of loaded variants; the least recently used are unloaded",
        share=lambda its: its.variants,
        unit="MiB",
        minimum=0,
    )

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
    """The [limits] table.

    The service has one instance, which changes when its configuration is read again: take a value from it
    when it is needed.
    """

    max_connections: int = setting("Open connections of all users together", 256)
    max_user_connections: int = setting("Open connections of one user", 128)
    max_unanswered: int = setting(
        "Unanswered requests of one connection; the service then reads no further", 64
    )
    max_message_bytes: int = setting(
        "One message; larger tensors go through shared memory",
        share=lambda its: its.message << 20,
        unit="bytes",
        minimum=4096,
        effect="new connections",
    )
    max_user_bytes: int = setting(
        "Unanswered messages and unread answers of one user",
        share=lambda its: min(256, its.messages) << 20,
        unit="bytes",
        minimum=4096,
    )
    max_all_bytes: int = setting(
        "The sum over all users", share=lambda its: its.messages << 20, unit="bytes", minimum=4096
    )
    message_seconds: float = setting(
        "From the first byte of a message to its last", 30.0, unit="s", minimum=0.1, effect="new connections"
    )
    write_seconds: float = setting(
        "Time in which a client must read its answers", 30.0, unit="s", minimum=0.1, effect="new connections"
    )
    max_regions: int = setting("Shared-memory regions of one connection", 64, effect="new connections")
    max_queue: int = setting("Inferences that wait for one device", 256)
    run_seconds: float = setting(
        "One inference on the device. A worker that takes longer is restarted", 60.0, unit="s", minimum=0.1
    )
    load_seconds: float = setting(
        "The worker's start, and building one kernel of a model", 300.0, unit="s", minimum=1
    )
    worker_memory_mib: int = setting(
        "Memory of a worker; the process that builds for it may take `compile_memory_mib` if that is "
        "more. 0: no limit",
        share=lambda its: its.worker,
        unit="MiB",
        minimum=0,
        effect="restart",
    )
    max_models: int = setting("Models in the store", 256)
    max_model_bytes: int = setting("A model with its external data", 2 << 30, unit="bytes")
    max_jobs: int = setting("Models being added at a time; they are compiled in turn", 8)
    compile_seconds: float = setting("Compiling one model", 1800.0, unit="s", minimum=1)
    compile_memory_mib: int = setting(
        "Memory of the compiler", share=lambda its: its.compiler, unit="MiB", minimum=128
    )
    stop_seconds: float = setting(
        "Finishing queued requests when the service stops", 20.0, unit="s", minimum=0
    )

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
