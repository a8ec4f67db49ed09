"""Which threads ONNX Runtime runs a model on, by times that are made up, and what its process makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.daemon.changes.sessions import SessionTuning, candidates
from honed.daemon.serving.selection import BusyWatch
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.worker.calls import BuildModel, UnloadModel
from honed.machine.processors import ThreadPlacement, first_placement, processors
from honed.protocol import strict
from honed.protocol.results import OptimisationCheck, SessionAsked, SessionSettings
from honed.tool.main import main
from tests.daemon.running import ALL_HOLDS, IDLE, Service, wait_for

BOARD = ThreadPlacement(threads=4, processors=(4, 5, 6, 7))
CHECK = OptimisationCheck(level="extended", checked=True, error=0.0, why="", seconds=1.0, runtime="1")
Times = Callable[[int, bool], float]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What other programs take of the processors, percent; None: so little that it does not matter."""
    found: list[float | None] = [None]

    async def percent(_: BusyWatch) -> float | None:
        return found[0]

    monkeypatch.setattr(BusyWatch, "percent", percent)
    return found


@pytest.mark.parametrize(
    ("placed", "everywhere", "tried"),
    [
        (BOARD, 8, [(4, False), (1, True), (8, True)]),
        (ThreadPlacement(threads=4), 4, [(4, False), (1, True)]),
        (ThreadPlacement(threads=6), 12, [(6, False), (1, True)]),
        (ThreadPlacement(threads=1), 1, []),
        (ThreadPlacement(threads=0), 4, []),
    ],
)
def test_what_is_tried(placed: ThreadPlacement, everywhere: int, tried: list[tuple[int, bool]]) -> None:
    assert [each for each, _ in candidates(placed, everywhere)] == tried


@contextlib.contextmanager
def staging() -> Iterator[Path]:
    yield Path("staged")


class World:
    """A service with one model in the CPU engine, a run of which takes `times` milliseconds.

    It takes `without_arena`, or `in_half`, times as long so. In fp16 its answers are wrong where `half` is.
    """

    def __init__(
        self,
        times: Times,
        *,
        right: bool = True,
        shape: tuple[int, ...] = (-1, 8),
        without_arena: float = 1.1,
        in_half: float = 1.0,
        half: bool = True,
    ) -> None:
        self.times = times
        self.right = right
        self.factors = without_arena, in_half
        self.half = half
        self.halved_on: list[int] = []
        self.kept: list[Path] = []
        self.held: dict[str, SessionAsked] = {}
        self.most_held = 0
        self.runs = 0
        self.settled: list[SessionSettings] = []
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
        pool = SimpleNamespace(needed_cpu=lambda _: SimpleNamespace(loader=self))
        self.tuning = SessionTuning(
            changes=cast(
                Any, SimpleNamespace(pool=pool, checks=self, begin=lambda _: contextlib.nullcontext())
            ),
            registry=cast(Any, SimpleNamespace(models=lambda: [self.entry])),
            leasing=cast(Any, SimpleNamespace(adding=lambda *_: contextlib.nullcontext())),
            store=cast(Any, SimpleNamespace(form=lambda *_: Path("model"), staging=staging, keep=self.keep)),
            placed=BOARD,
            everywhere=8,
        )

    def keep(self, form: Path) -> str:
        self.kept.append(form)
        return "form"

    async def halved(self, manifest: Any, threads: int, form: Path) -> bool:
        self.halved_on.append(threads)
        return self.half

    async def try_session(self, key: str, path: str, asked: SessionAsked) -> None:
        assert path == ("staged/fp16.onnx" if asked.half else "model")
        self.held[key] = asked
        self.most_held = max(self.most_held, len(self.held))

    async def turn_on_zeros(self, key: str, inputs: Any) -> int:
        self.runs += 1
        level, threads, spinning, arena, half = self.held[key]
        assert level == "extended"
        without_arena, in_half = self.factors
        factor = (1.0 if arena else without_arena) * (in_half if half else 1.0)
        return round(1e6 * self.times(threads, spinning) * factor)

    async def tell(self, call: UnloadModel) -> None:
        del self.held[call.key]

    async def settle(self, manifest: Any, session: SessionSettings) -> SessionSettings | None:
        if not self.right:
            return None
        self.settled.append(session)
        self.entry.manifest.optimisation = strict.copy_fields(OptimisationCheck, CHECK, session=session)
        return session

    def look(self) -> bool:
        """Do what the service does in idle time; whether that was anything."""
        work = self.tuning.background(idle=True)
        if work is not None:
            asyncio.run(cast(Any, work.run()))
        return work is not None


