"""Candidates judged on the bench, with a compiler that knows one program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from honed.jobs.events import Trial
from honed.runtime.compiled.model import KernelArg
from honed.runtime.errors import DeviceError, InvalidArgument
from honed.tool.commands import tuning
from honed.tuner.lower.program import KernelLaunch, MemoryValue
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.records.rows import Outcome, sha256
from honed.tuner.records.store import Records
from honed.tuner.setup import setup_for
from honed.tuner.tune.children import (
    DefaultSchedule,
    LoadedTask,
    Proposals,
    Proposed,
    ProposedCandidate,
    SearchChild,
)
from honed.tuner.tune.session import Rooflines, SearchBudget, TuningSession
from honed.tuner.tune.task import ModelTasks, TuningTask
from honed.tuner.tune.trials import Trials
from honed.valhall.bench import BENCHES, DRIVER, YARDSTICK, BenchMeasurer, bench_profile
from honed.valhall.compiler import Dump, OfflineCompileFailed, OfflineCompiler
from honed.valhall.count import Counts
from honed.valhall.judge import (
    BANDWIDTH,
    CLOCK_HZ,
    LAUNCH_SECONDS,
    LaunchGeometry,
    MachineCodeJudge,
    bound,
    by_arm,
    seconds,
)

ITEMS = 1024
SIZES = (ITEMS * 96 * 16, 96 * 16, ITEMS * 16)  # bytes of x, w and y


@dataclass
class OneProgram:
    """Stands for the offline compiler."""

    known: dict[str, Dump]
    asked: list[str] = field(default_factory=list)
    closed: bool = False

    def build(self, source: str) -> Future[Dump]:
        self.asked.append(source)
        future: Future[Dump] = Future()
        if source in self.known:
            future.set_result(self.known[source])
        else:
            future.set_exception(OfflineCompileFailed("the compiler refused: no such program"))
        return future

    def close(self) -> None:
        self.closed = True


def launch(entry: str = "sums", items: int = ITEMS) -> KernelLaunch:
    kinds = [
        KernelArg(dtype="float16", nbytes=size, access="read" if n < 2 else "write")
        for n, size in enumerate(SIZES)
    ]
    return KernelLaunch(
        entry=entry,
        args=(0, 1, 2),
        arg_types=tuple(kinds),
        grid=(items // 16, 1, 1),
        block=(16, 1, 1),
        flops=2 * items * 96 * 8,
        bytes=sum(SIZES),
    )


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return Workload(
        task="sums",
        parameters=tuple(MemoryValue(dtype="float16", shape=(size // 2,)) for size in SIZES),
        outputs=(2,),
        sets=0,
        folder=tmp_path,
        flops=launch().flops,
        bytes=launch().bytes,
        tolerance=(0.01,),
    )


@pytest.fixture
def compiler(source: str, dump: Dump) -> OneProgram:
    return OneProgram({source: dump})


def candidate(source: str, name: str = "one") -> Candidate:
    return Candidate(id=name, source=source, inner=(), launches=(launch(),))


def test_the_bound_is_that_of_the_busiest_pipe_of_the_busiest_core() -> None:
    counts = Counts(fma=400, half=400, cvt=200, sfu=60, ls=20, lines=90)
    geometry = LaunchGeometry(grid=(5, 1, 1), block=(24, 1, 1))
    assert geometry.warps == 2 * 2, "two groups of the five on one core, and a partial warp costs a whole"
    found = bound(counts, geometry, 272)
    cycles = [each * CLOCK_HZ / 4 for each in (found.fma, found.cvt, found.sfu, found.ls)]
    assert cycles == pytest.approx([100, 50, 60, 90])
    assert found.memory == 272 / BANDWIDTH
    assert (found.limiter, found.seconds) == ("fma", found.fma)
    arm = bound(by_arm(counts, vectors=True), geometry, 272)
    assert (arm.fma, arm.limiter) == (found.fma / 2, "ls")
    assert bound(by_arm(counts, vectors=False), geometry, 272) == found


def test_arms_driver_need_not_add_constants_to_addresses() -> None:
    geometry = LaunchGeometry(grid=(4, 1, 1), block=(16, 1, 1))
    counts = Counts(fma=400, cvt=200, sfu=40, offsets=80)
    plain, arm = bound(counts, geometry, 0), bound(by_arm(counts, vectors=True), geometry, 0)
    clocks = [each * CLOCK_HZ for each in (plain.cvt, arm.cvt, plain.alu, arm.alu)]
    assert clocks == pytest.approx([50, 30, 160, 140])


def test_textures_have_a_pipe_of_their_own() -> None:
    geometry = LaunchGeometry(grid=(4, 1, 1), block=(16, 1, 1))
    found = bound(Counts(cvt=40, lines=30, tex=10, words=20), geometry, 0)
    assert found.limiter == "tex"
    assert found.tex * CLOCK_HZ == pytest.approx(40), "four clocks for a warp's half4"
    assert found.shared_seconds == found.seconds == found.tex


def test_a_launch_is_judged_by_its_kernel(compiler: OneProgram, source: str) -> None:
    (judged,) = MachineCodeJudge(compiler).judge(source, [launch()])
    assert judged.kernel.name == "__wrapped_sums"
    assert judged.plain.memory == sum(SIZES) / BANDWIDTH
    assert judged.plain.sfu == pytest.approx(867 * (ITEMS // 16 // 4) / CLOCK_HZ)
    assert judged.arm.fma == judged.plain.fma / 2, "the source has vectors of halves"
    assert seconds([judged, judged]) == 2 * (judged.arm.seconds + LAUNCH_SECONDS)
    with pytest.raises(OfflineCompileFailed, match="no other"):
        MachineCodeJudge(compiler).judge(source, [launch("other")])


def test_a_candidate_is_timed_by_its_bound(compiler: OneProgram, source: str, workload: Workload) -> None:
    noted: list[str] = []
    measurer = BenchMeasurer(compiler, bench_profile("mali-g610"), lambda one: noted.append(one.id))
    with pytest.raises(InvalidArgument, match="no workload"):
        measurer.measure(candidate(source))
    measurer.load(workload)
    measurer.prepare(candidate(source))
    assert (compiler.asked, noted) == ([source], []), "what is only built may be forgotten"
    verdict = measurer.measure(candidate(source))
    assert (compiler.asked, noted) == ([source], ["one"])
    assert verdict.outcome is Outcome.RIGHT
    assert verdict.timing is not None
    assert verdict.timing.median_s == seconds(MachineCodeJudge(compiler).judge(source, [launch()]))
    assert verdict.yardstick_s == YARDSTICK
    measurer.close()
    assert compiler.closed


def test_what_a_model_prepares_takes_no_time(compiler: OneProgram, source: str, workload: Workload) -> None:
    """The first launch reads the first parameter only, and writes what the second reads."""
    write = KernelArg(dtype="float16", nbytes=SIZES[0], access="write")
    first = replace(launch(), args=(0, 3), arg_types=(launch().arg_types[0], write))
    two = replace(
        candidate(source),
        inner=(workload.parameters[0],),
        launches=(first, replace(launch(), args=(3, 1, 2))),
    )
    found = []
    for constants in ((), (0,)):
        measurer = BenchMeasurer(compiler, bench_profile("mali-g610"), lambda _: None)
        measurer.load(replace(workload, constants=constants))
        verdict = measurer.measure(two)
        assert verdict.timing is not None
        found.append(verdict.timing.median_s)
    judge = MachineCodeJudge(compiler)
    assert found == [
        seconds(judge.judge(source, two.launches)),
        seconds(judge.judge(source, two.launches[1:])),
    ]


def test_what_does_not_build_is_refused(compiler: OneProgram, source: str, workload: Workload) -> None:
    measurer = BenchMeasurer(compiler, bench_profile("mali-g610"), lambda _: None)
    measurer.load(workload)
    verdict = measurer.measure(candidate("__kernel void other() {}"))
    assert (verdict.outcome, verdict.timing) == (Outcome.BUILD, None)
    assert "no such program" in verdict.reason
    too_large = replace(candidate(source), launches=(replace(launch(), block=(4096, 1, 1)),))
    assert measurer.measure(too_large).outcome is Outcome.BUILD
    assert len(compiler.asked) == 1, "what the device could not run is not built"


class Planted:
    """Proposes one batch of kernels that differ in a comment."""

    def __init__(self, workload: Workload, sources: Sequence[str]) -> None:
        self.workload = workload
        self.default_source, *self.batch = sources
        self.told: dict[str, float | None] = {}

    def extract(self) -> ModelTasks:
        task = TuningTask(
            key="sums",
            name="sums",
            weight=1,
            flops=self.workload.flops,
            bytes=self.workload.bytes,
            dtype="float16",
            opaque="",
        )
        return ModelTasks(tasks=(task,))

    def load(self, _task: TuningTask) -> LoadedTask:
        return LoadedTask(workload=self.workload, fresh=True)

    def default(self, task: TuningTask, *_: object, **__: bool) -> DefaultSchedule:
        return DefaultSchedule(loaded=self.load(task), candidate=candidate(self.default_source))

    def begin(self, task: TuningTask, *_: object) -> None:
        self.asked = task

    def collect(self) -> Proposed:
        batch, self.batch = self.batch, []
        entries = tuple(
            ProposedCandidate(
                sha256(source), json.dumps([source]), None, candidate(source, sha256(source)), ""
            )
            for source in batch
        )
        return Proposed(loaded=self.load(self.asked), entries=entries, way="evolution", last=not entries)

    def learn(self, _task: str, results: dict[str, float | None]) -> None:
        self.told |= results


def test_a_session_has_a_whole_batch_built_at_once(
    source: str, dump: Dump, workload: Workload, tmp_path: Path
) -> None:
    slower = Dump(dump.code.replace("(0x60)", "(0x600)"), dump.stats)
    sources = [f"{source}// {n}\n" for n in range(5)]
    compiler = OneProgram({each: dump if n == 3 else slower for n, each in enumerate(sources[:-1])})
    planted, built = Planted(workload, sources), list[int]()
    profile = bench_profile("mali-g610")
    with Records.open(tmp_path / "records.sqlite") as records:
        records.keep_yardstick(setup_for(profile.identity), YARDSTICK)
        session = TuningSession(
            "m",
            Rooflines(profile, lambda: profile),
            Trials(
                lambda begin: BenchMeasurer(compiler, profile, begin), records, setup_for(profile.identity)
            ),
            Proposals(cast("SearchChild", planted), records, setup_for(profile.identity), ahead=True),
            lambda event: built.append(len(compiler.asked)) if isinstance(event, Trial) else None,
        )
        session.run(planted.extract, SearchBudget())
        best = records.best("sums", setup_for(profile.identity))
    assert built == [5, 5, 5, 5], "the default schedule's, and the whole batch before the first is judged"
    assert sum(seconds is None for seconds in planted.told.values()) == 1
    assert best is not None
    assert best.trace == json.dumps([sources[3]])
    assert session.tasks[0].failures == {"build": 1}


def test_predictions_are_kept_apart_from_what_a_board_measures() -> None:
    board = replace(bench_profile("mali-g610").identity, platform="ARM Platform", kernel_driver="kbase")
    ours = setup_for(bench_profile("mali-g610").identity)
    assert ours.driver == DRIVER
    assert ours.device_key != setup_for(board).device_key


def test_the_tool_offers_the_benches_there_are() -> None:
    assert tuple(BENCHES) == tuning.BENCHES


def test_without_the_compiler_it_is_said_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="benchmarks/valhall/build"):
        OfflineCompiler(tmp_path)
