"""Clients that are slow, silent or half-closed: they harm nobody, and are answered as far as they can be."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from tests.daemon.raw import Raw, packed

from . import users
from .attack import Attack
from .bed import VICTIM, Bed
from .frames import note

_SLOW = 40  # connections at once
_SILENT = 10
WIDE_REQUEST = {
    "model_name": "wide",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}],
    "raw_input_contents": [b"\0\0\0\0"],
}


def beside(threads: list[Callable[[], None]]) -> None:
    """Run all at once, to their ends."""
    running = [threading.Thread(target=thread) for thread in threads]
    for each in running:
        each.start()
    for each in running:
        each.join()


class _Beside(Attack):
    """An attack in whose company an honest client must fare well."""

    def others_ms(self, bed: Bed) -> float | None:
        return bed.victim_ms


class Slow(_Beside):
    """Bytes one at a time, on many connections."""

    name = "slow-clients"
    what = "forty connections that send a request byte by byte; each is answered"

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with ExitStack() as held:
                raws = [held.enter_context(bed.raw(users.GREEDY)) for _ in range(_SLOW)]
                self._together(bed, rng, raws, min(end, time.monotonic() + 4.0))

    def _together(self, bed: Bed, rng: random.Random, raws: list[Raw], end: float) -> None:
        """All requests begin, in turns, and are whole just before the end."""
        x = np.asarray([rng.uniform(-9, 9) for _ in range(VICTIM.n)], np.float32)
        data = packed(5, "ModelInfer", VICTIM.request("victim", x))
        bed.findings.offered("a request byte by byte", data)
        pause = max(0.001, (end - time.monotonic()) * 0.6 / len(data))
        for at in range(len(data)):
            for raw in raws:
                raw.send(data[at : at + 1])
            time.sleep(pause)
        wanted = VICTIM.answer(x).tobytes()
        for raw in raws:
            message = raw.read()
            bed.findings.offered("a slow client")
            if message is None:
                bed.findings.problem("a slow client was dropped before its time was over")
                continue
            note(bed, message, "a slow client")
            if message[2] is not None or message[3]["raw_output_contents"] != [wanted]:
                bed.findings.wrong += 1
                bed.findings.problem(f"a slow client was answered {str(message)[:300]}")


class Silent(_Beside):
    """Asks much and reads nothing."""

    name = "silent-clients"
    what = "clients that pipeline requests with large answers, or half a message, and never read"

    def others_ms(self, bed: Bed) -> float | None:
        return bed.others_ms  # the wide model takes no longer than the slow one

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        with ExitStack() as held:
            raws = [held.enter_context(bed.raw(users.GREEDY)) for _ in range(_SILENT)]
            for raw in raws:
                raw.socket.setblocking(False)
            number = 0
            while time.monotonic() < end:
                number += 1
                data = packed(number, "ModelInfer", WIDE_REQUEST)
                bed.findings.offered("a request whose answer is not read", data)
                for raw in raws[: _SILENT // 2]:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        raw.socket.send(data)
                if number == 1:
                    for raw in raws[_SILENT // 2 :]:
                        with contextlib.suppress(BlockingIOError):
                            raw.socket.send(packed(1, "ModelInfer", WIDE_REQUEST)[: rng.randrange(1, 90)])
                time.sleep(0.01)


class HalfClosed(_Beside):
    """Sends and shuts its side down: the answer must come all the same."""

    name = "half-closed"
    what = "SHUT_WR right after requests, or in the middle of one; the answers must come"

    def others_ms(self, bed: Bed) -> float | None:
        return bed.others_ms

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        told = False
        while time.monotonic() < end:
            count = rng.choice((1, 1, 3, 20))
            x = np.asarray([rng.uniform(-9, 9) for _ in range(VICTIM.n)], np.float32)
            data = b"".join(packed(i, "ModelInfer", VICTIM.request("victim", x)) for i in range(count))
            cut = rng.choice((b"", b"", packed(99, "ServerLive", {})[:5]))
            label = f"{count} requests, {'half of one more, ' if cut else ''}and SHUT_WR"
            bed.findings.offered(label, data + cut)
            with bed.raw(users.GREEDY) as raw:
                raw.send(data + cut)
                time.sleep(rng.choice((0.0, 0.0, 0.002)))
                raw.socket.shutdown(socket.SHUT_WR)
                answers = [message for message in raw.rest() if message[0] == 1 and message[1] < 99]
            wanted = VICTIM.answer(x).tobytes()
            right = sum(m[2] is None and m[3]["raw_output_contents"] == [wanted] for m in answers)
            for message in answers:
                note(bed, message, label)
            if right != count and not told:
                told = True
                bed.findings.problem(f"{label}: {right} of {count} were answered")
