"""Defines the rows of plain data, as MessagePack, between the machine that searches and the boards.

The functions that boards run are in `board`; their arguments and answers are bytes of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import msgpack

from honed.machine.kernellog.parse import parse
from honed.machine.kernellog.story import DatedFault, FaultIncident, group
from honed.protocol.errors import InvalidArgument
from honed.protocol.strict import Map, from_plain, to_plain
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.records.rows import Verdict

VERSION = 1  # Version of these rows; a board with another is not used
MAX_BYTES = 1 << 30
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """A board's description of itself.

    `bench` is the device that it predicts for, "" if it measures. It accepts `depth` candidates at a time,
    one after the other or all at once. `profile` is the device's, with its peaks.
    """

    version: int
    honed: str  # Version of honed
    host: str
    bench: str
    depth: int
    profile: Map


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardMemory:
    """A task of a `search`: its workload, and the files of inputs and answers in its folder."""

    search: str
    workload: Map
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardReady:
    """An answer that the task is loaded; the board moves `rate` bytes/s at its size, 0 if not known."""

    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmTrial:
    """A candidate of a task, to be judged; `best` is the best known time of the task, in seconds."""

    search: str
    task: str
    candidate: Map
    best: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A record of the kernel log that belongs to a candidate: its text, and when it was written."""

    candidate: str
    device: str | None
    monotonic_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardVerdict:
    """A board's verdict; `phases` are its phases' wall seconds, `faults` those since the last verdict."""

    verdict: Map
    phases: dict[str, float]
    faults: tuple[LogLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardBusy:
    """An answer that the board did nothing; try again after `seconds`. `why` is a sentence.

    With `reload` the task must be loaded again first.
    """

    why: str
    seconds: float
    reload: bool = False


Answer = BoardReady | BoardVerdict | BoardBusy
_ANSWERS: Final[dict[str, type[Answer]]] = {
    "boardready": BoardReady,
    "ruling": BoardVerdict,
    "notnow": BoardBusy,
}
_NAMES: Final = {kind: name for name, kind in _ANSWERS.items()}


def pack(row: object) -> bytes:
    """Return a row as bytes; an answer is preceded by the name of its kind."""
    named = {_NAMES[type(row)]: to_plain(row)} if isinstance(row, Answer) else to_plain(row)
    packed: bytes = msgpack.packb(named, use_bin_type=True)
    return packed


def unpack(kind: type[R], data: bytes) -> R:
    """Return the row in the data; raise InvalidArgument for data that is no row."""
    return _decode(kind, _plain(data))


def answer(data: bytes) -> Answer:
    """Return the answer in a board's data; raise InvalidArgument for data that is no answer."""
    plain = _plain(data)
    if not isinstance(plain, dict) or len(plain) != 1 or next(iter(plain)) not in _ANSWERS:
        raise InvalidArgument("a board answered something that is no answer; compare versions")
    name, body = next(iter(plain.items()))
    return _decode(_ANSWERS[name], body)


def _plain(data: bytes) -> object:
    if len(data) > MAX_BYTES:
        raise InvalidArgument(f"a row of {len(data)} bytes is too long; compare versions")
    try:
        return msgpack.unpackb(data, raw=False, max_bin_len=MAX_BYTES)
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidArgument(f"a row is no MessagePack ({error}); compare versions") from error


def _decode(kind: type[R], plain: object) -> R:
    try:
        return from_plain(kind, plain, where=kind.__name__.lower())
    except ValueError as error:
        raise InvalidArgument(f"{error}; compare versions") from error


def memory_of(workload: Workload, search: str) -> BoardMemory:
    """Return a task's row, with all files in its folder."""
    return BoardMemory(
        search=search,
        workload=_with_pairs(workload, "parameters"),
        files={name: (workload.folder / name).read_bytes() for name in _files(workload)},
    )


def workload_in(folder: Path, memory: BoardMemory) -> Workload:
    """Return the workload of a task, and write its files to `folder`.

    Raises InvalidArgument if the files are not those of the workload.
    """
    workload = _read("a task", Workload, memory.workload, "parameters")
    count = workload.sets * len(workload.parameters)
    if len(memory.files) != count or set(memory.files) != set(_files(workload)):
        raise InvalidArgument("a task came without its files, or with others; compare versions")
    for name, data in memory.files.items():
        (folder / name).write_bytes(data)
    return replace(workload, folder=folder)


def candidate_map(candidate: Candidate) -> Map:
    """Return a candidate as the map that a trial has."""
    return _with_pairs(candidate, "inner")


def candidate_of(trial: FarmTrial) -> Candidate:
    """Return the candidate of a trial; raise InvalidArgument if it cannot be read."""
    return _read("a candidate", Candidate, trial.candidate, "inner")


def verdict_of(ruling: BoardVerdict) -> Verdict:
    """Return the verdict of a ruling; raise InvalidArgument if it cannot be read."""
    return replace(_read("a verdict", Verdict, ruling.verdict), story=None, host=None)


def _files(workload: Workload) -> list[str]:
    return [f"{n}.{p}.npy" for n in range(workload.sets) for p in range(len(workload.parameters))]


def _with_pairs(value: Workload | Candidate, memory: str) -> Map:
    """Return a map of the value, in which the field `memory` has pairs of type and shape."""
    plain: Map = to_plain(value)
    return plain | {memory: [[each["dtype"], each["shape"]] for each in plain[memory]]}


def _read(what: str, kind: type[R], plain: Map, memory: str = "") -> R:
    """Return the value of a map, in which the field `memory` is as in `_with_pairs`."""
    try:
        pairs = {memory: [{"dtype": name, "shape": shape} for name, shape in plain[memory]]} if memory else {}
        return from_plain(kind, plain | pairs, where=what, unknown_ignored=True)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} cannot be read ({error}); compare versions") from error


def log_lines(faults: Sequence[tuple[str, FaultIncident]]) -> tuple[LogLine, ...]:
    """Return the log records of incidents, each with its candidate's id."""
    return tuple(
        LogLine(
            candidate=candidate,
            device=one.fault.device,
            monotonic_s=one.monotonic_s,
            text=one.fault.text,
        )
        for candidate, story in faults
        for one in story.seen
    )


def stories(lines: Sequence[LogLine]) -> list[tuple[str, FaultIncident]]:
    """Return the incidents of log records, with their candidates' ids."""
    by_candidate: dict[str, list[DatedFault]] = {}
    for line in lines:
        fault = parse(line.text, device=line.device)
        if fault is not None:
            dated = DatedFault(fault=fault, monotonic_s=line.monotonic_s)
            by_candidate.setdefault(line.candidate, []).append(dated)
    return [(candidate, story) for candidate, seen in by_candidate.items() for story in group(seen)]
