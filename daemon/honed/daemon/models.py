"""The models being served: their state and what is known about them. No I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from honed.runtime import strict
from honed.runtime.errors import NotFound, Unavailable

from .compiled import Compiled
from .inference import describe
from .statistics import Statistics
from .store import Manifest

MAX_CRASHES_AN_HOUR = 6  # of workers that ran one model and that nobody else ended
MAX_CRASHES = 4  # in a row, of workers that ran one model: two requests with two attempts each


_HOUR = 3600.0


class State(enum.Enum):
    """Whether a model can be run; the values are the protocol's."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, kw_only=True)
class Entry:
    """A model with a name. `compiled` is None where its file could not be read.

    `home` is the device it belongs to and `lane` the one that serves it, by configured name; `away` says why
    these differ, or "".
    """

    manifest: Manifest
    compiled: Compiled | None
    home: str = ""
    lane: str = ""
    away: str = ""
    state: State = State.LOADING
    reason: str = ""
    checked: dict[str, Any] | None = None  # the worker's comparison on this device
    crashes: int = 0  # workers in a row that died running it
    load_crashes: int = 0  # workers that died loading it
    crash_times: tuple[float, ...] = ()  # of the last hour, in monotonic seconds
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.manifest.name

    @property
    def key(self) -> str:
        """What the worker calls it: the compiled file's SHA-256."""
        return self.manifest.compiled.sha256

    @property
    def at_home(self) -> bool:
        """Whether the device it belongs to serves it."""
        return self.lane == self.home

    @property
    def remark(self) -> str:
        """What users should know of its state, or ""."""
        return self.reason or self.away

    def crashed(self, now: float) -> int:
        """A worker died running it; gives how many did within an hour."""
        self.crash_times = (*(t for t in self.crash_times if now - t < _HOUR), now)
        return len(self.crash_times)

    def fail(self, reason: str) -> None:
        """The model cannot be run until the service starts again."""
        self.state, self.reason = State.UNAVAILABLE, reason

    def ready(self, checked: dict[str, Any] | None) -> None:
        """The worker has loaded it and found it right."""
        self.state, self.reason, self.checked, self.load_crashes = State.READY, "", checked, 0


class Registry:
    """The models by name. `whole` counts the requests for all of them, those gone and those unknown too."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self.whole = Statistics()

    def put(self, entry: Entry) -> Entry | None:
        """Enter a model; gives the one it replaces, whose statistics it goes on with."""
        replaced = self._entries.get(entry.name)
        entry.statistics = replaced.statistics if replaced else Statistics(whole=self.whole)
        self._entries[entry.name] = entry
        return replaced

    def get(self, name: str) -> Entry:
        """The model of that name; raises NotFound."""
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound(f"there is no model {name[:80]!r}; 'hone list' shows which there are")
        return entry

    def find(self, name: str) -> Entry | None:
        """The model of that name, or None."""
        return self._entries.get(name)

    def statistics(self, name: str) -> Statistics:
        """Where requests for that name are counted."""
        entry = self._entries.get(name)
        return entry.statistics if entry else self.whole

    def compiled(self, name: str) -> tuple[Entry, Compiled]:
        """A model whose file is readable; raises NotFound or Unavailable."""
        entry = self.get(name)
        if entry.compiled is None:
            raise Unavailable(f"model {name!r} cannot be used: {entry.reason}")
        return entry, entry.compiled

    def pop(self, name: str) -> Entry:
        """Take a model out; raises NotFound."""
        entry = self.get(name)
        del self._entries[name]
        return entry

    def all(self) -> list[Entry]:
        """Every model, by name."""
        return [self._entries[name] for name in sorted(self._entries)]

    def of(self, lane: str) -> list[Entry]:
        """Every model that a device serves, by name."""
        return [entry for entry in self.all() if entry.lane == lane]

    def count(self, state: State) -> int:
        """How many models are in a state."""
        return sum(entry.state is state for entry in self._entries.values())

    def users(self, key: str, lane: str) -> int:
        """How many names stand for one compiled file on one device."""
        return sum(entry.key == key and entry.lane == lane for entry in self._entries.values())


def show(entry: Entry) -> dict[str, Any]:
    """The result of ModelShow but `placement`; raises Unavailable where the file is not readable."""
    model, manifest = entry.compiled, entry.manifest
    if model is None:
        raise Unavailable(f"model {entry.name!r} cannot be used: {entry.reason}")
    plain = strict.to_plain(model)
    source = plain["source"]
    notes = source.pop("notes")
    return {
        "name": entry.name,
        "state": entry.state.value,
        "reason": entry.remark,
        "sha256": manifest.compiled.sha256,
        "bytes": manifest.compiled.nbytes,
        "added": manifest.added,
        "source": source,
        "shapes": {name: list(shape) for name, shape in manifest.shapes.items()},
        "precision": manifest.precision,
        "notes": notes,
        "inputs": [describe(tensor) for tensor in model.inputs],
        "outputs": [describe(tensor) for tensor in model.outputs],
        "checked": entry.checked,
        **{key: plain[key] for key in _SHOWN},
    }


_SHOWN = (
    "compiler",
    "device",
    "proof",
    "kernels",
    "launches",
    "copies",
    "host_calls",
    "constant_bytes",
    "arena_bytes",
    "prepared_bytes",
)
