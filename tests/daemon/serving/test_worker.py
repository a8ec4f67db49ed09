"""The serving worker as a process, asked directly."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from honed.daemon.core.machine import Machine
from honed.daemon.core.messages import WorkerLost, WorkerReady
from honed.daemon.core.state import Registry
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.settings.schema import Limits
from honed.daemon.store.store import Store
from honed.daemon.worker.calls import BuildModel, FindDevice, OpenDevice, Ping, RunComparison, UnloadModel
from honed.daemon.worker.supervisor import NoWorker, WorkerDied, device_program
from honed.daemon.worker.worker import Worker
from honed.runtime.errors import DeviceError, NotFound
from tests.runtime.builder import add_constant

from .vendors import Vendors

pytestmark = [pytest.mark.service, pytest.mark.opencl]
SECONDS = 60.0  # that an answer may take


class Kept(EngineServer):
    """Keeps a worker, tells the core of it, and notes what it tells."""

    def __init__(self, cache_dir: Path) -> None:
        self._core = Machine(Registry(), ("",), "", 1)
        self.expected: list[str] = []  # models
        self.order: list[str] = []
        expected = cast(Registry, SimpleNamespace(of=lambda _: self.expected))
        program, nothing = device_program("", 0), cast(Store, None)
        super().__init__(self._core.engines[""], program, Limits(), cache_dir, expected, nothing)

    async def live(self) -> None:
        await self.run(self._note)

    def _note(self, event: WorkerReady | WorkerLost) -> None:
        self.order.append("begun" if isinstance(event, WorkerReady) else "ended")
        self._core.handle(event, 0.0, 0.0)


def test_a_comparison_goes_on_when_another_model_is_unloaded(tmp_path: Path, cache_dir: Path) -> None:
    """Models are removed while others are published."""
    paths = {name: add_constant(8).write(tmp_path / f"{name}.honed") for name in ("old", "new", "other")}

    async def go() -> None:
        kept = Kept(cache_dir)
        worker = kept.supervisor

        async def compared(pair: int, which: int) -> str:
            call = RunComparison(old="old", new="new", pair=pair, which=which)
            return (await worker.call(call, seconds=SECONDS)).wrong

        running = asyncio.ensure_future(kept.live())
        try:
            await kept.wait_ready(SECONDS)
            await worker.open()
            for name, path in paths.items():
                await worker.call(BuildModel(key=name, path=str(path)), seconds=SECONDS)
            assert await compared(0, 0) == ""
            await worker.call(UnloadModel(key="other"), seconds=SECONDS)
            assert await compared(0, 1) == ""
            await worker.call(UnloadModel(key="new"), seconds=SECONDS)
            with pytest.raises(NotFound, match="unloaded while they were compared"):
                await compared(1, 1)
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(go())


def test_whose_call_was_cut_short_knows_before_the_loss_is_told(cache_dir: Path) -> None:
    """Also where the process is known to have ended before its socket is, as on a busy machine."""

    async def go() -> list[str]:
        kept = Kept(cache_dir)
        worker = kept.supervisor

        async def ask() -> None:
            with suppress(WorkerDied):
                await worker.call(Ping(), seconds=SECONDS)
            kept.order.append("told")

        running = asyncio.ensure_future(kept.live())
        try:
            await kept.wait_ready(SECONDS)
            os.kill(worker.pid, signal.SIGSTOP)
            asking = asyncio.ensure_future(ask())
            await asyncio.sleep(0)
            assert worker._link is not None
            asyncio.get_running_loop().remove_reader(worker._link._socket)
            os.kill(worker.pid, signal.SIGKILL)
            await asking
            await kept.wait_ready(SECONDS)
        finally:
            running.cancel()
            await asyncio.wait([running])
        return kept.order

    order = asyncio.run(go())
    assert order == ["begun", "told", "ended", "begun"]


def test_a_worker_killed_while_it_starts_tells_how_it_ended(cache_dir: Path) -> None:
    """The engine is failing from the second one in a row on, and no longer once one is ready."""

    async def go() -> list[tuple[str, bool]]:
        kept = Kept(cache_dir)
        worker, ends = kept.supervisor, []

        def note(event: WorkerReady | WorkerLost) -> None:
            if isinstance(event, WorkerReady):
                ready.set()
            else:
                ends.append((event.reason, event.failed))

        ready = asyncio.Event()
        running = asyncio.ensure_future(worker.run(note))
        try:
            for starts in (1, 2):
                while not (worker.starts == starts and worker.pid):
                    await asyncio.sleep(0.001)
                os.kill(worker.pid, signal.SIGKILL)
            async with asyncio.timeout(SECONDS):
                await ready.wait()
        finally:
            running.cancel()
            await asyncio.wait([running])
        return ends

    reason = "it was ended by signal SIGKILL"
    assert asyncio.run(go()) == [(reason, False), (reason, True)]


def test_a_call_that_takes_too_long_is_the_cause_and_no_other(cache_dir: Path) -> None:
    """The others under way are told that there is no worker, and are run again."""

    async def go() -> list[type[BaseException]]:
        kept = Kept(cache_dir)
        worker = kept.supervisor
        running = asyncio.ensure_future(kept.live())
        try:
            await kept.wait_ready(SECONDS)
            os.kill(worker.pid, signal.SIGSTOP)
            asked: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            worker.ask(Ping(), asked.set_result, seconds=SECONDS)
            calls = [worker.call(Ping(), seconds=seconds) for seconds in (SECONDS, 0.1, SECONDS)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            return [*map(type, ends), type(await asked)]  # type: ignore[list-item]
        finally:
            running.cancel()
            await asyncio.wait([running])

    assert asyncio.run(go()) == [NoWorker, WorkerDied, NoWorker, NoWorker]


@pytest.mark.slow
def test_the_driver_is_loaded_for_the_first_model(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one it is not, and may be exchanged meanwhile: the next worker finds what there is then."""
    vendors = Vendors(tmp_path)
    vendors.have("basic")
    for name, value in vendors.environment.items():
        monkeypatch.setenv(name, value)

    async def go() -> None:
        kept = Kept(cache_dir)
        worker = kept.supervisor

        def driver_is_loaded() -> bool:
            return str(tmp_path) in Path(f"/proc/{worker.pid}/maps").read_text()

        running = asyncio.ensure_future(kept.live())
        try:
            await kept.wait_ready(SECONDS)
            assert not driver_is_loaded()
            vendors.have("pthread")
            with pytest.raises(WorkerDied, match="fits no device"):
                await worker.open()
            vendors.have("basic")
            await kept.wait_ready(SECONDS)
            await worker.open()
            assert driver_is_loaded()
            await worker.open()
            assert worker.starts == 2
            kept.expected.append("small")
            worker.kill("for the test")
            await kept.wait_ready(SECONDS)
            assert driver_is_loaded()
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(go())


