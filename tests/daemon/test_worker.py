"""The serving worker as a process, asked directly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from honed.daemon.limits import Limits
from honed.daemon.supervisor import Supervisor
from honed.runtime.errors import NotFound
from tests.runtime.builder import add_constant

pytestmark = [pytest.mark.service, pytest.mark.opencl]
SECONDS = 60.0  # that an answer may take


def test_a_duel_goes_on_when_another_model_is_unloaded(tmp_path: Path, service_cache: Path) -> None:
    """Models are removed while others are published."""
    paths = {name: add_constant(8).write(tmp_path / f"{name}.honed") for name in ("old", "new", "other")}

    async def go() -> None:
        worker = Supervisor(Limits(), service_cache, "")

        async def duel(turn: int) -> str:
            answer = await worker.call("Duel", {"old": "old", "new": "new", "turn": turn}, seconds=SECONDS)
            return str(answer["wrong"])

        running = asyncio.ensure_future(worker.run())
        try:
            await worker.wait_ready(SECONDS)
            for name, path in paths.items():
                await worker.call("Load", {"key": name, "path": str(path)}, seconds=SECONDS)
            assert await duel(0) == ""
            await worker.call("Unload", {"key": "other"}, seconds=SECONDS)
            assert await duel(1) == ""
            await worker.call("Unload", {"key": "new"}, seconds=SECONDS)
            with pytest.raises(NotFound, match="unloaded while they were compared"):
                await duel(2)
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(go())
