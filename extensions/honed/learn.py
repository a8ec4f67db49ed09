"""Learns the prior of a family from records of tuning, and judges it by tasks that it did not see."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, BinaryIO, Final, cast

import numpy as np
import xgboost
from numpy.typing import NDArray
from tvm import tirx

from honed.jobs import commands, events
from honed.jobs.events import LearnedTask, News, Note, Stage
from honed.jobs.priorfile import PriorFile
from honed.machine import devices
from honed.machine.families import DriverClass, driver_class, family_of
from honed.machine.files import replacing
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import HonedError, InvalidArgument, NotFound
from honed.protocol.strict import SchemaError
from honed.tuner.frontend import Precision
from honed.tuner.lower.opencl import LoweringFailed
from honed.tuner.lower.schedule import by_rule, narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.records.exchange import Line, line_setup, lines, parse
from honed.tuner.records.rows import StoredOutcome
from honed.tuner.search import traces
from honed.tuner.search.costmodel import WIDTH, Array, for_driver, ranking, scores
from honed.tuner.search.draw import features_of
from honed.tuner.tune.extract import extract
from honed.valhall.bench import BENCHES, bench_profile

LEAST_TASKS = 5  # Minimum tasks to judge a prior by
LEAST_CANDIDATES = 8  # Minimum candidates of a task for judging
_FOLDS = 5
_ROUNDS = 160
_PARAMETERS = {
    "objective": "reg:squarederror",
    "max_depth": 7,
    "eta": 0.1,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
    "min_child_weight": 2,
    "tree_method": "hist",
    "verbosity": 0,
    "seed": 0,
    "nthread": 1,  # Several threads wait for each other longer than they help if others use the processor
}
# Reasons that records are left out.
OTHER_FAMILY = "of another family of devices"
UNKNOWN_TASK = "of a task that none of the models has"
NO_TIME = "of a trial that was cut off"
UNFIT = "of a schedule that does not fit its task any more"
UNREADABLE = "not readable"
_KINDS = (".jsonl", ".jsonl.gz")
_PROCESSORS = ("pthread", "cpu", "llvmpipe")  # Parts of names of processors in PoCL, Intel's driver and Mesa
Emit = Callable[[Stage | Note], None]


def files(place: Path) -> list[Path]:
    """Return a file, or all files in a folder and below it; raise NotFound if there are none."""
    found = sorted(place.rglob("*")) if place.is_dir() else [place]
    found = [path for path in found if path.is_file() and (path == place or path.name.endswith(_KINDS))]
    if not found:
        raise NotFound(f"there are no records at {place}; 'hone records export' writes them, as .jsonl")
    return found


def records(path: Path) -> Iterator[Line | str]:
    """Yield the record of each line of a file, or why it is none.

    Raises InvalidArgument if the file is damaged.
    """
    try:
        zipped = path.name.endswith(".gz")
        with cast("BinaryIO", gzip.open(path)) if zipped else path.open("rb") as file:
            for number, data in enumerate(lines(file), 1):
                if data.strip():
                    try:
                        yield parse(data)
                    except (InvalidArgument, SchemaError) as error:
                        yield f"{path.name}, line {number}: {error}"
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read ({error}); export or fetch it again") from error


def functions(models: Path, profile: DeviceProfile, emit: Emit) -> Mapping[str, tirx.PrimFunc]:
    """Return the functions of an ONNX file, or of all in a folder, in each precision, by their tasks' keys.

    A model that cannot be compiled is noted and skipped. Raises NotFound if there is none.
    """
    files = sorted(models.rglob("*.onnx")) if models.is_dir() else [models]
    if not files or not files[0].exists():
        raise NotFound(f"there is no ONNX file at {models}; give the models that the records are of")
    precisions: tuple[Precision, ...] = ("fp32", "fp16") if profile.limits.fp16 else ("fp32",)
    found: dict[str, tirx.PrimFunc] = {}
    for n, file in enumerate(files):
        emit(Stage(stage="models", fraction=n / len(files), text=file.name))
        for precision in precisions:
            try:
                tasks = extract(file, {}, precision, profile)
                found |= {one.task.key: narrow_indices(one.func) for one in (*tasks.tasks, *tasks.rivals)}
            except HonedError as error:
                emit(Note(text=f"{file.name} in {precision} is left out: {error}"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Candidates, n of them. A `task` is a workload on one device, with one driver and compiler."""

    features: Array  # Shape [n, WIDTH + 1], the class of driver last
    seconds: NDArray[np.float64]  # Shape [n], infinity for those refused
    tasks: NDArray[np.str_]  # Shape [n]
    workloads: NDArray[np.str_]  # Shape [n]
    ruled: NDArray[np.bool_]  # Shape [n], True for the default rule's schedule

    def __len__(self) -> int:
        return len(self.seconds)

    def scores(self) -> Array:
        """Return for each candidate the best time of its task over its own, 0 for the refused."""
        return scores(self.tasks, self.seconds)

    def where(self, chosen: NDArray[np.bool_]) -> Samples:
        """Return the chosen candidates."""
        return Samples(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})

    @property
    def knows_rules(self) -> bool:
        """True if default rules' schedules are among the candidates of most tasks."""
        tasks = np.unique(self.tasks)
        return bool(len(tasks)) and 2 * len(np.unique(self.tasks[self.ruled])) > len(tasks)