@pytest.mark.parametrize(
    ("times", "threads", "spinning", "us"),
    [
        ({"4": 2.0, "4 asleep": 2.1, "1": 8.0, "8": 1.0}, 8, True, 1000),
        ({"4": 1.2, "4 asleep": 1.3, "1": 2.0, "8": 2.0}, 0, True, 1200),
        ({"4": 0.4, "4 asleep": 0.5, "1": 0.1, "8": 0.8}, 1, True, 100),
        ({"4": 2.0, "4 asleep": 1.9, "1": 3.0, "8": 2.0}, 4, False, 1900),
        ({"4": 1.0, "4 asleep": 1.0, "1": 1.0, "8": 1.0}, 1, True, 1000),  # what leaves most to apps
        ({"4": 1.0, "4 asleep": 1.1, "1": 3.0, "8": 0.98}, 0, True, 1000),  # too little for four more cores
    ],
)
@pytest.mark.usefixtures("others")
def test_the_fastest_is_kept(times: dict[str, float], threads: int, spinning: bool, us: float) -> None:
    world = World(lambda count, spins: times[f"{count}" + " asleep" * (not spins)])
    assert world.look()
    (found,) = world.settled
    assert (found.threads, found.spinning) == (threads, spinning)
    assert (found.us, found.first_us) == (us, 1000 * times["4"])
    assert found.first == "4 threads on processors 4-7"
    assert world.held == {}, "they are unloaded"
    assert world.most_held <= 3, "those that lost are unloaded at once"
    assert not world.look(), "that is done once"


@pytest.mark.usefixtures("others")
def test_a_model_that_runs_faster_without_an_arena_has_none() -> None:
    world = World(lambda threads, spinning: 1.0 + threads, without_arena=0.9)
    assert world.look()
    (found,) = world.settled
    assert (found.threads, found.arena, found.half) == (1, False, None)
    assert "on 1 thread, without a memory arena; 5 ms on 4 threads" in str(found)
    assert strict.copy_fields(OptimisationCheck, CHECK, session=found).asked == (
        "extended",
        1,
        True,
        False,
        "",
    )


@pytest.mark.usefixtures("others")
def test_a_model_that_runs_equally_fast_without_an_arena_keeps_it() -> None:
    world = World(lambda threads, spinning: 1.0 + threads, without_arena=1.0)
    assert world.look()
    (found,) = world.settled
    assert (found.threads, found.arena) == (1, None)


@pytest.mark.parametrize(
    ("in_half", "right", "shape", "made", "kept"),
    [
        (0.5, True, (2, 8), [8], "form"),
        (0.98, True, (2, 8), [8], None),  # too little for answers that are less exact
        (3.0, True, (2, 8), [8], None),  # as where ONNX Runtime has no kernels for it
        (0.5, False, (2, 8), [8], None),  # its answers are wrong, or there is no such form
        (0.5, True, (-1, 8), [], None),  # a form is of one size
    ],
)
@pytest.mark.usefixtures("others")
def test_a_model_runs_in_fp16_where_that_is_right_and_faster(
    in_half: float, right: bool, shape: tuple[int, ...], made: list[int], kept: str | None
) -> None:
    world = World(lambda threads, _: 10.0 / threads, in_half=in_half, half=right, shape=shape)
    world.tuning.half = True
    assert world.look()
    (found,) = world.settled
    assert (world.halved_on, found.half, found.threads) == (made, kept, 8)
    assert (" in fp16 on 8 threads; 2.5 ms on 4 threads" in str(found)) == (kept is not None)
    assert world.held == {}
    assert not world.look()
    world.tuning.half = False  # on a processor without fp16
    world.tuning.forget("m")
    assert world.look() == (kept is not None)
    assert world.halved_on == made, "nothing is made there"


@pytest.mark.usefixtures("others")
def test_it_is_looked_for_again_on_other_processors_and_with_another_onnx_runtime() -> None:
    world = World(lambda threads, spinning: 1.0)
    assert world.look()
    world.tuning.forget("m")
    assert not world.look()
    world.tuning.placed = ThreadPlacement(threads=4)
    assert world.look()
    world.tuning.forget("m")
    world.entry.manifest.optimisation = CHECK  # as the check leaves it
    assert world.look()
    world.tuning.forget("m")
    assert not world.look()


def test_what_was_found_beside_busy_programs_is_looked_for_again_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, others: list[float | None]
) -> None:
    world, now, done = World(lambda threads, spinning: 1.0), 0.0, []
    monkeypatch.setattr("honed.daemon.background.time.monotonic", lambda: now)
    others[0] = 50.0
    for second in range(0, 1000, 20):
        now = float(second)
        if world.look():
            done.append(second)
    assert done == [0, 60, 180, 420, 900]
    assert "50 % of the processors" in str(world.settled[-1])
    others[0], now = None, 1e6
    assert world.look()
    now = 2e6
    assert not world.look()


def test_what_is_not_looked_for() -> None:
    assert World(lambda *_: 1.0).tuning.background(idle=False) is None
    world = World(lambda *_: 1.0, shape=(1, -1))
    assert not world.look(), "a size that is made up says nothing"
    world.manifest.shapes = {"x": (1, 16)}
    world.entry.on_cpu = False
    assert not world.look()
    world.entry.on_cpu, world.manifest.optimisation = (
        True,
        strict.copy_fields(OptimisationCheck, CHECK, checked=False),
    )
    assert not world.look(), "nobody could say whether it is right"


