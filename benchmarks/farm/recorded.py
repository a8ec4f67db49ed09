"""Records a search as one real board of a farm measured it: messages, rulings, and times."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tests.extensions.farm.running import RunningFarm

from honed.farm import rows
from honed.farm.boards import BoardAnswer, DaskBoards, FarmChoice, join
from honed.farm.measurer import FarmMeasurer
from honed.jobs import events
from honed.machine.devices import Device
from honed.protocol.strict import Map
from honed.tuner.records.store import Records
from honed.tuner.setup import setup_for
from honed.tuner.tune.children import Extract, Proposals, SearchChild
from honed.tuner.tune.session import Rooflines, SearchBudget, TuningSession
from honed.tuner.tune.trials import Trials

_BATCH, _THREADS = 32, 2


@dataclass
class Batch:
    """A round: candidates in order, and the seconds that proposing and learning took."""

    task: str
    candidates: list[str]
    search: float


@dataclass
class Recording:
    """The messages and rulings by candidate's id, and the memory and seconds of loading by task."""

    weights: dict[str, int] = field(default_factory=dict)
    defaults: dict[str, float] = field(default_factory=dict)  # Seconds of default schedules
    batches: list[Batch] = field(default_factory=list)
    sent: dict[str, Map] = field(default_factory=dict)
    rulings: dict[str, bytes] = field(default_factory=dict)
    memories: dict[str, bytes] = field(default_factory=dict)
    loading: dict[str, float] = field(default_factory=dict)

    def total(self, best: dict[str, float]) -> float:
        """Return the time of an inference's kernels with these times, in seconds."""
        return sum(weight * best[task] for task, weight in self.weights.items())


class Recorder:
    """`DaskBoards` that notes what goes by."""

    def __init__(self, boards: DaskBoards, recording: Recording) -> None:
        self._boards, self._recording = boards, recording
        self._loads: dict[int, tuple[str, float]] = {}
        self._judged: dict[int, str] = {}
        self.order: list[str] = []  # Candidates in the order of their rulings

    def present(self) -> frozenset[str]:
        """Return what `DaskBoards` does, as all methods below do."""
        return self._boards.present()

    def greet(self, address: str) -> int:
        """Pass the call on to `DaskBoards`."""
        return self._boards.greet(address)

    def settle(self, address: str) -> int:
        """Pass the call on to `DaskBoards`."""
        return self._boards.settle(address)

    def give_up(self, number: int) -> None:
        """Pass the call on to `DaskBoards`."""
        self._boards.give_up(number)

    def close(self) -> None:
        """Pass the call on to `DaskBoards`."""
        self._boards.close()

    def load(self, address: str, memory: bytes) -> int:
        """Pass the call on, and record the task's memory."""
        task = rows.unpack(rows.BoardMemory, memory).workload["task"]
        self._recording.memories[task] = memory
        number = self._boards.load(address, memory)
        self._loads[number] = task, time.monotonic()
        return number

    def judge(self, address: str, trial: bytes) -> int:
        """Pass the call on, and record the candidate that is sent."""
        candidate = rows.unpack(rows.FarmTrial, trial).candidate
        self._recording.sent[candidate["id"]] = candidate
        number = self._boards.judge(address, trial)
        self._judged[number] = candidate["id"]
        return number

    def next_answer(self, seconds: float) -> BoardAnswer | None:
        """Return the board's answer, and record seconds of loading or the ruling."""
        came = self._boards.next_answer(seconds)
        if came is None or came.data is None:
            return came
        if came.number in self._loads:
            task, began = self._loads.pop(came.number)
            self._recording.loading[task] = time.monotonic() - began
        candidate = self._judged.pop(came.number, None)
        if candidate is not None and isinstance(rows.answer(came.data), rows.BoardVerdict):
            self._recording.rulings[candidate] = came.data
            if not candidate.startswith("default "):
                self.order.append(candidate)
        return came


def record(farm: RunningFarm, device: Device, model: Path, folder: Path, trials: int) -> Recording:
    """Tune `model` with one real board of this machine; searching takes turns with measuring."""
    farm.board("--alone", f"--device={device.spec}")
    choice = FarmChoice(
        url=farm.url, certificates=farm.certificates / "pc", device=device.profile.identity.name
    )
    joined, recording = join(choice), Recording()
    recorder = Recorder(joined.boards, recording)
    boards = cast("DaskBoards", recorder)
    setup = setup_for(joined.profile.identity)
    taken = 0

    def heard(news: events.News) -> None:
        nonlocal taken
        match news:
            case events.TasksFound(tasks=tasks):
                found = [row for row in tasks if row.weight and row.default_us is not None]
                recording.weights = {row.task: row.weight for row in found}
                recording.defaults = {row.task: (row.default_us or 0.0) * 1e-6 for row in found}
                taken = len(recorder.order)
            case events.Round(task=task, spent=spent):
                recording.batches.append(Batch(task, recorder.order[taken:], spent.search))
                taken = len(recorder.order)

    with (
        Records.open(folder / "records.sqlite") as records,
        SearchChild(
            joined.profile, folder / "model.npz", 0, batch=_BATCH, answers=True, threads=_THREADS
        ) as search,
    ):
        measuring = Trials(
            lambda begin: FarmMeasurer(boards, joined.profile, "", begin, print, ahead=64), records, setup
        )
        proposals = Proposals(search, records, setup, ahead=False)
        rooflines = Rooflines(joined.profile, lambda: joined.profile)
        session = TuningSession("m", rooflines, measuring, proposals, heard)
        call = Extract(path=model, shapes={}, precision="auto")
        session.run(lambda: search.find_tasks(call), SearchBudget(trials=trials))
    farm.processes.pop().close()
    return recording


def keep(recording: Recording, path: Path) -> None:
    """Write a recording for `kept`."""
    path.write_bytes(pickle.dumps(recording))


def kept(path: Path) -> Recording:
    """Return the recording that `keep` wrote; unpickling is safe only for one's own file."""
    found = pickle.loads(path.read_bytes())
    assert isinstance(found, Recording)
    return found


def steady(rulings: Iterable[bytes]) -> float:
    """Return the median yardstick of rulings, in seconds."""
    found = sorted(
        answer.verdict["yardstick_s"]
        for answer in map(rows.answer, rulings)
        if isinstance(answer, rows.BoardVerdict) and answer.verdict["yardstick_s"] is not None
    )
    return float(found[len(found) // 2])
