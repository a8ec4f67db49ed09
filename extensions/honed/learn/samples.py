"""What a prior is learned from: features of recorded schedules, and how fast each was on its device."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

from honed.jobs.events import Note, Stage
from honed.machine.families import family_of
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import HonedError, InvalidArgument, NotFound
from honed.protocol.strict import Mismatch
from honed.tuner.frontend import Precision
from honed.tuner.lower.opencl import LoweringFailed
from honed.tuner.lower.schedule import by_rule, narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.records.exchange import Line, line_setup, lines, parsed
from honed.tuner.records.verdict import Stored
from honed.tuner.search import traces
from honed.tuner.search.costmodel import WIDTH, Array, scores
from honed.tuner.search.draw import features_of
from honed.tuner.tune.extract import extract

# ---- Records out of files: those of `hone records export`, and those that lie in a hub ----

_KINDS = (".jsonl", ".jsonl.gz")


def files(place: Path) -> list[Path]:
    """A file, or all of a folder and of those below it; raises NotFound where there are none."""
    found = sorted(place.rglob("*")) if place.is_dir() else [place]
    found = [path for path in found if path.is_file() and (path == place or path.name.endswith(_KINDS))]
    if not found:
        raise NotFound(f"there are no records at {place}; 'hone records export' writes them, as .jsonl")
    return found


def _opened(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")


def records(path: Path) -> Iterator[Line | str]:
    """What the lines of a file say, or why one is no record; raises InvalidArgument where it is damaged."""
    try:
        with _opened(path) as file:
            for number, data in enumerate(lines(file), 1):
                if data.strip():
                    try:
                        yield parsed(data)
                    except (InvalidArgument, Mismatch) as error:
                        yield f"{path.name}, line {number}: {error}"
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read ({error}); export or fetch it again") from error


# ---- The functions that records are of: a record names its task by a hash, and a
# model has the function ----

Emit = Callable[[Stage | Note], None]


def functions(models: Path, profile: DeviceProfile, emit: Emit) -> Mapping[str, tirx.PrimFunc]:
    """Functions by their tasks' keys, of an ONNX file or of all in a folder, in each precision.

    A model that cannot be compiled is told of and left. Raises NotFound where there is none.
    """
    files = sorted(models.rglob("*.onnx")) if models.is_dir() else [models]
    if not files or not files[0].exists():
        raise NotFound(f"there is no ONNX file at {models}; give the models that the records are of")
    found: dict[str, tirx.PrimFunc] = {}
    for n, file in enumerate(files):
        emit(Stage(stage="models", fraction=n / len(files), text=file.name))
        for precision in _precisions(profile):
            try:
                found |= _of(file, precision, profile)
            except HonedError as error:
                emit(Note(text=f"{file.name} in {precision} is left out: {error}"))
    return found


def _precisions(profile: DeviceProfile) -> Iterable[Precision]:
    return ("fp32", "fp16") if profile.limits.fp16 else ("fp32",)


def _of(file: Path, precision: Precision, profile: DeviceProfile) -> dict[str, tirx.PrimFunc]:
    tasks = extract(file, {}, precision, profile)
    return {one.task.key: narrow_indices(one.func) for one in (*tasks.tasks, *tasks.rivals)}


OTHER_FAMILY = "of another family of devices"
UNKNOWN_TASK = "of a task that none of the models has"
NO_TIME = "of a trial that was cut off"
UNFIT = "of a schedule that does not fit its task any more"
UNREADABLE = "not readable"
_PROCESSORS = ("pthread", "cpu", "llvmpipe")  # in names that PoCL, Intel and Mesa give to processors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Candidates, n of them. A `task` is a workload on one device, with one driver and compiler."""

    features: Array  # [n, WIDTH]
    seconds: NDArray[np.float64]  # [n], inf for those refused
    tasks: NDArray[np.str_]  # [n]
    workloads: NDArray[np.str_]  # [n]
    ruled: NDArray[np.bool_]  # [n], it is the default rule's schedule

    def __len__(self) -> int:
        return len(self.seconds)

    def scores(self) -> Array:
        """Of each the best time of its task over its own, 0 for the refused."""
        return scores(self.tasks, self.seconds)

    def where(self, chosen: NDArray[np.bool_]) -> Samples:
        """Those that are chosen."""
        return Samples(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})

    @property
    def knows_rules(self) -> bool:
        """Whether default rules' schedules are among the candidates of most tasks."""
        tasks = np.unique(self.tasks)
        return bool(len(tasks)) and 2 * len(np.unique(self.tasks[self.ruled])) > len(tasks)