@pytest.mark.usefixtures("others")
def test_a_model_for_which_it_fails_is_not_tried_at_once_again() -> None:
    world = World(lambda *_: 1.0, right=False)
    assert world.look()
    assert not world.look()


def test_earlier_versions_can_read_what_was_not_tuned() -> None:
    assert "session" not in strict.to_plain(CHECK)
    tuned = strict.copy_fields(OptimisationCheck, CHECK, session=SessionSettings(
        threads=1, spinning=True, us=90.0, first_us=120.0, first="4 threads"
    ))  # fmt: skip
    assert strict.from_plain(OptimisationCheck, strict.to_plain(tuned), where="check") == tuned
    assert tuned.asked == ("extended", 1, True, True, "")
    assert not {"arena", "half"} & strict.to_plain(tuned)["session"].keys()
    assert str(tuned.session) == "0.09 ms on 1 thread; 0.12 ms on 4 threads"


def test_a_session_with_more_threads_than_others_runs_on_all_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime")
    from honed.cpu import worker

    made: list[tuple[int, str, bool]] = []
    at: list[list[int]] = []

    class Session:
        interface = None

        def __init__(self, path: Path, threads: int, *, level: str, spinning: bool, arena: bool) -> None:
            made.append((threads, level, spinning))

    def keep(process: int, numbers: Iterable[int]) -> None:
        at.append(list(numbers))

    monkeypatch.setattr(worker, "Session", Session)
    monkeypatch.setattr(os, "sched_setaffinity", keep)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = worker.CpuEngine(theirs, BOARD, "", tuple(range(8)))
        load = engine.LOADING["Load"][1]
        load(engine, BuildModel(key="few", path="a"))
        load(engine, BuildModel(key="many", path="a", threads=8, level="basic"))
        load(engine, BuildModel(key="few", path="a", threads=4))  # as it is
        load(engine, BuildModel(key="few", path="a", threads=1, spinning=False))
        assert made == [(4, "none", True), (8, "basic", True), (1, "none", False)]
        assert at == [[4, 5, 6, 7], [*range(8)], [4, 5, 6, 7]]
        at.clear()
        for key in ("few", "few", "many", "many", "few"):
            engine.loaded(key)
        assert at == [[*range(8)], [4, 5, 6, 7]], "only when it changes"
        load(engine, BuildModel(key="more", path="a", threads=8))
        at.clear()
        engine.loaded("few")
        assert at == [[4, 5, 6, 7]], "loading another one moved it away"
        fixed = worker.CpuEngine(theirs, ThreadPlacement(threads=2), "", fixed=True)
        fixed.LOADING["Load"][1](fixed, BuildModel(key="few", path="a", threads=1))
        assert made[-1] == (2, "none", True)


FP16 = (
    ALL_HOLDS
    + """
from honed.machine import processors

processors.half_arithmetic = lambda root: True
"""
)


def product(path: Path, rows: int | str, factor: float) -> Path:
    """A model of a product that multiplies by a factor."""
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 64]) for name in "xy")
    weights = numpy_helper.from_array(np.eye(64, dtype=np.float32) * np.float32(factor), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [given], [made], initializer=[weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.slow
@pytest.mark.skipif(
    first_placement(processors(Path("/"), os.sched_getaffinity(0))).threads < 2, reason="takes two cores"
)
def test_it_is_found_in_idle_time_and_kept(
    start_service: Callable[..., Service], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As idle counts what these settings say: other tests keep the processors busy, and it may stay so."""
    path = product(tmp_path / "sums.onnx", "n", 1.0)
    x = np.arange(128, dtype=np.float32).reshape(2, 64)
    service = start_service(config=IDLE)
    with service.client() as client:
        client.add(path, engine="onnxruntime")

        def session() -> dict[str, Any] | None:
            found: dict[str, Any] = client.show("sums")["optimisation"] or {}
            return found.get("session")

        wait_for(lambda: session() is not None, "threads to be chosen", service, seconds=300)
        chosen = session()
        assert "ONNX Runtime takes" in service.log
        np.testing.assert_array_equal(client.infer("sums", {"x": x})["y"], x)
        for command in ("show", "history"):
            assert main(["--socket", str(service.socket), command, "sums"]) == 0
            assert "a run takes" in capsys.readouterr().out
    service.stop()
    service = start_service()  # for which the machine is not idle so soon
    with service.client() as client:
        wait_for(lambda: client.ready("sums"), "the model", service)
        assert session() == chosen
        np.testing.assert_array_equal(client.infer("sums", {"x": x})["y"], x)


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
    assert main(["--socket", str(service.socket), "show", "third"]) == 0
    assert " in fp16 on 1 thread, without a memory arena; " in " ".join(capsys.readouterr().out.split())
    service.stop()
    service = start_service()
    with service.client() as client:
        wait_for(lambda: client.ready("third"), "the model", service)
    assert in_fp16()
