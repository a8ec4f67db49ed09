"""Keeps the compiled files in one worker those of the registry, and compares them with their proofs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime.errors import HonedError, ModelRefused

from .building import Builder, BuilderLost, Progress
from .limits import Limits
from .models import Entry, Registry, State
from .proven import Proven
from .store import Store
from .supervisor import Supervisor, WorkerLost
from .versions import Duel

# After each run that is not a request's, requests have the device to themselves for so many times as long.
_PAUSE_RUNS, _LONGEST_PAUSE_SECONDS = 10, 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A compiled file is in worker number `worker` of `lane`, which compared it with its probes.

    `left` are the numbers of those probes that it was not compared with yet.
    """

    lane: str
    worker: int
    checked: dict[str, Any]
    left: tuple[int, ...] = ()


class Loader:
    """Loads and forgets compiled files in the worker of `lane`.

    `on_loaded` is called after each model that may serve, `on_given_up` with one that cannot, and why.
    `wanted` tells the names of models that requests wait for, `idle_seconds` how long there was no request.
    """

    def __init__(
        self,
        lane: str,
        limits: Limits,
        supervisor: Supervisor,
        registry: Registry,
        store: Store,
        cache_dir: Path,
    ) -> None:
        """`cache_dir` remembers which files were proven."""
        self.lane = lane
        self.builder = Builder(limits, cache_dir, supervisor)
        self._cache_dir = cache_dir
        self._limits = limits
        self._supervisor = supervisor
        self._registry = registry
        self._store = store
        self._kept: Counter[str] = Counter()  # by key, models being added
        self._tasks: set[asyncio.Task[Any]] = set()
        supervisor.expects_models = lambda: bool(registry.of(lane))
        self._dueling = asyncio.Lock()  # the worker knows one pair at a time
        self.wanted: Callable[[], set[str]] = set
        self.idle_seconds: Callable[[], float] = lambda: float("inf")
        self.on_loaded: Callable[[], None] = lambda: None
        self.on_given_up: Callable[[Entry, str], None] = lambda _, __: None

    async def load(
        self, key: str, path: str, *, hurried: bool = True, progress: Progress = lambda _, __: None
    ) -> Loaded:
        """Have a compiled file built and proven in a process of its own, and then loaded by the worker.

        A file that the device has proven before is not built apart again. Inferences go on meanwhile, and
        wait for one probe at most. `hurried` and `progress` as in `Builder.prove`. Raises ModelRefused where
        an answer is wrong, DeviceError where the device cannot build or hold the model, and WorkerLost where
        the worker, or the process that builds, died of it.
        """
        await self._prove_apart(key, path, hurried=hurried, progress=progress)
        return await self._load(key, path)

    async def _prove_apart(
        self, key: str, path: str, *, hurried: bool = True, progress: Progress = lambda _, __: None
    ) -> bool:
        """False where that was not needed."""
        proven = self._proven()
        if proven.knows(key):
            return False
        await self.builder.prove(key, path, hurried=hurried, progress=progress)
        proven.note(key)
        return True

    async def _load(self, key: str, path: str, *, restored: bool = False) -> Loaded:
        """Have the worker load a compiled file that this device has proven before.

        Its first probe is enough. One that is `restored` served before, so that requests may wait for it: it
        does not give way to others.
        """
        worker = self._supervisor.starts
        await self._supervisor.open()
        built = await self._supervisor.call(
            "Load", {"key": key, "path": path}, seconds=self._limits.load_seconds
        )
        outputs: list[dict[str, Any]] = []
        probes = tuple(range(built["probes"]))
        enough = 1 if self._proven().knows(key) else len(probes)
        try:
            for probe in probes[:enough]:
                outputs = await self._check(key, probe, give_way=not restored)
        except ModelRefused:
            self._forget(key)
            self.tell("Unload", {"key": key})
            raise
        left = probes[enough:]
        if not left:
            self._proven().note(key)
        return Loaded(self.lane, worker, {"device": built["device"], "outputs": outputs}, left)

    async def _check(self, key: str, probe: int, *, give_way: bool) -> list[dict[str, Any]]:
        """The worst of every output so far; raises ModelRefused where an answer is wrong."""
        answer = await self._careful("Check", {"key": key, "probe": probe}, give_way=give_way)
        outputs: list[dict[str, Any]] = answer["outputs"]
        return outputs

    def _proven(self) -> Proven:
        assert self._supervisor.profile is not None
        return Proven(self._cache_dir, self._supervisor.profile.identity)

    def _forget(self, key: str) -> None:
        try:
            self._proven().forget(key)
        except OSError as error:
            _log.error("that a model is to be proven anew cannot be remembered: %s", error)

    async def duel(self, old: str, new: str, rounds: int) -> Duel:
        """Two loaded files side by side, at least `rounds` runs each; inferences wait for one run at most.

        Stops at the first wrong answer. Raises WorkerLost where the worker died of it.
        """
        taken: tuple[list[int], list[int]] = ([], [])
        wrong, turn = "", 0
        async with self._dueling:
            while turn < 2 * rounds and not wrong:
                answer = await self._careful("Duel", {"old": old, "new": new, "turn": turn})
                taken[turn % 2].append(answer["ns"])
                wrong = answer["wrong"]
                rounds = max(rounds, answer["sets"])
                turn += 1
        return Duel(old=tuple(taken[0]), new=tuple(taken[1]), wrong=wrong)

    async def median_us(self, key: str, rounds: int) -> float:
        """Of one run of a loaded file, in microseconds; raises as `duel`."""
        duel = await self.duel(key, key, rounds)
        return statistics.median((*duel.old, *duel.new)) / 1000

    async def _careful(self, method: str, params: dict[str, Any], *, give_way: bool = True) -> dict[str, Any]:
        """A call that runs a model; a device that failed in it is not used again.

        With `give_way` requests may run before the next.
        """
        begun = time.monotonic()
        answer = await self._supervisor.call(method, params, seconds=self._limits.run_seconds)
        if "spoilt" in answer:
            self._supervisor.kill(f"the device failed: {answer['spoilt']}")
            raise WorkerLost(answer["spoilt"])
        if give_way:
            await self._give_way(time.monotonic() - begun)
        return answer

    async def _give_way(self, taken: float) -> None:
        """Let requests run, if there are any, so that a series of runs delays each of them by one at most."""
        end = time.monotonic() + min(_PAUSE_RUNS * taken, _LONGEST_PAUSE_SECONDS)
        while self.idle_seconds() < taken and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(taken, left))

    @contextmanager
    def keeping(self, key: str) -> Iterator[None]:
        """While this lasts the worker keeps a compiled file that no name stands for yet."""
        self.keep(key)
        try:
            yield
        finally:
            self.let_go(key)

    def keep(self, key: str) -> None:
        """The worker keeps a compiled file until `let_go`, whatever the names stand for."""
        self._kept[key] += 1

    def let_go(self, key: str) -> None:
        """End one `keep`."""
        self._kept[key] -= 1
        self.unload(key)

    def unload(self, key: str) -> None:
        """Have the worker forget a compiled file, unless a name stands for it or it is kept."""
        if not self._registry.users(key, self.lane) and not self._kept[key]:
            del self._kept[key]
            self.tell("Unload", {"key": key})

    def admit(self, entry: Entry, loaded: Loaded) -> None:
        """A model entered the registry; if its worker is gone since, the present one must load it too."""
        here = (self.lane, self._supervisor.starts) == (loaded.lane, loaded.worker)
        if here and self._supervisor.state == "ready":
            entry.ready(loaded.checked)
            self.on_loaded()
        else:
            self.reload()

    def reload(self) -> None:
        """Models of the registry may lack in the worker: have it load them."""
        if self._supervisor.state == "ready":
            self._in_background(self.load_all())

    async def load_all(self) -> None:
        """Give a fresh worker its models, those that requests wait for first."""
        wanted = self.wanted()
        entries = [entry for entry in self._registry.of(self.lane) if entry.state is State.LOADING]
        unproven: list[tuple[Entry, Loaded]] = []
        for entry in sorted(entries, key=lambda e: (e.load_crashes, e.name not in wanted)):
            if self._gone(entry) or entry.state is not State.LOADING:
                continue
            try:
                loaded = await self._load_entry(entry)
            except WorkerLost:
                return  # the next worker's turn
            if self._gone(entry):
                self.unload(entry.key)  # it was removed meanwhile
            elif loaded is not None and loaded.left:
                unproven.append((entry, loaded))
            self.on_loaded()
        if unproven:
            self._in_background(self._prove(unproven))

    async def _prove(self, entries: list[tuple[Entry, Loaded]]) -> None:
        """Compare models that serve already with the probes that are left."""
        for entry, loaded in entries:
            key = entry.key
            try:
                for probe in loaded.left:
                    if self._gone(entry) or self._supervisor.starts != loaded.worker:
                        break
                    outputs = await self._check(key, probe, give_way=True)
                    entry.checked = {**loaded.checked, "outputs": outputs}
            except WorkerLost:
                self._forget(key)  # this may have been its doing: the next worker proves it before it serves
                return
            except HonedError as error:
                self._forget(key)
                for other in self._registry.of(self.lane):
                    if other.key == key and other.state is State.READY:
                        self.on_given_up(other, str(error))
                self.tell("Unload", {"key": key})

    async def _load_entry(self, entry: Entry) -> Loaded | None:
        """None where nothing was loaded. Raises WorkerLost."""
        twin = self._twin(entry)
        if twin is not None:
            entry.ready(twin.checked)
            return None
        path = str(self._store.object(entry.manifest.compiled))
        try:
            proven_now = await self._prove_apart(entry.key, path)
            loaded = await self._load(entry.key, path, restored=True)
            if proven_now:
                loaded = dataclasses.replace(loaded, left=())
        except WorkerLost as error:
            if not self._gone(entry):
                entry.load_crashes += 1
                if entry.load_crashes > 1:
                    reason = f"{entry.load_crashes} workers failed loading it; last: {error}"
                    self.on_given_up(entry, reason)
                elif isinstance(error, BuilderLost):
                    return await self._load_entry(entry)
            if isinstance(error, BuilderLost):
                return None
            raise
        except HonedError as error:
            if not self._gone(entry):
                self.on_given_up(entry, str(error))
            return None
        if not self._gone(entry):
            entry.ready(loaded.checked)
        return loaded

    def _gone(self, entry: Entry) -> bool:
        """Whether the model was removed, replaced or moved meanwhile."""
        return self._registry.find(entry.name) is not entry or entry.lane != self.lane

    def _twin(self, entry: Entry) -> Entry | None:
        """A ready model of the same compiled file."""
        for other in self._registry.of(self.lane):
            if other is not entry and other.key == entry.key and other.state is State.READY:
                return other
        return None

    def tell(self, method: str, params: dict[str, Any]) -> None:
        """A call in the background whose failure changes nothing."""
        self._in_background(self._tell(method, params))

    async def _tell(self, method: str, params: dict[str, Any]) -> None:
        """A call whose answer changes nothing; a worker that is gone has forgotten anyway."""
        try:
            await self._supervisor.call(method, params, seconds=self._limits.run_seconds)
        except WorkerLost:
            pass
        except HonedError as error:
            _log.warning("the worker refused %s: %s", method, error)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