def samples(
    records: Iterable[Line | str],
    functions: Mapping[str, tirx.PrimFunc],
    profile: DeviceProfile,
    emit: Callable[[Stage], None],
) -> tuple[Samples, Counter[str]]:
    """Those of the profile's family whose functions are known, and how many were left out, by why.

    The same candidate recorded again, as another export of the same board has it, counts once.
    """
    left_out: Counter[str] = Counter()
    wanted: dict[tuple[str, str], float] = {}  # seconds by task and trace
    workloads: dict[str, str] = {}
    for line in records:
        why = _unusable(line, functions, profile)
        if why or isinstance(line, str):
            left_out[why] += 1
            continue
        setup = line_setup(line)
        task = f"{line.workload} {setup.device_key[:16]} {setup.driver} {line.compiler}"
        workloads[task] = line.workload
        wanted[task, line.trace] = line.timing.fair_s if line.timing and _right(line) else np.inf
    replayed = _Replayed(functions, profile)
    rows = []
    for n, ((task, trace), seconds) in enumerate(sorted(wanted.items())):
        if n % 100 == 0:
            emit(Stage(stage="replay", fraction=n / len(wanted), text=f"{n} of {len(wanted)} schedules"))
        features = replayed.features(workloads[task], trace)
        if features is None:
            left_out[UNFIT] += 1
            continue
        rows.append((features, seconds, task, workloads[task], replayed.ruled(workloads[task], features)))
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), (), ()]
    return (
        Samples(
            features=np.array(columns[0], np.float32).reshape(len(rows), WIDTH),
            seconds=np.array(columns[1], np.float64),
            tasks=np.array(columns[2], np.str_),
            workloads=np.array(columns[3], np.str_),
            ruled=np.array(columns[4], np.bool_),
        ),
        left_out,
    )


def _unusable(line: Line | str, functions: Mapping[str, tirx.PrimFunc], profile: DeviceProfile) -> str:
    """Why nothing is learned from a line; "" where something is."""
    if isinstance(line, str):
        return UNREADABLE
    name = line.device.name.casefold()
    if family_of(name, is_cpu=any(part in name for part in _PROCESSORS)) is not profile.family:
        return OTHER_FAMILY
    if Stored(line.outcome) is Stored.ABANDONED:
        return NO_TIME
    return "" if line.workload in functions else UNKNOWN_TASK


def _right(line: Line) -> bool:
    return Stored(line.outcome) is Stored.RIGHT and line.state == "done"


class _Replayed:
    """Features of schedules, each computed once for all devices that recorded it."""

    def __init__(self, functions: Mapping[str, tirx.PrimFunc], profile: DeviceProfile) -> None:
        self._functions, self._profile = functions, profile
        self._latest: tuple[str, str] | None = None
        self._features: dict[tuple[str, str], Array | None] = {}
        self._rules: dict[str, Array | None] = {}

    def features(self, workload: str, trace: str) -> Array | None:
        """Features [WIDTH]; None where the trace does not fit."""
        key = workload, traces.identity(trace)
        if key not in self._features:
            try:
                schedule = traces.apply(trace, self._functions[workload])
            except LoweringFailed:
                self._features[key] = None
            else:
                self._features[key] = features_of(schedule.mod["main"], self._profile)
        return self._features[key]

    def ruled(self, workload: str, features: Array) -> bool:
        """Whether these are the features of the default rule's schedule."""
        if workload not in self._rules:
            found = by_rule(self._functions[workload], target_for(self._profile), self._profile)
            self._rules[workload] = found and features_of(found[1].mod["main"], self._profile)
        rule = self._rules[workload]
        return rule is not None and np.array_equal(rule, features)
