"""A prior learned from files of records: what is read, what is left out, and when it is not written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import xgboost

from honed.jobs import commands, priorfile
from honed.jobs.events import Learned, LearnedTask
from honed.learn import (
    OTHER_FAMILY,
    UNFIT,
    UNKNOWN_TASK,
    UNREADABLE,
    Samples,
    better,
    files,
    judge_held_out,
    learn,
    records,
)
from honed.learn import train_prior as learned_from
from honed.machine.families import DriverClass
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import InvalidArgument, NotFound
from honed.tuner.lower.schedule import by_rule, narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.records.exchange import FORMAT, Line, encode
from honed.tuner.records.rows import Timing
from honed.tuner.search import traces
from honed.tuner.search.costmodel import WIDTH, Prior, for_driver
from honed.tuner.search.draw import ScheduleSample, draws, features_of
from honed.tuner.tune.extract import Extracted, extract
from honed.valhall.bench import bench_profile

_SIZES = ((16, 24, 32), (8, 64, 48), (32, 32, 32), (64, 16, 80), (24, 96, 16), (48, 40, 64))
_EACH = 3


@dataclass(frozen=True)
class Recorded:
    """A task with its schedules: the default rule's, and draws."""

    task: Extracted
    rule: str
    drawn: list[ScheduleSample]


@dataclass(frozen=True)
class World:
    """A model, and schedules of its tasks."""

    model: Path
    profile: DeviceProfile
    tasks: list[Recorded]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Products of several sizes, for a Mali."""
    folder = tmp_path_factory.mktemp("learn")
    inputs = ", ".join(f"float[{m},{k}] x{n}, float[{k},{w}] w{n}" for n, (m, k, w) in enumerate(_SIZES))
    outputs = ", ".join(f"float[{m},{w}] y{n}" for n, (m, _, w) in enumerate(_SIZES))
    steps = " ".join(f"p{n} = MatMul(x{n}, w{n}) y{n} = Relu(p{n})" for n in range(len(_SIZES)))
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {steps} }}'
    onnx.save(onnx.parser.parse_model(text), folder / "products.onnx")
    profile = bench_profile("mali-g610")
    tasks = []
    for one in extract(folder / "products.onnx", {}, "fp32", profile).tasks:
        func = narrow_indices(one.func)
        ruled = by_rule(func, target_for(profile), profile)
        assert ruled
        tasks.append(Recorded(one, traces.to_text(ruled[1].trace), draws(func, profile, _EACH, 1)))
    assert len(tasks) == len(_SIZES)
    return World(folder / "products.onnx", profile, tasks)


def line(world: World, task: str, trace: str, seconds: float | None, name: str = "Mali-G610 r0p0") -> bytes:
    """A record; None: the schedule was wrong."""
    identity = world.profile.identity
    timing = None if seconds is None else Timing(median_s=seconds, low_s=seconds, high_s=seconds, repeats=9)
    return encode(
        Line(
            honed_records=FORMAT,
            device=type(identity)(
                platform=identity.platform,
                vendor=identity.vendor,
                name=name,
                driver_version=identity.driver_version,
                kernel_driver="panthor",
            ),
            compiler="tvm 0, lowering 0",
            workload=task,
            name=None,
            flops=None,
            bytes=None,
            trace=trace,
            state="done",
            outcome="wrong" if seconds is None else "right",
            reason="",
            story=None,
            timing=timing,
            source_sha256=None,
            created_s=1.0,
            finished_s=2.0,
            measured_by="",
        )
    )


def lines(world: World, seconds: Callable[[np.ndarray], float], rule: float | None) -> list[bytes]:
    """Records of all draws, with times made of their features; those of rules, where they have a time."""
    found = []
    for one in world.tasks:
        found += [line(world, one.task.task.key, d.trace, seconds(d.features)) for d in one.drawn]
        if rule is not None:
            found.append(line(world, one.task.task.key, one.rule, rule))
    return found


def by_bytes(features: np.ndarray) -> float:
    """Seconds that follow from what a schedule's stores do."""
    return float(1e-6 * np.exp(features[:164].sum() / 100))


def learned(world: World, folder: Path, given: Sequence[bytes]) -> tuple[Learned, Path]:
    """What comes of these records."""
    (folder / "records.jsonl").write_bytes(b"".join(given))
    output = folder / "mali.prior"
    job = commands.Learn(file=folder, models=world.model, output=output, bench="mali-g610")
    return learn(job, lambda _: None), output


def test_a_prior_is_learned_and_judged_by_tasks_held_out(world: World, tmp_path: Path) -> None:
    done, output = learned(world, tmp_path, lines(world, by_bytes, None))
    assert done.output == str(output)
    assert done.family == "mali"
    assert {one.task for one in done.tasks} == {one.task.task.key for one in world.tasks}
    assert done.correlation > 0.3
    assert done.prior > done.without
    made = priorfile.read(output)
    booster = xgboost.Booster()
    booster.load_model(bytearray(made.model))
    assert booster.num_features() == WIDTH + 1, "the last is the class of driver"
    assert (made.family, made.knows_rules) == ("mali", False)


