"""What the loader does with the device while requests want it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any, cast

from honed.daemon.core.model import Engine
from honed.daemon.core.queue import Queue
from honed.daemon.core.state import Registry
from honed.daemon.serving.loader import Loader
from honed.daemon.settings.schema import Limits
from honed.daemon.worker.calls import (
    BuildModel,
    BuiltModel,
    ComparisonRun,
    Ping,
    RunComparison,
    UnloadModel,
    WorkerCall,
)
from honed.daemon.worker.supervisor import Supervisor
from honed.protocol.values import Empty, OrtSessionConfig

RUN_SECONDS = 0.005
ROUNDS = 4


class RunsInTurn:
    """In the place of a supervisor: a device that runs one thing at a time, and the order in which it did."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.pairs: list[tuple[str, str]] = []  # of the turns of comparisons
        self._device = asyncio.Lock()

    async def call(self, call: WorkerCall[Any], *, seconds: float) -> ComparisonRun:
        async with self._device:
            await asyncio.sleep(RUN_SECONDS)
            self.ran.append(call.method)
            if isinstance(call, RunComparison):
                self.pairs.append((call.old, call.new))
        return ComparisonRun(ns=1, sets=1)


@dataclass(slots=True, kw_only=True)
class Observed(Engine):
    """An engine that says how long it was idle, and counts who wants to know."""

    idle: float = 0.0
    asked: int = 0

    def idle_seconds(self, now: float) -> float:
        self.asked += 1
        return self.idle


def loader(device: RunsInTurn, engine: Engine) -> Loader:
    """Of nothing but the device."""
    nothing = cast(Any, None)
    return Loader(engine, Limits(), cast(Supervisor, device), Registry(), nothing, nothing)


def engine(idle: float) -> Observed:
    return Observed(name="", queue=Queue(1), idle=idle)


def test_requests_run_between_the_turns_of_a_comparison() -> None:
    async def go() -> list[str]:
        device = RunsInTurn()
        made = loader(device, engine(idle=0.0))

        async def client() -> None:
            while True:
                await device.call(Ping(), seconds=1)

        clients = [asyncio.ensure_future(client()) for _ in range(2)]
        await made.compare("old", "new", 1.0, most=ROUNDS)
        for task in clients:
            task.cancel()
        return device.ran

    ran = asyncio.run(go())
    turns = [i for i, method in enumerate(ran) if method == RunComparison.method]
    assert len(turns) == 2 * ROUNDS
    between = sorted(later - earlier - 1 for earlier, later in itertools.pairwise(turns))
    # Two wait for the device at any time: without a pause there are one or two between turns.
    assert between[len(between) // 2] >= 3


def test_a_comparison_does_not_pause_for_nobody() -> None:
    async def go() -> tuple[int, float]:
        device = RunsInTurn()
        idle = engine(idle=float("inf"))
        await loader(device, idle).compare("old", "new", 1.0, most=ROUNDS)
        return idle.asked, len(device.ran)

    asked, runs = asyncio.run(go())
    assert runs == 2 * ROUNDS
    assert asked == runs  # asked once after each, and not again


class ClocksUp(RunsInTurn):
    """Runs whose GPU has clocked up after three of them."""

    async def call(self, call: WorkerCall[Any], *, seconds: float) -> ComparisonRun:
        self.ran.append(call.method)
        return ComparisonRun(ns=2 if len(self.ran) <= 3 else 1, sets=1, clock_hz=min(len(self.ran), 4))


def test_runs_at_two_clocks_are_no_pair() -> None:
    idle = engine(idle=float("inf"))
    runs = asyncio.run(loader(ClocksUp(), idle).compare("old", "new", 1.0, most=ROUNDS)).runs
    assert (runs.tried, len(runs.pairs)) == (ROUNDS, 2)
    assert not runs.sure  # of two pairs; with those at two clocks there are enough
    assert runs.times == (1e-9, 1e-9)


def test_comparisons_do_not_mix() -> None:
    """The worker knows one pair at a time: mixed, each would be judged by runs of the other's versions."""

    async def go() -> list[tuple[str, str]]:
        device = RunsInTurn()
        made = loader(device, engine(idle=float("inf")))
        await asyncio.gather(
            made.compare("a1", "a2", 1.0, most=ROUNDS), made.compare("b1", "b2", 1.0, most=ROUNDS)
        )
        return device.pairs

    pairs = asyncio.run(go())
    assert len(pairs) == 4 * ROUNDS
    assert len(list(itertools.groupby(pairs))) == 2


class LoadsBeside(RunsInTurn):
    """A worker that loads files beside its other calls, and says at once what it has already."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = {"a"}
        self.unloads = asyncio.Event()

    async def open(self) -> None:
        """It has no device."""

    async def call(self, call: WorkerCall[Any], *, seconds: float) -> Any:
        match call:
            case UnloadModel(key=key):
                await self.unloads.wait()  # for its turn
                self.loaded.remove(key)
                return Empty()
            case BuildModel(key=key):
                self.loaded.add(key)
        return BuiltModel(device="", probes=1)


def test_what_is_about_to_be_unloaded_is_loaded_after_that() -> None:
    async def go() -> None:
        worker = LoadsBeside()
        made = loader(worker, engine(idle=0.0))
        unloads = [asyncio.create_task(made.unload("a"))]
        await asyncio.sleep(0)
        loads = [asyncio.create_task(made.try_session(key, key, OrtSessionConfig())) for key in ("a", "b")]
        await loads[1]
        assert worker.loaded == {"a", "b"}
        worker.unloads.set()
        await asyncio.gather(*unloads, *loads)
        assert worker.loaded == {"a", "b"}

    asyncio.run(go())
