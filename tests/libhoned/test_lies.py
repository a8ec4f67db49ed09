"""The library against a service that lies: whatever it sends, the app gets a code, in time."""

from __future__ import annotations

import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.attack.frames import PIECES
from tests.attack.material.mutate import Mutator
from tests.daemon.running import DEADLINE

from .fake import Connection, Fake, Message, right

ROUNDS = 60
MANY = 4000


class Liar:
    """Answers right, or wrongly in one of the ways of the attack suite, and then goes away."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mutator = Mutator(self.random)
        self.told: Counter[str] = Counter()
        self.last = b""

    def __call__(self, connection: Connection, request: Message) -> None:
        lies = (self.cut, self.altered, self.changed, self.announced, self.refused, self.twice)
        lie = self.random.choice(lies) if self.random.random() < 0.3 else None
        if lie is None:
            connection.answer(request)
            return
        self.told[lie.__name__] += 1
        self.last = lie([1, request[1], None, right(request)])
        self._in_pieces(connection, self.last)
        connection.close()

    def cut(self, answer: Message) -> bytes:
        data = packed(answer)
        return data[: self.random.randrange(len(data))]

    def altered(self, answer: Message) -> bytes:
        return self.mutator.data(packed(answer))

    def changed(self, answer: Message) -> bytes:
        """A right message with anything in it."""
        whole = self.random.random() < 0.3
        try:
            if whole:
                return packed(self.mutator.tree(answer, 2))
            return packed([*answer[:3], self.mutator.tree(answer[3], self.random.choice((1, 2, 4)))])
        except (ValueError, TypeError, OverflowError):
            return packed(None)

    def announced(self, answer: Message) -> bytes:
        """A header that promises more than there is, at some place of a right answer."""
        data, piece = packed(answer), self.random.choice(PIECES)
        at = self.random.randrange(len(data))
        return data[:at] + piece + data[at + self.random.choice((0, 1, 4)) :]

    def refused(self, answer: Message) -> bytes:
        error = {"code": "UNAVAILABLE", "message": "é" * 5000, "type": "SequenceLost"}
        notification = [2, "Error", [self.mutator.tree(error)]]
        try:
            return packed(notification) + packed([1, answer[1], self.mutator.tree(error, 2), None])
        except (ValueError, TypeError, OverflowError):
            return packed(None)

    def twice(self, answer: Message) -> bytes:
        return packed(answer) * 3 + packed([1, 7, None, None])

    def _in_pieces(self, connection: Connection, data: bytes) -> None:
        size = self.random.choice((1, 7, 4096))
        for at in range(0, min(len(data), 500 * size), size):
            connection.send(data[at : at + size])


def packed(message: Any) -> bytes:
    data: bytes = msgpack.packb(message)
    return data


def lied_to(driver: Path, folder: Path, seed: int, rounds: int) -> tuple[Counter[str], Liar]:
    """How often each code came, and who lied; a fault of memory ends the driver with a report."""
    liar = Liar(seed)
    with Fake(folder / "s", liar) as fake:
        command = [str(driver), "every", str(fake.path), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE + rounds, check=False)
    assert done.returncode == 0, (seed, liar.last, done.stderr)
    return Counter({code: int(count) for code, count in map(str.split, done.stdout.splitlines())}), liar


def check(codes: Counter[str], liar: Liar) -> None:
    assert len(liar.told) == 6
    assert {"OK", "INTERNAL", "DISCONNECTED", "UNAVAILABLE"} <= set(codes)
    assert "DEADLINE_EXCEEDED" not in codes  # who goes away is noticed at once


@pytest.mark.parametrize("seed", range(2))
def test_lies_are_codes(driver: Path, tmp_path: Path, seed: int) -> None:
    check(*lied_to(driver, tmp_path, seed, ROUNDS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_many_lies_are_codes(driver: Path, tmp_path: Path, seed: int) -> None:
    check(*lied_to(driver, tmp_path, seed, MANY))
