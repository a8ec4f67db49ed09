"""What must hold after each attack, whatever it was."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from honed.daemon.settings.schema import Limits
from honed.runtime.errors import HonedError

from .aside import Aside
from .attack import Attack, Findings
from .bed import Bed, until
from .material.models import Victim
from .meter import STALL_MS

BACK_MIB = 48.0  # above its baseline, what the daemon may keep for later
WORKER_BACK_MIB = 192.0  # the worker likewise: its driver loads a compiler with the first kernel it builds
PEAK_MIB = Limits().max_user_bytes / 2**20 + 64.0  # above its baseline, at any time
SETTLE_SECONDS = 60.0
_TRACES = ("Traceback", "was never retrieved", "was never awaited", "Exception ignored", "Fatal Python error")
_WARM = "warm"
_AGAIN_SECONDS = 1.0
_BLUR_MS = 2.0  # what two runs of the same differ by anyway


@dataclass(frozen=True, slots=True)
class Baseline:
    """What one daemon's process held when it was ready and nothing was asked of it but the usual."""

    pid: int
    worker: int
    rss_mib: float
    worker_mib: float
    descriptors: Counter[str]


class Judge:
    """Looks at the bed before and after attacks."""

    def __init__(self, bed: Bed, *, timed: bool = True) -> None:
        """Without `timed`, stalls and latencies are told and not judged."""
        self._bed = bed
        self._timed = timed
        self._baseline: Baseline | None = None
        self._log_at = 0
        self.quiet_ms = 0.0

    def begin(self, attack: Attack) -> None:
        """Before an attack."""
        bed = self._bed
        if attack.others_ms(bed) is not None:
            self.quiet(_AGAIN_SECONDS)  # the machine may be busier than it was
        if self._baseline is None or self._baseline.pid != bed.pid:
            # What the first addition and the first build start or load is there to stay. Its size makes its
            # kernels new, so that no cache has them.
            bed.add(_WARM, Victim(2000 + time.time_ns() // 1000 % 50_000, 4))
            bed.remove(_WARM)
            for aside in (bed.honest, bed.meter):  # they are connected again
                if not until(partial(_works, aside), 60.0):
                    raise AssertionError(
                        "the honest client or the meter is not served by a daemon that is ready"
                    )
            self._baseline = self._now()
        self._log_at = os.path.getsize(bed.service.log_file)
        _reset_peak(bed.pid)
        if bed.service.worker is not None:
            _reset_peak(bed.service.worker.pid)
        bed.honest.take()
        bed.meter.take()

    def quiet(self, seconds: float) -> None:
        """Measure how the honest client fares when nobody attacks; the worst of all measurements counts."""
        self._bed.honest.take()
        time.sleep(seconds)
        self.quiet_ms = max(self.quiet_ms, self._bed.honest.take()["p99_ms"])

    def end(self, attack: Attack, findings: Findings) -> None:
        """After an attack: everything is right, there and back."""
        bed = self._bed
        self._memory_peak(findings)
        if not bed.alive():
            findings.problem(f"the daemon ended with {bed.service.process.returncode}")
            self._log(attack, findings)
            return
        if not until(bed.service.answers, 60.0):
            findings.problem("the daemon does not answer")
        self._models(findings)
        self._honest(attack, findings, bed.honest.take())
        self._stalls(findings, bed.meter.take())
        self._back(attack, findings)
        self._orphans(findings)
        self._log(attack, findings)

    def _now(self) -> Baseline:
        bed = self._bed
        worker = bed.service.worker
        return Baseline(
            pid=bed.pid,
            worker=worker.pid if worker else 0,
            rss_mib=_status(bed.pid, "VmRSS"),
            worker_mib=_status(worker.pid, "VmRSS") if worker else 0.0,
            descriptors=bed.descriptors(),
        )

    def _memory_peak(self, findings: Findings) -> None:
        bed, base = self._bed, self._baseline
        if base is not None and base.pid == bed.pid and bed.alive():
            findings.peak_mib = max(findings.peak_mib, _status(bed.pid, "VmHWM") - base.rss_mib)
            worker = bed.service.worker
            findings.worker_mib = _status(worker.pid, "VmHWM") if worker else 0.0
        if findings.peak_mib > PEAK_MIB:
            findings.problem(
                f"the daemon held {findings.peak_mib:.0f} MiB more than before; {PEAK_MIB:.0f} are its limits"
            )

    def _models(self, findings: Findings) -> None:
        """Every acknowledged model is there and right, and nothing else is."""
        bed = self._bed
        try:
            bed.service.wait_ready()
            with bed.client() as client:
                there = {model["name"]: model["state"] for model in client.models()}
                for name, victim in bed.known.items():
                    if there.get(name) != "READY":
                        findings.lost += 1
                        findings.problem(f"model {name} was acknowledged and is {there.get(name, 'lost')}")
                        continue
                    x = np.linspace(-9, 9, victim.n, dtype=np.float32)
                    if client.infer(name, {"x": x})["y"].tobytes() != victim.answer(x).tobytes():
                        findings.wrong += 1
                        findings.problem(f"model {name} answers wrong")
        except (HonedError, AssertionError) as error:
            findings.problem(f"the models cannot be compared: {error}")
        surplus = set(there) - set(bed.known) - {"wide", "spin"} if "there" in locals() else set()
        if surplus:
            findings.problem(f"models that were removed or refused are there: {sorted(surplus)[:5]}")

    def _honest(self, attack: Attack, findings: Findings, told: dict[str, Any]) -> None:
        findings.wrong += told["wrong"]
        if told["wrong"]:
            findings.problem(f"{told['wrong']} of {told['count']} honest answers were wrong")
        if not told["count"]:
            findings.problem("the honest client was answered nothing")
        refused = {text: n for text, n in told["errors"].items() if text.split(":")[0] not in attack.allowed}
        for text, count in list(refused.items())[:3]:
            findings.problem(f"the honest client was refused {count} times: {text}")
        findings.quiet_ms, findings.beside_ms = self.quiet_ms, findings.beside_ms or told["p99_ms"]
        others = attack.others_ms(self._bed)
        bound = 2 * self.quiet_ms + (others or 0.0) + _BLUR_MS
        if self._timed and others is not None and findings.beside_ms > bound:
            findings.problem(
                f"the honest client's p99 was {findings.beside_ms:.1f} ms beside it; {bound:.1f} are allowed "
                f"({self.quiet_ms:.1f} when quiet)"
            )

    def _stalls(self, findings: Findings, told: dict[str, Any]) -> None:
        findings.pings, findings.stall_ms = told["pings"], told["worst_ms"]
        kinds: Counter[str] = Counter()
        for stall in told["stalls"]:
            label = findings.at(stall["at"] + stall["raw_ms"] / 2e3)
            kinds[label] += 1
            if self._timed and kinds[label] == 1:
                findings.problem(f"the loop stood still for {stall['ms']:.0f} ms during: {label}")

    def _back(self, attack: Attack, findings: Findings) -> None:
        """Memory, descriptors, staging folders and threads are what they were."""
        bed = self._bed
        if self._baseline is not None and self._baseline.pid != bed.pid:
            self._baseline = None  # another daemon: its own baseline comes with the next attack
        base = self._baseline
        if base is not None:
            if not until(lambda: bed.descriptors().total() <= base.descriptors.total(), SETTLE_SECONDS):
                more = bed.descriptors() - base.descriptors
                findings.problem(f"the daemon has descriptors that it had not: {dict(more)}")
            if not until(lambda: _status(bed.pid, "VmRSS") < base.rss_mib + BACK_MIB, SETTLE_SECONDS):
                rss = _status(bed.pid, "VmRSS")
                findings.problem(f"the daemon keeps {rss:.0f} MiB and had {base.rss_mib:.0f}")
            worker = bed.service.worker
            if worker is not None and worker.pid == base.worker:
                held = _status(worker.pid, "VmRSS")
                if held > base.worker_mib + WORKER_BACK_MIB:
                    findings.problem(f"the worker keeps {held:.0f} MiB and had {base.worker_mib:.0f}")
        staging = bed.state / "staging"
        if not until(lambda: not staging.is_dir() or not any(staging.iterdir()), SETTLE_SECONDS):
            findings.problem(f"work in progress was left: {os.listdir(staging)[:3]}")

    def _orphans(self, findings: Findings) -> None:
        def left() -> list[str]:
            ours = {self._bed.pid}
            with contextlib.suppress(psutil.Error):
                ours |= {child.pid for child in psutil.Process(self._bed.pid).children(recursive=True)}
            told = []
            for process in self._bed.processes():
                with contextlib.suppress(psutil.Error):
                    if process.pid not in ours and process.status() != psutil.STATUS_ZOMBIE:
                        told.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            return told

        if not until(lambda: not left(), SETTLE_SECONDS):
            findings.problem(f"processes of an ended daemon live on: {left()[:3]}")
        with contextlib.suppress(psutil.Error):
            dead = [c for c in psutil.Process(self._bed.pid).children() if c.status() == psutil.STATUS_ZOMBIE]
            if len(dead) > 2:
                findings.problem(f"the daemon has {len(dead)} dead children that it does not bury")

    def _log(self, attack: Attack, findings: Findings) -> None:
        text = new_log(self._bed.service.log_file, self._log_at)
        for trace in _TRACES:
            findings.tracebacks += text.count(trace)
        if findings.tracebacks:
            place = min(i for i in (text.find(trace) for trace in _TRACES) if i >= 0)
            findings.problem(f"in the log: {text[max(0, place - 100) : place + 900]}")


def _works(aside: Aside) -> bool:
    time.sleep(0.1)
    told = aside.take()
    return bool(told.get("count") or told.get("pings"))


def new_log(path: Path, at: int) -> str:
    """What was logged from a place on."""
    with path.open("rb") as file:
        file.seek(at)
        return file.read().decode(errors="replace")


def _status(pid: int, field: str) -> float:
    """A field of /proc/PID/status: MiB for memory; 0 where the process is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _reset_peak(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


__all__ = ["STALL_MS", "Baseline", "Judge", "new_log"]