def test_what_only_builds_measures_no_peaks(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = Worker(theirs, tmp_path, "")._find(FindDevice(models=True, measure_seconds=None))
    assert found.profile.peaks is None
    assert not list(tmp_path.iterdir())


def test_another_version_of_the_driver_is_not_taken_for_the_one_that_was_found(cache_dir: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(theirs, cache_dir, "")
        worker._find(FindDevice(models=False, measure_seconds=60.0))
        found = worker._found
        assert found is not None
        worker._found = replace(found, identity=replace(found.identity, driver_version="updated"))
        with pytest.raises(DeviceError, match="has changed"):
            worker._open(OpenDevice())
        worker._found = found
        worker._open(OpenDevice())


NICER = """
import os
import threading
from honed.daemon.worker import worker
os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 54321)
os.nice(NICE)
worker._be_nice()
print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("niceness", [0, 15])
def test_one_that_is_nice_already_needs_no_privilege_to_build(niceness: int) -> None:
    """A build process that nobody waits for is nicer than its thread asks for; the tests may be nice, too."""
    wanted = max(10, min(19, os.nice(0) + niceness))
    code = NICER.replace("NICE)", f"{niceness})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{wanted}\n"), done.stderr


def test_what_builds_may_take_what_the_compiler_may() -> None:
    """A driver's compiler takes more than what it makes; without a limit of the worker there is none."""
    program = device_program("0", 200, building_mib=500)
    assert program.bound == "200 MiB of limits.worker_memory_mib"
    assert program.building.bound == "500 MiB of limits.compile_memory_mib"
    for most in (0, 600):
        unchanged = device_program("0", most, building_mib=500)
        assert unchanged.building is unchanged
