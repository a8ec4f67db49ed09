"""The adversary that stays: `python -m tests.attack [--minutes 5] [--seed N]`.

Attacks a real service in rounds until the time is over, with an honest client beside that compares every
answer, and looks after each attack whether anything is wrong, lost, slow or left. Prints a table, and last a
line "N passed, N failed". A round that failed keeps its input and the log, and says how to repeat it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from . import (
    brings,
    clients,
    descriptors,
    disturbances,
    frames,
    greedy,
    headers,
    infer_fields,
    kills,
    onnx_files,
    state_folders,
    texts,
)
from .attack import Attack, Findings, plain, seeded, table, verdict
from .bed import Bed
from .judge import Judge

ATTACKS: dict[str, type[Attack]] = {
    each.name: each
    for each in (
        frames.Frames,
        infer_fields.InferFields,
        descriptors.Descriptors,
        headers.Headers,
        onnx_files.OnnxFiles,
        onnx_files.Frontend,
        texts.Configuration,
        texts.KernelLog,
        clients.Slow,
        clients.Silent,
        clients.HalfClosed,
        greedy.Profiles,
        greedy.Queue,
        greedy.LargeFrames,
        greedy.Regions,
        greedy.Connections,
        brings.Brings,
        disturbances.Clock,
        disturbances.FullDisk,
        disturbances.ReadOnlyDisk,
        kills.Kills,
        state_folders.StateFolders,
    )
}

_LONGEST_SECONDS = 20.0  # of one round of one attack
_QUIET_SECONDS = 2.0


class Adversary:
    """Runs attacks on a bed, which is made anew where an attack broke it."""

    def __init__(self, seed: int, keep: Path, *, timed: bool = True) -> None:
        self._seed = seed
        self._timed = timed
        self._keep = keep
        self._kept = tempfile.TemporaryDirectory(prefix="attack-kept-")  # made once for all beds
        self._bed: Bed | None = None
        self._judge: Judge | None = None
        self.rounds: dict[str, list[Findings]] = {}

    def round(self, attack: Attack, number: int, seconds: float) -> None:
        """One round of one attack."""
        findings = Findings()
        self.rounds.setdefault(attack.name, []).append(findings)
        begun = time.monotonic()
        try:
            bed, judge = self._ready()
            bed.findings = findings
            if attack.needs_root and not bed.root:
                findings.left_out = "needs root"
                return
            judge.begin(attack)
            self._attack(bed, attack, number, seconds)
            judge.end(attack, findings)
        except Exception:  # noqa: BLE001 - a bed that is broken is a finding, and the next attack goes on
            findings.problem(f"the bed broke: {traceback.format_exc(limit=-4)}")
        findings.seconds = time.monotonic() - begun
        if findings.problems:
            self._tell(attack, number, findings)
            self.close()
        self._progress(attack, number, findings)

    def close(self) -> None:
        """End the bed; the next round has a fresh one."""
        if self._bed is not None:
            self._bed.close()
        self._bed = self._judge = None

    def end(self) -> None:
        """Nothing is left."""
        self.close()
        self._kept.cleanup()

    def _ready(self) -> tuple[Bed, Judge]:
        if self._bed is None or self._judge is None:
            self._bed = Bed(Path(self._kept.name))
            self._bed.open()
            self._judge = Judge(self._bed, timed=self._timed)
            self._judge.quiet(_QUIET_SECONDS)
        return self._bed, self._judge

    def _attack(self, bed: Bed, attack: Attack, number: int, seconds: float) -> None:
        try:
            attack.run(bed, seeded(self._seed, attack.name, number), seconds)
        except Exception:  # noqa: BLE001 - what an attack did not expect of the service is a finding
            bed.findings.problem(f"unforeseen: {traceback.format_exc(limit=-4)}")

    def _tell(self, attack: Attack, number: int, findings: Findings) -> None:
        folder = self._keep / f"{attack.name}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "problems").write_text("\n\n".join(findings.problems))
        for index, (_, label, data) in enumerate(findings.inputs):
            safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in label)[:60]
            (folder / f"{index:02d}-{safe}").write_bytes(data)
        if self._bed is not None and hasattr(self._bed, "service"):
            with contextlib.suppress(OSError):
                (folder / "log").write_text(self._bed.service.log)
        print(f"\nFAILED {attack.name}, round {number}; its input and the log are in {folder}", flush=True)
        for problem in findings.problems:
            print("   ", problem.replace("\n", "\n    "))
        print(
            f"    again: .venv/bin/python -m tests.attack --only {attack.name} --seed {self._seed} "
            f"--round {number} --minutes 0.2",
            flush=True,
        )

    def _progress(self, attack: Attack, number: int, findings: Findings) -> None:
        print(
            f"{attack.name:20s} round {number}: {findings.tries} tries in {findings.seconds:.1f} s, "
            f"stall {findings.stall_ms:.0f} ms, peak {findings.peak_mib:.0f} MiB, "
            f"p99 {findings.quiet_ms:.1f}/{findings.beside_ms:.1f} ms "
            f"{dict(findings.codes.most_common(6)) or ''}",
            flush=True,
        )


def run(adversary: Adversary, attacks: Sequence[Attack], seconds: float, first_round: int) -> None:
    """Rounds until the time is over; the first one is whole."""
    end, number = time.monotonic() + seconds, first_round
    while number == first_round or time.monotonic() < end:
        for index, attack in enumerate(attacks):
            left = end - time.monotonic()
            if left <= 0 and number > first_round:
                return
            share = left / (len(attacks) - index)
            adversary.round(attack, number, min(_LONGEST_SECONDS, max(attack.least_seconds, 0.7 * share)))
        number += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack; gives the exit status: 1 where a check failed."""
    options = _parser().parse_args(arguments)
    if options.list:
        for name, each in ATTACKS.items():
            print(f"{name:20s} {each.what}")
        return 0
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    chosen = [name for name in (options.only or "").split(",") if name] or list(ATTACKS)
    unknown = [name for name in chosen if name not in ATTACKS]
    if unknown:
        print(f"there is no attack {unknown[0]!r}; --list shows which there are", file=sys.stderr)
        return 2
    keep = Path(tempfile.mkdtemp(prefix="honed-attack-"))
    print(f"seed {seed}; what fails is kept in {keep}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    adversary = Adversary(seed, keep, timed=not options.untimed)
    try:
        run(adversary, [ATTACKS[name]() for name in chosen], options.minutes * 60, options.round)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        adversary.end()
        with contextlib.suppress(OSError):
            keep.rmdir()  # empty where nothing failed
        if options.json:
            Path(options.json).write_text(json.dumps({"seed": seed, **plain(adversary.rounds)}, indent=1))
    passed, failed = verdict(adversary.rounds)
    print(f"\n{table(adversary.rounds)}\nseed {seed}\n{passed} passed, {failed} failed")
    return int(failed > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="by default another one each time, which is printed")
    parser.add_argument("--round", type=int, default=0, help="number of the first round, to repeat one")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these attacks alone")
    parser.add_argument("--list", action="store_true", help="show the attacks")
    parser.add_argument("--untimed", action="store_true", help="tell stalls and latencies, do not judge them")
    parser.add_argument("--json", metavar="FILE", help="write everything found there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
