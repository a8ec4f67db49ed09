"""`hone top`: live in a terminal, once elsewhere, and a terminal left as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from honed.protocol.params import Gain, TuningFigures
from honed.protocol.service import (
    DeviceFigures,
    DurationSummary,
    FaultFigures,
    Figures,
    LeaseFigures,
    Metrics,
    ModelFigures,
    QueueFigures,
    RecentFigures,
    ReleaseFigures,
    TimeSpent,
    WorkerFigures,
)
from honed.protocol.values import DeviceIdentity
from honed.runtime import Client
from honed.tool.commands.top import render
from honed.tool.main import main
from tests.daemon.conftest import SIZE
from tests.daemon.running import Service

from .terminal import Terminal

X = np.zeros(SIZE, np.float32)


@pytest.mark.service
@pytest.mark.opencl
@pytest.mark.parametrize(("columns", "end"), [(100, "q"), (60, "ctrl-c")])
def test_live_in_a_terminal(service: Service, client: Client, columns: int, end: str) -> None:
    where = {"HONED_SOCKET": str(service.socket)}
    with Terminal(["top", "--interval", "0.05"], where, columns, 24) as terminal:
        terminal.until("q ends")
        before = served(client)
        for _ in range(30):
            client.infer("small", {"x": X})
        assert served(client) == before + 30
        terminal.until(f"{before + 30} served")
        screen = terminal.until("q ends")  # the last of what is drawn
        assert "small" in screen
        assert ("ready" in screen.split("model", 1)[1]) == (columns == 100)
        assert not terminal.cursor_shown
        if end == "q":
            terminal.type("q")
        else:
            terminal.interrupt()
        status, screen = terminal.finish()
        assert (status, terminal.cursor_shown) == (0, True)
        assert terminal.echoes, "keys are shown again"
    assert screen.count("q ends") == 1, "it was drawn in place"
    assert "Traceback" not in screen


def served(client: Client) -> int:
    return int(client.metrics()["whole"]["served"])


@pytest.mark.service
@pytest.mark.opencl
def test_elsewhere_it_is_printed_once(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(service.socket))
    monkeypatch.setenv("COLUMNS", "80")
    client.infer("small", {"x": X})
    assert main(["top"]) == 0
    text = capsys.readouterr().out
    assert "small" in text
    assert "p99 ms" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert main(["top", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["models"][0]["name"] == "small"
    assert set(document) == set(client.metrics())


@pytest.mark.service
@pytest.mark.opencl
def test_a_service_that_restarts_is_waited_for(service: Service) -> None:
    with Terminal(["top", "--interval", "0.05"], {"HONED_SOCKET": str(service.socket)}, 100, 24) as terminal:
        terminal.until("small")
        service.kill()
        terminal.until("no service answers")
        service.restart()
        service.wait_listening()
        terminal.until_gone("no service answers")
        terminal.type("q")
        assert terminal.finish()[0] == 0


def test_without_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(tmp_path / "none"))
    assert main(["top"]) == 1
    assert "no service answers" in capsys.readouterr().err
    assert main(["top", "--interval", "0"]) == 2


def document(models: int) -> Metrics:
    empty = DurationSummary(count=0, sum=0.0, p50=None, p95=None, p99=None, max=None)
    some = DurationSummary(count=9, sum=1.0, p50=0.01, p95=0.02, p99=1234.5, max=0.03)
    figures: dict[str, Any] = {
        "served": 7,
        "failures": {"UNAVAILABLE": 2},
        "retries": 1,
        "engines": {"gpu": 7},
        "kernel_executions": 9,
        "device_seconds": 1.0,
        "latency": some,
        "queue_time": empty,
        "recent": RecentFigures(seconds=60.0, per_second=0.0, latency=empty),
    }
    worker = WorkerFigures(state="starting", reason="it crashed", starts=3, ends={}, last_ends=())
    queue = QueueFigures(waiting=1, running=1, longest=5)
    return Metrics(
        version="1\x1b[31m",
        pid=1,
        time=0.0,
        uptime_seconds=3600.0,
        device=DeviceIdentity(
            platform="", vendor="", name="Mali-G610", driver_version="", kernel_driver="kbase"
        ),
        device_time="",
        worker=worker,
        devices=tuple(
            DeviceFigures(name=name, shown=name, worker=worker, queue=queue)
            for name in ("ARM Platform/Mali-G610", "PoCL/cpu\x1b")
        ),
        queue=queue,
        connections=3,
        whole=Figures(requests=9, **figures),
        models=tuple(
            ModelFigures(
                **figures,
                name=f"model-{i:02}-with-a-rather-long-name-of-sixty-four-letters-{'x' * 14}",
                version=3,
                quarantined_versions=0,
                sha256="",
                state="READY",
                ready=True,
                away="",
                engine="gpu",
                device="",
                waiting=i,
                requests=i,
                spent=TimeSpent(seconds=0.0, tasks={}, profiled=""),
            )
            for i in range(models)
        ),
        tuning=TuningFigures(
            trials={"right": 90, "wrong": 1},
            faults=1,
            gains={"lightglue": Gain(before_seconds=0.9, now_seconds=0.3)},
            reason="",
        ),
        temperatures={"gpu-thermal": 61.5, "soc-thermal": 55.0},
        lease=LeaseFigures(
            held=True,
            seconds=75.0,
            grants=2,
            revoked=0,
            overdue=0,
            release=ReleaseFigures(count=0, sum_seconds=0.0, buckets=()),
        ),
        gpu_faults=FaultFigures(watched=True, reason="", counts={"service": 1, "other": 2, "unknown": 0}),
    )


@pytest.mark.parametrize(("columns", "lines"), [(40, 16), (80, 24), (120, 50)])
@pytest.mark.parametrize("models", [0, 1, 2, 60])
def test_it_fits_any_terminal(columns: int, lines: int, models: int) -> None:
    console = Console(file=StringIO(), width=columns, height=lines, force_terminal=False)
    console.print(render(document(models), columns, lines, "trouble \x1b[2J"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert all(len(line) <= columns for line in text.splitlines())
    if columns >= 80:
        assert len(text.splitlines()) <= lines
        assert "held by a tuner; 1 min 15 s in 2 grants so far" in text
        assert "lightglue 3.00 times as fast" in " ".join(text.split())
        assert "gpu-thermal 62 °C" in text
    if models == 60:
        assert "more with fewer requests" in text
        assert "model" in text
        assert ("model-59" in text) == (columns >= 80)


def test_shapes_stand_below_their_model() -> None:
    whole = document(2)
    first, second = whole.models
    for number, name in enumerate(("1x1", "3x3", "9x9")):
        owner = first if name == "3x3" else second
        whole.variants += (replace(owner, name=f"{owner.name}@{name}", requests=number, engine="cpu"),)
    console = Console(file=StringIO(), width=120, height=40, force_terminal=False)
    console.print(render(whole, 120, 40))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    names = [line.split()[0] for line in lines if line.startswith(("model-", "  @"))]
    assert [name[:8] for name in names] == ["model-01", "@9x9", "@1x1", "model-00", "@3x3"]
    assert all(line.split()[-1] == "onnxruntime" for line in lines if line.startswith("  @"))
