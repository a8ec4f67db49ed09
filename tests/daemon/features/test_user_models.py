"""Whose model is compiled when, and files that never end; without a service."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.daemon.background import Background
from honed.daemon.features import user_models
from honed.daemon.features.user_models import AppsSettings, Receiver, UserModels, UserQuotas
from honed.daemon.settings import places
from honed.daemon.store.files import StoredFile
from honed.daemon.store.store import EngineDecision
from honed.protocol.errors import DeadlineExceeded, ResourceExhausted
from honed.protocol.params import UploadParams
from tests.daemon.running import DEADLINE

PARAMS = UploadParams(files=("m.onnx",), sha256=("0" * 64,))


@dataclass
class Jobs:
    """Compiles nothing; `compiling` is what it would be at."""

    adding: int = 0
    begun: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    stopped_in_all: int = 0
    leaving: set[str] = field(default_factory=set)
    ends: asyncio.Event = field(default_factory=asyncio.Event)

    async def resume(self, manifest: Any, seconds: float) -> None:
        self.begun.append(manifest.name)
        await self.ends.wait()
        self.ends.clear()
        if manifest.name not in self.stopped:
            manifest.decision.reason = "compiled"
        else:
            self.stopped.remove(manifest.name)

    async def stop_compiling(self, name: str) -> None:
        self.stopped.append(name)
        self.stopped_in_all += 1
        self.ends.set()


def entry(name: str, owner: int | None, added: float) -> Any:
    manifest = SimpleNamespace(
        name=name,
        owner=owner,
        added=added,
        compiled=None,
        decision=EngineDecision(requested="fastest"),
        for_app=False,
    )
    return SimpleNamespace(name=name, manifest=manifest, on_cpu=True)


def bringer(jobs: Jobs, entries: list[Any]) -> UserModels:
    by_name = {each.name: each for each in entries}
    registry = SimpleNamespace(models=lambda: entries, find=by_name.get)
    made: dict[str, Any] = {"registry": registry, "installer": jobs, "changes": jobs}
    made |= {"leasing": None, "shares_file": SimpleNamespace(shares=UserQuotas())}
    return UserModels(settings=AppsSettings, receiver=Receiver(1.0), policy="fastest", **cast(Any, made))


def in_background(running: UserModels) -> Background:
    """What has its work done, on a machine that is never idle."""
    leasing: Any = SimpleNamespace(look_seconds=lambda: 0.001, idle=lambda: SimpleNamespace(idle=False))
    return Background(leasing=leasing, jobs=(), sources=(running,))


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.001)


def test_users_take_turns_and_administrators_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_models, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(places, "compiler", lambda: True)

    async def turns() -> None:
        jobs = Jobs(adding=1, leaving={"removed"})
        mine = [entry(f"greedy-{n}", 1, float(n)) for n in range(3)]
        entries = [*mine, entry("modest", 2, 10.0), entry("small", None, 0.0), entry("removed", 3, 0.0)]
        running = bringer(jobs, entries)
        task = asyncio.ensure_future(in_background(running).run())
        await asyncio.sleep(0.02)
        assert jobs.begun == [], "an administrator's is being added"
        jobs.adding = 0
        await until(lambda: jobs.begun == ["greedy-0"])
        jobs.adding = 1
        await until(lambda: jobs.stopped_in_all == 1)
        await until(lambda: running.shares.spent)
        assert mine[0].manifest.decision.reason == "", "it was interrupted"
        jobs.adding = 0
        await until(lambda: len(jobs.begun) == 2)
        assert jobs.begun[1] == "modest", "who had nothing of the day comes before who had something"
        jobs.ends.set()
        await until(lambda: len(jobs.begun) == 3)
        assert jobs.begun[2].startswith("greedy")
        ended = jobs.stopped_in_all
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert jobs.stopped_in_all == ended + 1, "what is being compiled ends with the service"

    asyncio.run(turns())


def test_a_file_that_does_not_end_holds_up_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = threading.Event()

    def endless(descriptor: int, name: str, folder: Path, limit: int) -> tuple[StoredFile, Path]:
        blocked.wait()
        raise AssertionError

    monkeypatch.setattr(user_models, "receive", endless)

    async def tried() -> None:
        receiver = Receiver(0.01)
        with (tmp_path / "m").open("wb") as file:
            given = [file.fileno()]
            for _ in range(2):
                with pytest.raises(DeadlineExceeded, match="copy them to a local disk"):
                    await receiver.receive(PARAMS, given, tmp_path, 1, 100)
            with pytest.raises(ResourceExhausted, match="still being read"):
                await receiver.receive(PARAMS, given, tmp_path, 1, 100)
            with pytest.raises(DeadlineExceeded):
                await receiver.receive(PARAMS, given, tmp_path, 2, 100)  # another user is not affected
            blocked.set()
            await until(lambda: not receiver._reading)

    asyncio.run(tried())


def test_a_user_brings_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def flooded() -> None:
        running = bringer(Jobs(), [])
        taken: list[str] = []

        async def take(self: UserModels, user: int, name: str, *rest: object) -> Any:
            taken.append(name)
            await asyncio.Event().wait()

        monkeypatch.setattr(UserModels, "_take", take)
        with (tmp_path / "m").open("wb") as file:
            given = [file.fileno()]

            def brings(user: int, number: int) -> asyncio.Task[Any]:
                params = UploadParams(files=("m.onnx",), sha256=(f"{number:064x}",))
                work = running.bring(user, params, given, lambda _: None, nullcontext())
                return asyncio.ensure_future(work)

            waiting = [brings(1, number) for number in range(user_models.MAX_WAITING)]
            again = brings(1, 0)
            await until(lambda: len(taken) == user_models.MAX_WAITING)
            with pytest.raises(ResourceExhausted, match="at a time"):
                await brings(1, 99)
            other = brings(2, 99)
            await until(lambda: len(taken) == user_models.MAX_WAITING + 1)
            waiting[0].cancel()
            await asyncio.wait([waiting[0]])
            of_first = [each for each in running._under_way.values() if each.user == 1]
            assert len(of_first) == user_models.MAX_WAITING, "another request waits for it"
            for task in (*waiting, again, other):
                task.cancel()
            await asyncio.wait([*waiting, again, other])
            assert not running._under_way, "nobody waits for any"
            await running.close()

    asyncio.run(flooded())
