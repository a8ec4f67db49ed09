"""Whether ONNX Runtime runs a model in fp16, by times that are made up, and in a service."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.daemon.features.half import HalfForms
from honed.daemon.restoring import without_chosen_sessions
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.worker.calls import ComparisonRun, UnloadModel
from honed.machine.processors import OtherLoadMeter, ThreadPlacement
from honed.protocol import strict
from honed.protocol.values import OptimisationCheck, OrtSessionConfig, SessionSettings
from honed.tool.main import main
from tests.daemon.core import serving_world
from tests.daemon.running import ALL_HOLDS, IDLE, Service, wait_for

BOARD = ThreadPlacement(threads=4, processors=(4, 5, 6, 7))
CHECK = OptimisationCheck(level="extended", checked=True, error=0.0, why="", seconds=1.0, runtime="1")


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What other programs take of the processors, percent."""
    found = [0.0]
    monkeypatch.setattr(OtherLoadMeter, "percent", lambda _: found[0])
    monkeypatch.setattr("honed.daemon.serving.trial._LOOK_SECONDS", 0.0)
    return found


@contextlib.contextmanager
def staging() -> Iterator[Path]:
    yield Path("staged")


class World:
    """A service with one model in the CPU engine, a run of which takes 2 ms.

    In fp16 it takes `in_half` times that, and its answers are wrong unless it is `right`.
    """

    def __init__(self, in_half: float, *, right: bool = True, shape: tuple[int, ...] = (2, 8)) -> None:
        self.in_half = in_half
        self.right = right
        self.halved_on: list[int] = []
        self.kept: list[Path] = []
        self.held: dict[str, OrtSessionConfig] = {}
        self.settled: list[SessionSettings] = []
        self.unchanged = True  # the file was not checked anew meanwhile
        self.comparing = asyncio.Lock()
        self.pid = os.getpid()
        given = TensorSpec(name="x", dtype="float32", shape=shape, symbols=("",) * len(shape))
        self.manifest = SimpleNamespace(
            owner=None,
            optimisation=CHECK,
            source_key="key",
            compiled=None,
            interface=Interface(inputs=(given,), outputs=(), opset=17, producer=""),
            shapes={},
            settings=SimpleNamespace(warm_up_shapes={}),
        )
        self.entry = SimpleNamespace(name="m", on_cpu=True, manifest=self.manifest)
        pool = SimpleNamespace(require_cpu=lambda _: SimpleNamespace(loader=self))
        self.forms = HalfForms(
            changes=cast(
                Any, SimpleNamespace(pool=pool, checks=self, begin=lambda _: contextlib.nullcontext())
            ),
            registry=cast(Any, SimpleNamespace(models=lambda: [self.entry])),
            leasing=cast(Any, SimpleNamespace(adding=lambda *_: contextlib.nullcontext())),
            store=cast(Any, SimpleNamespace(form=lambda *_: Path("model"), staging=staging, keep=self.keep)),
            placed=BOARD,
        )

    def keep(self, form: Path) -> str:
        self.kept.append(form)
        return "form"

    async def write_half(self, manifest: Any, threads: int, form: Path) -> bool:
        self.halved_on.append(threads)
        return self.right

    async def try_session(self, key: str, path: str, asked: OrtSessionConfig) -> None:
        assert path == ("staged/fp16.onnx" if asked.half else "model")
        assert asked.level == "extended"
        self.held[key] = asked

    async def time_run_on_zeros(self, key: str, inputs: Any) -> ComparisonRun:
        return ComparisonRun(ns=round(2e6 * (self.in_half if self.held[key].half else 1.0)))

    async def tell(self, call: UnloadModel) -> None:
        self.held.pop(call.key, None)

    async def settle(self, manifest: Any, session: SessionSettings) -> SessionSettings | None:
        if not self.unchanged:
            return None
        self.settled.append(session)
        self.entry.manifest.optimisation = strict.copy_fields(OptimisationCheck, CHECK, session=session)
        return session

    def look(self) -> bool:
        """Do what the service does in idle time; whether that was anything."""
        work = self.forms.background(idle=True)
        if work is not None:
            asyncio.run(cast(Any, work.run()))
        return work is not None


@pytest.mark.parametrize(
    ("in_half", "right", "kept", "shown"),
    [
        (0.5, True, "form", "1 ms in fp16; 2 ms in fp32 on 4 threads on processors 4-7"),
        # Too little for answers that are less exact; as where ONNX Runtime has no kernels for it.
        (0.98, True, None, "2 ms in fp32 on 4 threads on processors 4-7; fp16 is no faster"),
        (3.0, True, None, "2 ms in fp32 on 4 threads on processors 4-7; fp16 is no faster"),
        (0.5, False, None, "4 threads on processors 4-7; its answers in fp16 are not right"),
    ],
)
def test_a_model_runs_in_fp16_where_that_is_right_and_faster(
    in_half: float, right: bool, kept: str | None, shown: str
) -> None:
    world = World(in_half, right=right)
    assert world.look()
    (found,) = world.settled
    assert (world.halved_on, found.half, str(found)) == ([4], kept, shown)
    assert world.held == {}, "sessions on trial are unloaded"
    assert not world.look(), "that is done once"