def samples(
    records: Iterable[Line | str],
    functions: Mapping[str, tirx.PrimFunc],
    profile: DeviceProfile,
    emit: Callable[[Stage], None],
) -> tuple[Samples, Counter[str]]:
    """Return the usable candidates of the profile's family, and counts of the others by reason.

    Candidates of unknown functions are left out. A candidate recorded again, as in another export of the same
    board, counts once.
    """
    left_out: Counter[str] = Counter()
    wanted: dict[tuple[str, str], float] = {}  # Seconds by task and trace
    workloads: dict[str, str] = {}
    drivers: dict[str, DriverClass] = {}
    for line in records:
        why = _unusable(line, functions, profile)
        if why or isinstance(line, str):
            left_out[why] += 1
            continue
        setup = line_setup(line)
        task = f"{line.workload} {setup.device_key[:16]} {setup.driver} {line.compiler}"
        workloads[task] = line.workload
        drivers[task] = driver_class(line.device.platform, line.device.driver_version)
        right = StoredOutcome(line.outcome) is StoredOutcome.RIGHT and line.state == "done"
        wanted[task, line.trace] = line.timing.fair_s if line.timing and right else np.inf
    replayed = _Replayed(functions, profile)
    rows = []
    for n, ((task, trace), seconds) in enumerate(sorted(wanted.items())):
        if n % 100 == 0:
            emit(Stage(stage="replay", fraction=n / len(wanted), text=f"{n} of {len(wanted)} schedules"))
        features = replayed.features(workloads[task], trace)
        if features is None:
            left_out[UNFIT] += 1
            continue
        (of_driver,) = for_driver(features[np.newaxis], drivers[task])
        rows.append(
            (of_driver, seconds, task, workloads[task], replayed.is_by_rule(workloads[task], features))
        )
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), (), ()]
    return (
        Samples(
            features=np.array(columns[0], np.float32).reshape(len(rows), WIDTH + 1),
            seconds=np.array(columns[1], np.float64),
            tasks=np.array(columns[2], np.str_),
            workloads=np.array(columns[3], np.str_),
            ruled=np.array(columns[4], np.bool_),
        ),
        left_out,
    )


def _unusable(line: Line | str, functions: Mapping[str, tirx.PrimFunc], profile: DeviceProfile) -> str:
    """Return why nothing is learned from a line; "" if it is usable."""
    if isinstance(line, str):
        return UNREADABLE
    name = line.device.name.casefold()
    if family_of(name, is_cpu=any(part in name for part in _PROCESSORS)) is not profile.family:
        return OTHER_FAMILY
    if StoredOutcome(line.outcome) is StoredOutcome.ABANDONED:
        return NO_TIME
    return "" if line.workload in functions else UNKNOWN_TASK


class _Replayed:
    """A cache of schedules' features, each computed once for all devices that recorded it."""

    def __init__(self, functions: Mapping[str, tirx.PrimFunc], profile: DeviceProfile) -> None:
        self._functions, self._profile = functions, profile
        self._latest: tuple[str, str] | None = None
        self._features: dict[tuple[str, str], Array | None] = {}
        self._rules: dict[str, Array | None] = {}

    def features(self, workload: str, trace: str) -> Array | None:
        """Return features [WIDTH]; None if the trace does not fit."""
        key = workload, traces.identity(trace)
        if key not in self._features:
            try:
                schedule = traces.apply(trace, self._functions[workload])
            except LoweringFailed:
                self._features[key] = None
            else:
                self._features[key] = features_of(schedule.mod["main"], self._profile)
        return self._features[key]

    def is_by_rule(self, workload: str, features: Array) -> bool:
        """Return whether these are the features of the default rule's schedule."""
        if workload not in self._rules:
            found = by_rule(self._functions[workload], target_for(self._profile), self._profile)
            self._rules[workload] = found and features_of(found[1].mod["main"], self._profile)
        rule = self._rules[workload]
        return rule is not None and np.array_equal(rule, features)


