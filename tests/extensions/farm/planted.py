"""Boards without devices or processes: what they answer is planted, everything else is as in a farm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from honed.farm import rows
from honed.farm.boards import BoardAnswer
from honed.machine.profile import DeviceProfile
from honed.protocol.strict import to_plain
from honed.tuner.records.rows import Outcome, Timing, Verdict


def right(seconds: float = 1e-3, yardstick: float = 1e-4) -> rows.BoardVerdict:
    """A board's verdict on a right candidate."""
    timing = Timing(median_s=seconds, low_s=seconds, high_s=seconds, repeats=6)
    verdict = Verdict(outcome=Outcome.RIGHT, timing=timing, yardstick_s=yardstick)
    return rows.BoardVerdict(verdict=to_plain(verdict), phases={"build": 0.2, "time": 0.1}, faults=())


@dataclass
class PlantedBoard:
    """`judges` gives its answer to a candidate's id; None: it dies of it."""

    judges: Callable[[str], rows.Answer | None] = lambda _: right()
    version: int = rows.VERSION
    depth: int = 2
    judged: list[str] = field(default_factory=list)
    bests: list[float | None] = field(default_factory=list)


class PlantedBoards:
    """`Boards`; `clock` goes on by what is waited for in vain."""

    def __init__(self, profile: DeviceProfile, **boards: PlantedBoard) -> None:
        self.profile = profile
        self.boards = boards
        self.now = 0.0
        self.closed = False
        self._queue: deque[tuple[int, str, str, bytes]] = deque()
        self._count = 0

    def clock(self) -> float:
        return self.now

    def present(self) -> frozenset[str]:
        return frozenset(self.boards)

    def greet(self, address: str) -> int:
        return self._call(address, "greet", b"")

    def load(self, address: str, memory: bytes) -> int:
        return self._call(address, "load", memory)

    def judge(self, address: str, trial: bytes) -> int:
        return self._call(address, "judge", trial)

    def settle(self, address: str) -> int:
        return self._call(address, "settle", b"")

    def next_answer(self, seconds: float) -> BoardAnswer | None:
        while self._queue:
            number, address, what, data = self._queue.popleft()
            board = self.boards.get(address)
            answer = self._answer(board, what, data) if board is not None else None
            if answer is not None:
                return BoardAnswer(number, answer)
            self.boards.pop(address, None)
        self.now += seconds
        return None

    def give_up(self, number: int) -> None:
        self._queue = deque(call for call in self._queue if call[0] != number)

    def close(self) -> None:
        self.closed = True

    def _call(self, address: str, what: str, data: bytes) -> int:
        self._count += 1
        self._queue.append((self._count, address, what, data))
        return self._count

    def _answer(self, board: PlantedBoard, what: str, data: bytes) -> bytes | None:
        if what == "greet":
            name = next(name for name, each in self.boards.items() if each is board)
            profile = self.profile.to_dict()
            greeting = rows.Greeting(
                version=board.version, honed="1", host=name, bench="", depth=board.depth, profile=profile
            )
            return rows.pack(greeting)
        if what == "load":
            return rows.pack(rows.BoardReady(rate=1e9))
        if what == "settle":
            return rows.pack(rows.BoardVerdict(verdict={}, phases={}, faults=()))
        trial = rows.unpack(rows.FarmTrial, data)
        board.judged.append(trial.candidate["id"])
        board.bests.append(trial.best)
        answer = board.judges(trial.candidate["id"])
        return None if answer is None else rows.pack(answer)
