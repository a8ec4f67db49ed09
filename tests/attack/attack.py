"""What an attack is, what one round of it found, and all rounds as a table."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .bed import Bed

HEADS = ("attack", "tries", "wrong", "lost", "traces", "stall ms", "peak MiB", "worker", "p99 ms", "result")
_KEPT_INPUTS = 40  # the latest, for who repeats a round
_KEPT_BYTES = 1 << 20  # of each
_KEPT_PROBLEMS = 20


@dataclass
class Findings:
    """One round of one attack: what was tried and what was wrong. Threads may share it."""

    tries: int = 0
    wrong: int = 0
    lost: int = 0  # acknowledged models that were not found again
    tracebacks: int = 0
    pings: int = 0
    stall_ms: float = 0.0  # the longest, without waiting for a processor
    peak_mib: float = 0.0  # of the daemon, above its baseline
    worker_mib: float = 0.0  # the worker's whole peak
    quiet_ms: float = 0.0  # an honest client's 99th percentile
    beside_ms: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    left_out: str = ""
    codes: Counter[str] = field(default_factory=Counter)
    inputs: deque[tuple[float, str, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT_INPUTS))
    _sent: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=5000))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def offered(self, label: str, data: bytes | bytearray | str = b"") -> None:
        """Note one try, with its input, before it is made."""
        now = time.monotonic()
        content = data.encode(errors="replace") if isinstance(data, str) else bytes(data[:_KEPT_BYTES])
        with self._lock:
            self.tries += 1
            self.inputs.append((now, label, content))
            self._sent.append((now, label))

    def problem(self, sentence: str) -> None:
        """Something that must not be."""
        with self._lock:
            if len(self.problems) < _KEPT_PROBLEMS:
                self.problems.append(sentence[:1000])
            elif len(self.problems) == _KEPT_PROBLEMS:
                self.problems.append("and more")

    def answered(self, error: Mapping[str, Any] | None, label: str) -> str:
        """Note the error (or None) of an answer and give its code; INTERNAL is a problem."""
        code = "OK" if error is None else str(error.get("code"))
        with self._lock:
            self.codes[code] += 1
        if code == "INTERNAL":
            self.problem(f"INTERNAL for {label}: {error and error.get('message')}")
        return code

    def at(self, moment: float) -> str:
        """What was being sent at a moment of the monotonic clock."""
        with self._lock:
            before = [label for when, label in self._sent if when <= moment]
        return before[-1] if before else "nothing yet"


class Attack(ABC):
    """Something hostile. `run` takes every choice from `rng`, so that a round can be repeated by its seed."""

    name: ClassVar[str]
    what: ClassVar[str]
    allowed: ClassVar[frozenset[str]] = frozenset()  # codes that the honest client may be answered
    restarts: ClassVar[bool] = False  # the daemon is another one afterwards
    needs_root: ClassVar[bool] = False
    least_seconds: ClassVar[float] = 2.0

    @abstractmethod
    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        """Attack for about so long; what is tried and found goes to `bed.findings`."""

    def others_ms(self, bed: Bed) -> float | None:
        """One inference of the attacker, for which an honest one may wait; None: the wait is not judged."""
        return None


def seeded(seed: int, name: str, number: int) -> random.Random:
    """The randomness of one round."""
    return random.Random(f"{seed}/{name}/{number}")


def total(rounds: list[Findings]) -> Findings:
    """All rounds of one attack as one."""
    whole = Findings()
    for each in rounds:
        for name in ("tries", "wrong", "lost", "tracebacks", "pings", "seconds"):
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
        for name in ("stall_ms", "peak_mib", "worker_mib", "beside_ms"):
            setattr(whole, name, max(getattr(whole, name), getattr(each, name)))
        if each.beside_ms == whole.beside_ms:
            whole.quiet_ms = each.quiet_ms  # of the round that is shown
        whole.problems += each.problems
        whole.left_out = whole.left_out or each.left_out
        whole.codes += each.codes
    return whole


def result(found: Findings) -> str:
    """One word, or why it was not tried."""
    if found.problems:
        return f"FAILED ({len(found.problems)})"
    return f"left out: {found.left_out}" if found.left_out else "held"


def row(name: str, found: Findings) -> tuple[str, ...]:
    """The cells of one attack."""
    latency = f"{found.quiet_ms:.1f}/{found.beside_ms:.1f}" if found.beside_ms else "-"
    return (
        name,
        str(found.tries),
        str(found.wrong),
        str(found.lost),
        str(found.tracebacks),
        f"{found.stall_ms:.0f}" if found.pings else "-",
        f"{found.peak_mib:.0f}",
        f"{found.worker_mib:.0f}",
        latency,
        result(found),
    )


def table(rounds: dict[str, list[Findings]]) -> str:
    """One line for each attack; numbers to the right."""
    lines = [HEADS, *(row(name, total(found)) for name, found in rounds.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    told = []
    for line in lines:
        cells = [
            cell.ljust(width) if column in (0, len(HEADS) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        told.append("  ".join(cells).rstrip())
    return "\n".join(told)


def verdict(rounds: dict[str, list[Findings]]) -> tuple[int, int]:
    """How many attacks passed and failed; those left out did neither."""
    found = [total(each) for each in rounds.values()]
    failed = sum(bool(each.problems) for each in found)
    return sum(not each.left_out and not each.problems for each in found), failed


def plain(rounds: dict[str, list[Findings]]) -> dict[str, Any]:
    """For --json."""
    kept: tuple[str, ...] = (
        "tries",
        "wrong",
        "lost",
        "tracebacks",
        "pings",
        "stall_ms",
        "peak_mib",
        "worker_mib",
    )
    kept += ("quiet_ms", "beside_ms", "seconds", "problems", "left_out")
    return {
        name: [{key: getattr(each, key) for key in kept} | {"codes": dict(each.codes)} for each in found]
        for name, found in rounds.items()
    }