def test_it_is_chosen_again_on_other_processors_and_with_another_onnx_runtime() -> None:
    world = World(0.5)
    assert world.look()
    world.forms.forget("m")
    assert not world.look()
    world.forms.placed = ThreadPlacement(threads=4)
    assert world.look()
    world.forms.forget("m")
    world.entry.manifest.optimisation = CHECK  # as the check leaves it
    assert world.look()
    world.forms.forget("m")
    assert not world.look()


def test_what_was_chosen_beside_busy_programs_is_chosen_again_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, others: list[float]
) -> None:
    world, now, done = World(0.5), 0.0, []
    monkeypatch.setattr("honed.daemon.background.time.monotonic", lambda: now)
    others[0] = 50.0
    for second in range(0, 1000, 20):
        now = float(second)
        if world.look():
            done.append(second)
    assert done == [0, 60, 180, 420, 900]
    assert "50 % of the processors" in str(world.settled[-1])
    others[0], now = 0.0, 1e6
    assert world.look()
    now = 2e6
    assert not world.look()


def test_for_which_models_nothing_is_chosen() -> None:
    assert World(0.5).forms.background(idle=False) is None
    assert not World(0.5, shape=(-1, 8)).look(), "a form has fixed sizes"
    world = World(0.5)
    world.entry.on_cpu = False
    assert not world.look()
    world.entry.on_cpu, world.manifest.optimisation = (
        True,
        strict.copy_fields(OptimisationCheck, CHECK, checked=False),
    )
    assert not world.look(), "nobody could say whether it is right"


def test_a_model_for_which_it_fails_is_not_tried_at_once_again() -> None:
    world = World(0.5)
    world.unchanged = False
    assert world.look()
    assert not world.look()


def test_earlier_versions_can_read_what_was_chosen() -> None:
    assert "session" not in strict.to_plain(CHECK)
    chosen = SessionSettings(us=90.0, first_us=120.0, first="4 threads")
    assert strict.to_plain(chosen) == {
        "threads": 0, "spinning": True, "us": 90.0, "first_us": 120.0, "first": "4 threads"
    }  # fmt: skip
    checked = strict.copy_fields(OptimisationCheck, CHECK, session=chosen)
    assert strict.from_plain(OptimisationCheck, strict.to_plain(checked), where="check") == checked
    assert checked.session_config == ("extended", "")


@pytest.mark.parametrize(
    ("settings", "half"),
    [
        ({"threads": 1}, None),
        ({"threads": 4, "spinning": False}, None),
        ({"threads": 4, "half": "form"}, "form"),  # checked on these threads
        ({"threads": 4, "half": "form", "arena": False}, "form"),
        ({"threads": 1, "half": "form"}, None),
    ],
)
def test_threads_and_arenas_that_honed_0_1_chose_have_left(
    settings: dict[str, Any], half: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    of_now = SessionSettings(us=1.0, first_us=2.0, first="4 threads on processors 4-7", half="form")
    stored = {**strict.to_plain(of_now), "half": None, **settings}
    names = {"old": strict.from_plain(SessionSettings, stored, where="session"), "new": of_now, "none": None}
    models = {
        name: strict.copy_fields(
            type(given := serving_world.given(name)),
            given,
            optimisation=strict.copy_fields(OptimisationCheck, CHECK, session=session),
        )
        for name, session in names.items()
    }
    found = without_chosen_sessions(models)
    assert (found["new"], found["none"]) == (models["new"], models["none"])
    assert found["old"].optimisation is not None
    assert found["old"].optimisation.session_config == ("extended", half or "")
    (record,) = caplog.records
    assert "threads and memory arenas of ONNX Runtime" in record.message
    assert "old runs as all others do, and there is nothing to do" in record.message
    caplog.clear()
    assert without_chosen_sessions(found) == found
    assert not caplog.records


FP16 = (
    ALL_HOLDS
    + """
from honed.machine import processors

processors.half_arithmetic = lambda root: True
"""
)


def product(path: Path, rows: int, factor: float) -> Path:
    """A model of a product that multiplies by a factor."""
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 64]) for name in "xy")
    weights = numpy_helper.from_array(np.eye(64, dtype=np.float32) * np.float32(factor), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [given], [made], initializer=[weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.slow
def test_a_service_runs_a_model_in_fp16_and_goes_on_so(
    start_service: Callable[..., Service], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a processor that says it has fp16, where whatever is tried counts as faster."""
    path = product(tmp_path / "third.onnx", 2, 1 / 3)
    x = np.arange(1, 129, dtype=np.float32).reshape(2, 64)
    service = start_service(config=IDLE, patch=FP16)

    def in_fp16() -> bool:
        with service.client() as client:
            factors = client.infer("third", {"x": x})["y"] / x
        return bool(np.allclose(factors, np.float16(1 / 3), rtol=1e-5))

    with service.client() as client:
        client.add(path, engine="onnxruntime")
        assert not in_fp16()
        wait_for(lambda: "ONNX Runtime takes" in service.log, "fp16 to be chosen", service, seconds=300)
        assert client.show("third")["optimisation"]["session"]["half"] is not None
        assert in_fp16()
        assert client.profile("third", runs=1)["rows"]
    for command in ("show", "history"):
        assert main(["--socket", str(service.socket), command, "third"]) == 0
        assert " in fp16; " in " ".join(capsys.readouterr().out.split())
    service.stop()
    service = start_service()
    with service.client() as client:
        wait_for(lambda: client.ready("third"), "the model", service)
    assert in_fp16()