def test_rules_among_the_records_are_known_by_themselves(world: World, tmp_path: Path) -> None:
    done, output = learned(world, tmp_path, lines(world, by_bytes, 10.0))
    assert all(one.rule for one in done.tasks)
    assert priorfile.read(output).knows_rules


def test_a_prior_that_is_no_better_than_none_is_not_written(world: World, tmp_path: Path) -> None:
    done, output = learned(world, tmp_path, lines(world, by_bytes, 1e-12))
    assert done.output is None
    assert done.without == 1.0
    assert not output.exists()


def test_what_is_left_out_is_counted(world: World, tmp_path: Path) -> None:
    good = lines(world, by_bytes, None)
    key = world.tasks[0].task.task.key
    odd = [
        b"{}\n",
        line(world, "0123456789abcdef", world.tasks[0].rule, 1.0),
        line(world, key, world.tasks[0].rule, 1.0, name="NVIDIA H100"),
        line(world, key, '[[["NoSuchStep",[],[],[]]],[]]', 1.0),
        good[0],  # recorded again
    ]
    done, _ = learned(world, tmp_path, good + odd)
    assert done.left_out == {UNREADABLE: 1, UNKNOWN_TASK: 1, OTHER_FAMILY: 1, UNFIT: 1}
    assert done.candidates == len(good)


def test_too_little_is_told(world: World, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"of these there are 0; 1 are of a task that none"):
        learned(world, tmp_path, [line(world, "0123456789abcdef", world.tasks[0].rule, 1.0)])
    assert not (tmp_path / "mali.prior").exists()


def test_features_of_a_record_are_those_of_the_draw(world: World) -> None:
    for one in world.tasks:
        for drawn in one.drawn:
            again = traces.apply(drawn.trace, narrow_indices(one.task.func)).mod["main"]
            assert np.array_equal(features_of(again, world.profile), drawn.features)


def test_files_are_read_as_exported_and_as_in_a_hub(world: World, tmp_path: Path) -> None:
    one = line(world, "0123456789abcdef", "[]", 1.0)
    (tmp_path / "boards/A").mkdir(parents=True)
    (tmp_path / "board.jsonl").write_bytes(one + b"\nnothing\n")
    (tmp_path / "boards/A/more.jsonl.gz").write_bytes(gzip.compress(one))
    (tmp_path / "boards/A/index.json").write_text("{}")
    found = [record for path in files(tmp_path) for record in records(path)]
    assert [isinstance(record, Line) for record in found] == [True, False, True]
    assert "board.jsonl, line 3" in str(found[1])


def test_damage_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no records"):
        files(tmp_path)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps({}).encode() * 1000)[:-9])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        list(records(tmp_path / "cut.jsonl.gz"))


def test_a_workload_is_held_out_on_all_its_devices() -> None:
    """Times of one device tell another's: a prior that saw them would be judged by what it knows."""
    rng = np.random.default_rng(1)
    n, tasks = 20, 6
    features = rng.random((n * tasks * 2, WIDTH)).astype(np.float32)
    features[n * tasks :] = features[: n * tasks]  # the other device's, with the same times
    seconds = np.tile(rng.random(n * tasks) + 0.1, 2)
    workloads = np.tile(np.repeat([f"w{t}" for t in range(tasks)], n), 2)
    devices = np.repeat(["a", "b"], n * tasks)
    samples = Samples(
        features=features,
        seconds=seconds,
        tasks=np.char.add(workloads, devices),
        workloads=workloads,
        ruled=np.zeros(len(seconds), np.bool_),
    )
    judged = judge_held_out(samples)
    assert len(judged) == 2 * tasks
    assert np.mean([one.correlation for one in judged]) < 0.5  # there is nothing to be learned


def test_a_prior_judges_for_the_class_of_driver_that_it_is_asked_for() -> None:
    """What is fast on one class is slow on another, as tiles are that spill there alone."""
    features = np.random.default_rng(1).random((200, WIDTH)).astype(np.float32)
    slow = features[:, 0].astype(np.float64)
    classes = (DriverClass.MESA, DriverClass.MESA_26)
    names = np.repeat([one.name for one in classes], len(features))
    samples = Samples(
        features=np.concatenate([for_driver(features, one) for one in classes]),
        seconds=np.concatenate([1 + slow, 2 - slow]),
        tasks=names,
        workloads=names,
        ruled=np.zeros(len(names), np.bool_),
    )
    booster = learned_from(samples)
    before, since = (Prior("p", booster, False, one).predict(features) for one in classes)
    assert np.corrcoef(before, slow)[0, 1] < -0.9
    assert np.corrcoef(since, slow)[0, 1] > 0.9


@pytest.mark.parametrize(
    ("prior", "without", "good"), [(0.9, 0.8, True), (0.8, 0.8, False), (0.7, 0.8, False)]
)
def test_better_is_on_average(prior: float, without: float, good: bool) -> None:
    one = LearnedTask(task="t", candidates=8, correlation=0.5, prior=prior, without=without, rule=True)
    assert better([one] * 5) is good
