"""What ended a compiler, or an engine that loaded a model, is said as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from honed.daemon.changes import compilation
from honed.daemon.core.model import CPU_ENGINE
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.settings.schema import Limits
from honed.daemon.worker.supervisor import WorkerDied
from honed.process.children import ExitInfo, JobCrashed
from honed.protocol.errors import ModelRefused


@pytest.mark.parametrize(
    ("death", "memory"),
    [
        (ExitInfo(status=1, said="EncodeError: Failed to serialize proto"), False),
        (ExitInfo(status=-11), False),
        (ExitInfo(status=-9), True),
        (ExitInfo(status=-6, said="terminate called after throwing an instance of 'std::bad_alloc'"), True),
    ],
)
def test_memory_is_named_only_where_it_was_the_cause(
    monkeypatch: pytest.MonkeyPatch, death: ExitInfo, memory: bool
) -> None:
    async def dies(*_: Any, **__: Any) -> None:
        raise JobCrashed(death)

    monkeypatch.setattr(compilation, "do", dies)
    job: Any = SimpleNamespace(memory_mib=700)
    with pytest.raises(ModelRefused, match="the compiler stopped without a result") as refused:
        asyncio.run(compilation.compile_model(job, 1.0, lambda _: None))
    assert ("700 MiB" in str(refused.value)) is memory
    assert str(death) in str(refused.value)


@pytest.mark.parametrize(("engine", "ended"), [(CPU_ENGINE, "ONNX Runtime's process"), ("mali", "driver")])
def test_the_engine_that_a_model_ended_is_named(engine: str, ended: str) -> None:
    async def ready(seconds: float) -> None:
        del seconds

    async def dies(*_: Any, **__: Any) -> None:
        raise WorkerDied("it was ended by signal SIGSEGV")

    server: Any = SimpleNamespace(
        name=engine, wait_ready=ready, loader=SimpleNamespace(load=dies), _limits=Limits()
    )
    with pytest.raises(ModelRefused, match=ended) as refused:
        asyncio.run(EngineServer.load(server, "key", Path("m.onnx")))
    assert refused.value.reasons == ("it was ended by signal SIGSEGV",)
