"""The jobs of `python -m honed.tuner`: each is a dataclass that is a command line, and is parsed from one.

Each field is the option of its name, or the positional argument. Options with their default are left out.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from honed.process.children import FREE, CrashHeard, ExitInfo, JobCrashed, ResourceLimits, python, running
from honed.protocol import strict
from honed.protocol.errors import HonedError, InvalidArgument, NotFound
from honed.protocol.values import PRECISIONS, ObservedSizes, OptimisationCheck

from .events import (
    CompileDone,
    Done,
    Exported,
    Faults,
    Fitted,
    History,
    Imported,
    Learned,
    News,
    R,
    Tuned,
    Written,
)
from .events import parse as parse_event

J = TypeVar("J", bound="Job[Any]")
Shapes = Mapping[str, tuple[int, ...]]
Sizes = tuple[ObservedSizes, ...]
_FLAGS = {"shapes": ("--shape",), "settings": ("--setting",), "output": ("-o", "--output")}
_CHOICES = {"precision": PRECISIONS, "model": ("lightglue",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[R]):
    """A run of the compiler child whose last event is an R. `memory_mib` limits its memory, 0: no limit."""

    command: ClassVar[tuple[str, ...]]
    positional: ClassVar[str] = ""  # Field that is the positional argument
    memory_mib: int = 0

    @classmethod
    def result(cls) -> type[R]:
        """Return R, the class of the job's result."""
        found: type[R] = typing.get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        return found

    def arguments(self) -> list[str]:
        """Return the arguments that `parse` turns back into this job, without the program."""
        options, last = list[str](), list[str]()
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == self.positional:
                last = ["--", str(value)]
            elif value != _default(each):
                options += _texts(_flags(each)[-1], value)
        return [*self.command, *options, *last]

    def program(self) -> tuple[str, ...]:
        """Return the command of the child process that does this job: the program and its arguments."""
        return python("honed.tuner", *self.arguments())

    def derive(self, kind: type[J], *defaults: str, **changes: Any) -> J:
        """Return a job of class `kind` with this job's values of the fields that both have, and `changes`.

        `defaults` names the fields that keep their defaults; any other field without a value raises
        TypeError.
        """
        return strict.copy_fields(kind, self, *defaults, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelJob(Job[R]):
    """A job on an ONNX file, which the user calls `name`.

    `shapes` are those of open inputs. `calibration` is a folder of inputs to measure errors in fp16 on.
    `device` is a spec, None for the best device.
    """

    positional = "file"
    file: Path
    name: str | None = None
    shapes: Shapes = field(default_factory=dict)
    precision: str = "auto"  # A member of PRECISIONS
    calibration: Path | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(ModelJob[Done]):
    """Finds out whether a file can be compiled; `profile` as `Compile` has it."""

    command = ("check",)
    profile: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(ModelJob[Fitted]):
    """Finds out what of a file would be compiled for a `profile`, and what the CPU engine would run."""

    command = ("fit",)
    profile: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptimisations(ModelJob[OptimisationCheck]):
    """Finds out how far ONNX Runtime may optimise a file without changing its answers.

    It runs on so many `threads`, 0: two, or one where there is one. With `half`, a path, the fp16 form of the
    file is written there, and it is that form whose answers are compared with those of the file.
    """

    command = ("optimisations",)
    threads: int = 0
    half: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(ModelJob[CompileDone]):
    """Compiles a file to `output`, with the best schedules of `records`, None: with what needs no trial.

    `existing_build` is a compiled form of the same model whose choice of precision is taken. With `profile`,
    a file, it is for the device of that, and answers are not compared; with `device`, too, that profile has
    its peaks. `sizes` are those that parts are compiled for whose sizes depend on the data; without, those of
    `existing_build`. What the CPU engine is faster with is left out, but with `keep_slower`.
    """

    command = ("compile",)
    output: Path
    sizes: Sizes = ()
    keep_slower: bool = False
    existing_build: Path | None = None
    profile: Path | None = None
    records: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(ModelJob[R]):
    """A session of tuning. `current` is the version served now, whose precision is used.

    `cache_dir` stores peaks and cost models. `instrument` names an extension's judge of candidates, which has
    `settings` and replaces a device here. Up to `hints` of a hub are tried for a task in a day.
    """

    current: Path | None = None
    instrument: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    hints: int = 4
    records: Path
    cache_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks(Search[Done]):
    """Finds a model's tasks, and times their default schedules."""

    command = ("tasks",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune(Search[Tuned]):
    """Makes a model faster, within so many `trials` or `seconds`; `output` gets the tuned version."""

    command = ("tune",)
    output: Path | None = None
    trials: int | None = None
    seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsJob(Job[R]):
    """A job on the file of tuning records."""

    records: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(RecordsJob[Exported]):
    """Writes records as JSON lines; with `best` only the best of each task.

    With `own` what other machines can use of what was measured here: the best, and what is in quarantine.
    With `spread` what can be learned from: fast, slow and refused candidates of each task.
    """

    command = ("records", "export")
    output: Path
    best: bool = False
    own: bool = False
    spread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Import(RecordsJob[Imported]):
    """Takes in what another board exported, which must be of the device; with `hints` a hub's hints alone."""

    command = ("records", "import")
    positional = "file"
    file: Path
    device: str | None = None
    hints: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowHistory(RecordsJob[History]):
    """Tells a model's latency over its trials."""

    command = ("records", "history")
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFaults(RecordsJob[Faults]):
    """Tells the candidates in quarantine."""

    command = ("records", "faults")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn(Job[Learned]):
    """Learns the prior of a family of devices from `file`, records as exported or a folder of such.

    `models`, an ONNX file or a folder, are those that the records are of. The family is that of `device`, of
    the device of `profile`, or of the `bench`. `output` gets the prior, where it is better than none.
    """

    command = ("learn",)
    positional = "file"
    file: Path
    models: Path
    output: Path
    device: str | None = None
    profile: Path | None = None
    bench: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo(Job[Written]):
    """Writes a demo model; with `symbolic` the number of keypoints is open."""

    command = ("demo",)
    positional = "model"
    model: str
    output: Path
    keypoints: int = 192
    symbolic: bool = False
    seed: int = 0


JOBS: tuple[type[Job[Any]], ...] = (
    Compile, Check, Fit, CheckOptimisations, Tune, Tasks, Export, Import, ShowHistory, ListFaults, Learn,
    Demo,
)  # fmt: skip
Work = Callable[[Any, Callable[[News], None]], Any]  # Does a job, reports news, returns the result


def extension(name: str) -> Mapping[type[Job[Any]], Work]:
    """Return the functions that do an extension's jobs, whose command begins with `name`; raise NotFound."""
    from importlib.metadata import entry_points  # Imported late, as it takes long

    for each in entry_points(group="honed.jobs", name=name):
        found: Mapping[type[Job[Any]], Work] = each.load()
        return found
    raise NotFound(f"the jobs of {name} are in an extension that is not installed: apt install honed-{name}")


def parse(arguments: Sequence[str], about: str) -> Job[Any]:
    """Return the job that a command line describes; `about` is shown by --help.

    Exits with status 2 if the command line is invalid, and raises InvalidArgument for an invalid shape.
    """
    kinds = JOBS
    if arguments and arguments[0].isidentifier() and arguments[0] not in {job.command[0] for job in JOBS}:
        with suppress(NotFound):
            kinds = (*JOBS, *extension(arguments[0]))
    parser = argparse.ArgumentParser(prog="python -m honed.tuner", description=about)
    top = parser.add_subparsers(required=True, metavar="COMMAND")
    groups = {"": top}
    for job in kinds:
        group = " ".join(job.command[:-1])
        if group not in groups:
            groups[group] = top.add_parser(group).add_subparsers(required=True, metavar="COMMAND")
        one = groups[group].add_parser(job.command[-1], help=job.__doc__)
        one.set_defaults(job=job)
        hints = typing.get_type_hints(job)
        for each in fields(job):
            _add(one, each, hints[each.name], positional=each.name == job.positional)
    given = vars(parser.parse_args(arguments))
    kind: type[Job[Any]] = given.pop("job")
    given |= {name: put(given[name]) for name, (_, put) in _REPEATED.items() if name in given}
    return kind(**given)


def _add(parser: argparse.ArgumentParser, each: Field[Any], hint: Any, *, positional: bool) -> None:
    choices = _CHOICES.get(each.name)
    kind = next((kind for kind in (Path, int, float) if kind in (hint, *typing.get_args(hint))), str)
    default = _default(each)
    if positional:
        parser.add_argument(each.name, type=kind, choices=choices)
    elif hint is bool:
        parser.add_argument(*_flags(each), dest=each.name, action="store_true")
    elif each.name in _REPEATED:
        one, _ = _REPEATED[each.name]
        parser.add_argument(*_flags(each), dest=each.name, type=one, default=[], action="append")
    else:
        required = default is MISSING
        parser.add_argument(
            *_flags(each), dest=each.name, type=kind, choices=choices, default=default, required=required
        )


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the input's name and shape from INPUT=1,3,224,224; raise InvalidArgument for other text.

    The input's name may hold an equals sign.
    """
    name, equals, sizes = text.rpartition("=")
    try:
        if not equals or not name:
            raise ValueError
        return name, tuple(int(size) for size in sizes.split(",") if size.strip())
    except ValueError:
        raise InvalidArgument(f"--shape {text!r} is not of the form INPUT=1,3,224,224") from None


def _setting(text: str) -> tuple[str, str]:
    """Return the name and the value of a setting from NAME=VALUE; raise InvalidArgument for other text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"--setting {text!r} is not of the form NAME=VALUE")
    return name, value


def _sizes(text: str) -> ObservedSizes:
    """Return the sizes of a partition, by its number, from PART:100,7; raise InvalidArgument."""
    part, colon, sizes = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return ObservedSizes(part=int(part), sizes=tuple(int(size) for size in sizes.split(",") if size))
    except ValueError:
        raise InvalidArgument(f"--sizes {text!r} is not of the form PART:100,7") from None


# Options that may be repeated: the parser of each value, and the collection of all values.
_REPEATED: Mapping[str, tuple[Callable[[str], Any], Callable[[Iterable[Any]], Any]]] = {
    "shapes": (shape, dict),
    "settings": (_setting, dict),
    "sizes": (_sizes, tuple),
}


def _flags(each: Field[Any]) -> tuple[str, ...]:
    return _FLAGS.get(each.name, (f"--{each.name.replace('_', '-')}",))


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _texts(flag: str, value: Any) -> list[str]:
    if value is True:
        return [flag]
    if isinstance(value, tuple):
        return [f"{flag}={each.part}:{','.join(map(str, each.sizes))}" for each in value]
    if isinstance(value, Mapping):
        return [
            f"{flag}={name}={each if isinstance(each, str) else ','.join(map(str, each))}"
            for name, each in value.items()
        ]
    return [f"{flag}={value:.12g}" if isinstance(value, float) else f"{flag}={value}"]


# ---- The events of a child that does a job, and its result ----


class Listener(Generic[R]):
    """A parser of the output lines of one child."""

    def __init__(self, job: Job[R]) -> None:
        self._result = job.result()
        self._last: R | HonedError | None = None
        self._crash = CrashHeard()

    def hear(self, line: bytes) -> News | None:
        """Return the news in a line, or None for the last event, which is kept for `result`.

        Returns None for a crash report, too; raises NoEvent for any other line.
        """
        if self._crash.hears(line):
            return None
        event = parse_event(line, self._result)
        if isinstance(event, News):
            return event
        self._last = event
        return None

    def result(self, death: ExitInfo) -> R:
        """Return the job's result, after the child has ended; raise the error it reported, or JobCrashed."""
        if isinstance(self._last, HonedError):
            raise self._last
        if self._last is None or death.status != 0:
            raise JobCrashed(replace(death, inside=self._crash.inside))
        return self._last


def do(job: Job[R], bounds: ResourceLimits = FREE, *, seconds: float) -> R:
    """Run a job in a child within `seconds`, and return the result.

    Raises the error that the child reports, JobCrashed, and NoEvent for other output.
    """
    listener = Listener(job)
    with running(job.program(), bounds, seconds=seconds) as child:
        for line in child.lines():
            listener.hear(line)
        return listener.result(child.death())
