"""Ten processes of as many users bring the same and different models; one of them is hostile."""

from __future__ import annotations

import contextlib
import random
import time

import psutil

from honed.daemon.features.user_models import AppsSettings

from .attack import Attack
from .bed import Bed, until
from .bringing import DEEDS, Running

_HONEST = tuple(range(62_001, 62_010))
_HOSTILE = 62_099
_LEAVE_SECONDS = 60.0  # that users' engines may take to end, on a busy machine


class Brings(Attack):
    """Floods, wrong hashes, huge and broken files, halves, guesses of names, removals of others' models."""

    name = "hostile-brings"
    what = "models that apps bring: nine honest users' processes beside a hostile one"
    needs_root = True
    least_seconds = 60.0

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        bed.service.socket.chmod(0o777)
        end = time.monotonic() + seconds
        honest = [Running("honest", bed.service.socket, uid, rng.randrange(2**31)) for uid in _HONEST]
        hostile = Running("hostile", bed.service.socket, _HOSTILE, rng.randrange(2**31), _HONEST)
        rounds = 0
        while (rounds < DEEDS or time.monotonic() < end) and hostile.round_ends():
            bed.findings.offered("a deed of the hostile user")
            self._quotas(bed)
            rounds += 1
        for process in (*honest, hostile):
            told = process.end()
            bed.findings.codes.update(told.codes)
            for problem in told.problems:
                bed.findings.problem(f"{process.name}: {problem}")
            if not told.rounds:
                bed.findings.problem(f"{process.name} was never served")
        self._cleared(bed)

    def _quotas(self, bed: Bed) -> None:
        with bed.client() as root:
            owners = [model["owner"] for model in root.models()]
        if owners.count(str(_HOSTILE)) > AppsSettings().max_models:
            bed.findings.problem("the hostile user has more models than the quota")

    def _cleared(self, bed: Bed) -> None:
        """Root removes what the hostile user left; nothing of users remains."""
        with bed.client() as root:
            for model in root.models():
                if model["owner"]:
                    if model["owner"] != str(_HOSTILE):
                        bed.findings.problem(f"a model of user {model['owner']} was not removed")
                    root.remove(model["name"])
        if not until(lambda: not _engines(bed), _LEAVE_SECONDS):
            bed.findings.problem("users' engines did not end")
        if not until(lambda: not list((bed.state / "staging").iterdir()), _LEAVE_SECONDS):
            bed.findings.problem("the staging folder is not empty")


def _engines(bed: Bed) -> list[int]:
    found = []
    for each in bed.processes():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            if "honed.cpu.worker" in each.cmdline():
                found.append(each.pid)
    return found
