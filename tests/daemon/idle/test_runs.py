"""The tuner's jobs for clients: what is left of one that is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.daemon.tuning.runs import TunerRuns
from honed.protocol.params import TunerRunParams
from tests.daemon.stubs import StubTuner


class Staging:
    """A store whose staging folder is removed when it is let."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.leaving = threading.Event()
        self.may_leave = threading.Event()

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        yield self._folder
        self.leaving.set()
        self.may_leave.wait(60)


def _opened_below(folder: Path) -> list[str]:
    targets: list[str] = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{each}"))
    return [target for target in targets if target.startswith(str(folder))]


async def _cancelled_at_its_end(runs: TunerRuns, staging: Staging, work: Any) -> None:
    task = asyncio.ensure_future(work)
    await asyncio.to_thread(staging.leaving.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    staging.may_leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("exports", ["hints", "records"])
def test_an_export_whose_client_leaves_at_its_end_leaves_no_file_open(
    exports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubTuner(tmp_path)
    stub.behave('output = option("--output")\nopen(output, "w")\nsay(event="done", output=output, count=0)')
    for name, value in stub.environment.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "staging"
    folder.mkdir()
    staging = Staging(folder)
    anything = cast(Any, SimpleNamespace())
    runs = TunerRuns(
        limits=anything,
        store=cast(Any, staging),
        registry=anything,
        engines=anything,
        publisher=anything,
        tuner=anything,
        records=tmp_path / "records.sqlite",
        cache_dir=tmp_path,
        tuner_mib=0,
        hints=lambda: 0,
    )
    told: list[Any] = []
    if exports == "hints":
        work: Any = runs.export_hints(spread=False)
    else:
        work = runs.run(TunerRunParams(command="export"), (), told.append)
    asyncio.run(_cancelled_at_its_end(runs, staging, work))
    assert _opened_below(folder) == []