def train_prior(samples: Samples) -> xgboost.Booster:
    """Return a prior; equal samples give equal priors."""
    data = xgboost.DMatrix(samples.features, label=samples.scores(), nthread=1)
    return xgboost.train(_PARAMETERS, data, num_boost_round=_ROUNDS)


def better(tasks: list[LearnedTask]) -> bool:
    """Return whether the prior's picks are faster than those without one, over all tasks."""
    return mean(one.prior for one in tasks) > mean(one.without for one in tasks)


def judge_held_out(samples: Samples) -> list[LearnedTask]:
    """Judge each task of enough candidates by a prior that saw none of its workload on any device."""
    found: list[LearnedTask] = []
    workloads = np.unique(samples.workloads)
    folds = min(_FOLDS, len(workloads))
    for fold in range(folds):
        out = np.isin(samples.workloads, workloads[fold::folds])
        if out.all():
            break
        mine, booster = samples.where(out), train_prior(samples.where(~out))
        predicted, scores = booster.predict(xgboost.DMatrix(mine.features, nthread=1)), mine.scores()
        for task in np.unique(mine.tasks):
            of_task = np.flatnonzero(mine.tasks == task)
            if len(of_task) >= LEAST_CANDIDATES and scores[of_task].max() > 0:
                found.append(_one(mine, of_task, predicted[of_task], scores[of_task]))
    return sorted(found, key=lambda one: one.task)


def _one(samples: Samples, of_task: np.ndarray, predicted: Array, scores: Array) -> LearnedTask:
    """Return how the prior's pick compares with the choice without one.

    Without a prior that is the default rule's schedule; if it was not recorded, the mean of the candidates.
    """
    ruled = samples.ruled[of_task]
    ranked = ranking(predicted, samples.seconds[of_task])
    assert ranked is not None  # The task has a right candidate
    return LearnedTask(
        task=str(samples.workloads[of_task[0]]),
        candidates=len(of_task),
        correlation=float(np.nan_to_num(ranked.correlation)),
        prior=float(scores[np.argmax(predicted)]),
        without=float(scores[ruled].max() if ruled.any() else scores.mean()),
        rule=bool(ruled.any()),
    )


def learn(job: commands.Learn, emit: Callable[[News], None]) -> events.Learned:
    """Learn, judge, and write the prior if it picks better than what serves without one."""
    profile, found = _profile(job), files(job.file)
    known = functions(job.models, profile, emit)
    lines = chain.from_iterable(records(path) for path in found)
    gathered, left_out = samples(lines, known, profile, emit)
    emit(events.Stage(stage="learn", fraction=0.0, text=f"learn from {len(gathered)} candidates"))
    tasks = judge_held_out(gathered)
    if len(tasks) < LEAST_TASKS:
        reasons = "".join(f"; {count} are {why}" for why, count in left_out.most_common())
        raise InvalidArgument(
            f"a prior is judged by {LEAST_TASKS} tasks with {LEAST_CANDIDATES} candidates at least, and of "
            f"these there are {len(tasks)}{reasons}; give more records, and the models that they are of"
        )
    good = better(tasks)
    if good:
        made = PriorFile(
            family=profile.rules.family,
            knows_rules=gathered.knows_rules,
            model=bytes(train_prior(gathered).save_raw("ubj")),
        )
        with replacing(job.output) as file:
            file.write(made.to_bytes())
    for why, count in left_out.most_common():
        emit(Note(text=f"{count} records are {why}, and were left out"))
    return events.Learned(
        output=str(job.output) if good else None,
        family=profile.rules.family,
        tasks=tuple(tasks),
        candidates=len(gathered),
        left_out=dict(left_out),
        prior=mean(one.prior for one in tasks),
        without=mean(one.without for one in tasks),
        correlation=mean(one.correlation for one in tasks),
    )


def _profile(job: commands.Learn) -> DeviceProfile:
    if job.bench is not None:
        if job.bench not in BENCHES:
            raise InvalidArgument(f"there is no bench {job.bench!r}; there is {', '.join(BENCHES)}")
        return bench_profile(job.bench)
    return DeviceProfile.load(job.profile) if job.profile else devices.select(job.device).profile


JOBS: Final[Mapping[type[commands.Job[Any]], commands.Work]] = {commands.Learn: learn}
