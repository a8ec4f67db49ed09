"""The service left alone for half an hour: `python -m tests.daemon.soak [--minutes 30] [--faults]`.

Real models on the best OpenCL device here, a real tuner, and an app that sends bursts of requests and rests
between them. Tuning is switched on and off in turns by a reload of the configuration, so that requests that
interrupt it are compared with those of a service that does not tune, in one run. No command to tune is given.

Prints requests, failures and wrong answers, the latencies of both kinds, how fast each model was before and
after, and what the service tells of the lease; with --out DIR, the curves of `hone history --served` as
pictures and everything as JSON. With --faults processes are killed and stopped, the disk is filled, wrong and
crashing successors are offered and a GPU's fault record is written meanwhile (`soak_faults`), and each is
listed with what became of it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from honed.runtime import Client
from honed.runtime.errors import HonedError

from . import soak_faults
from .running import Service, start, wait_for

IDLE = """
[limits]
run_seconds = 10
[idle]
enabled = {enabled}
quiet_seconds = 4
settle_seconds = 1
max_pressure_percent = 60
max_load_per_core = 2
[tuner]
spawn = true
"""
PHASE_SECONDS = 120.0
BURST, WITHIN_SECONDS = 8, 0.4  # requests of a burst, and seconds between two
REST_SECONDS = (8.0, 20.0)  # between bursts
CANDIDATE_SECONDS = 10.0  # what the tuner promises (honed.tuner.measure.candidate)
TOLERANCE = 1e-3  # of the range of the output


@dataclass(slots=True)
class Row:
    """One request: when, of which model, how long it took in ms, and what it met."""

    at: float
    model: str
    ms: float
    tuning: bool  # the phase
    interrupts: bool  # a tuner had the lease when the burst began, and this is its first request
    failed: str = ""
    wrong: float = 0.0


@dataclass(slots=True)
class App:
    """An app with its models, inputs and the answers it got first."""

    socket: Path
    inputs: dict[str, dict[str, np.ndarray]]
    expected: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def burst(self, began: float, *, tuning: bool) -> None:
        """Requests to one model; the service may be starting anew: then the app tries again, as apps do."""
        name = random.choice(sorted(self.inputs))
        held = self._held() if tuning else False
        for n in range(BURST):
            self.ask(name, began, tuning=tuning, interrupts=held and n == 0)
            time.sleep(WITHIN_SECONDS)

    def ask(self, name: str, began: float, *, tuning: bool, interrupts: bool) -> None:
        row = Row(at=time.monotonic() - began, model=name, ms=0.0, tuning=tuning, interrupts=interrupts)
        begun = time.monotonic()
        try:
            with Client(self.socket) as client:
                answer = client.infer(name, self.inputs[name])
            row.ms = (time.monotonic() - begun) * 1e3
            expected = self.expected.setdefault(name, answer)
            row.wrong = max(_difference(expected[key], answer[key]) for key in expected)
        except HonedError as error:
            row.failed = f"{type(error).__name__}: {error}"
        self.rows.append(row)

    def _held(self) -> bool:
        try:
            with Client(self.socket) as client:
                return bool(client.status()["lease"]["holder"])
        except HonedError:
            return False


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    if expected.shape != found.shape or not np.array_equal(np.isnan(expected), np.isnan(found)):
        return float("inf")
    scale = float(np.nanmax(np.abs(expected), initial=0.0)) or 1.0
    return float(np.nanmax(np.abs(found - expected), initial=0.0)) / scale


def models(folder: Path) -> dict[str, tuple[Path, dict[str, tuple[int, ...]]]]:
    """Name, file and shapes of each model: LightGlue for 64 keypoints, and two of the trained ones."""
    from honed.tuner.demo import lightglue
    from tests import models as trained

    lightglue.write(folder / "lightglue.onnx", 64)
    return {
        "lightglue": (folder / "lightglue.onnx", {}),
        "mobilenet": (trained.path("mobilenet_v2_035_128"), {}),
    }


def inputs_of(client: Client, name: str) -> dict[str, np.ndarray]:
    """Seeded inputs of the shapes the model takes."""
    rng = np.random.default_rng(7)
    kinds = {"FP32": np.float32, "FP16": np.float16}
    return {
        tensor["name"]: rng.random(tensor["shape"]).astype(kinds[tensor["datatype"]])
        for tensor in client.metadata(name)["inputs"]
    }


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    cache = Path(options.cache) if options.cache else folder / "cache"
    holder = soak_faults.Holder(folder)
    environment = holder.open() if options.faults else {}
    state = holder.state / "state" if options.faults else folder / "state"
    service = start(state, cache, config=IDLE.format(enabled="true"), environment=environment)
    began = time.monotonic()
    try:
        with service.client() as client:
            for name, (path, shapes) in models(folder).items():
                print(f"add {name}", file=sys.stderr)
                client.add(path, name=name, shapes=shapes)
            app = App(service.socket, {name: inputs_of(client, name) for name in models(folder)})
        for name in app.inputs:
            for _ in range(3):
                app.ask(name, began, tuning=False, interrupts=False)
        began = time.monotonic()
        events = soak_faults.Faults(service, holder, folder, app.inputs) if options.faults else None
        _run(service, app, options.minutes * 60, began, events)
        return _told(service, app, events, options)
    finally:
        if options.out:
            Path(options.out).mkdir(parents=True, exist_ok=True)
            (Path(options.out) / "service.log").write_text(service.log)
        service.stop()
        holder.close()


def _run(service: Service, app: App, seconds: float, began: float, events: soak_faults.Faults | None) -> None:
    tuning = True
    switched = time.monotonic()
    injecting = threading.Thread(target=events.run, args=(seconds,)) if events else None
    if injecting:
        injecting.start()
    while time.monotonic() - began < seconds:
        if not events and time.monotonic() - switched > PHASE_SECONDS:
            tuning, switched = not tuning, time.monotonic()
            service.configure(IDLE.format(enabled="true" if tuning else "false"))
        time.sleep(random.uniform(*REST_SECONDS))
        app.burst(began, tuning=tuning)
        done = time.monotonic() - began
        bad = sum(bool(row.failed) or row.wrong > TOLERANCE for row in app.rows)
        print(f"\r{done:5.0f} s, {len(app.rows)} requests, {bad} failed or wrong", end="", file=sys.stderr)
    print(file=sys.stderr)
    if injecting:
        injecting.join()


def _told(
    service: Service, app: App, events: soak_faults.Faults | None, options: argparse.Namespace
) -> dict[str, Any]:
    rows = app.rows
    wait_for(service.answers, "the service to answer", service)
    with service.client() as client:
        status, histories = client.status(), {name: client.history(name) for name in app.inputs}
        metrics = client.metrics()
    result = {
        "device": status["device"],
        "seconds": rows[-1].at,
        "requests": len(rows),
        "failed": [asdict(row) for row in rows if row.failed],
        "wrong": [asdict(row) for row in rows if row.wrong > TOLERANCE],
        "largest_difference": max(row.wrong for row in rows if not row.failed),
        "latencies": latencies(rows),
        "models": {name: _speed(history) for name, history in histories.items()},
        "lease": status["lease"],
        "retries": metrics["whole"].get("retries"),
        "tuning": metrics["tuning"],
        "gpu_faults": metrics["gpu_faults"],
        "faults": events.story if events else [],
        "histories": histories,
    }
    if options.out:
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "soak.json").write_text(json.dumps(result, indent=1))
        for name in app.inputs:
            _picture(service, name, out / f"{name}.png")
    return result


def _picture(service: Service, name: str, path: Path) -> None:
    command = [sys.executable, "-m", "honed.tool.main", f"--socket={service.socket}", "history", name]
    subprocess.run([*command, "--served", f"--png={path}"], check=True, stdout=subprocess.DEVNULL)


def latencies(rows: list[Row]) -> dict[str, Any]:
    """Each latency over its model's median in the nearest phase without tuning, so that versions compare."""
    good = [row for row in rows if not row.failed]
    quiet = [row for row in good if not row.tuning]

    def usual(row: Row) -> float:
        near = sorted((r for r in quiet if r.model == row.model), key=lambda r: abs(r.at - row.at))[:24]
        return statistics.median(r.ms for r in near)

    groups = {
        "tuning off": quiet,
        "tuning on, all": [row for row in good if row.tuning],
        "tuning on, interrupting": [row for row in good if row.interrupts],
    }
    told = {}
    for name, group in groups.items():
        ratios = sorted(row.ms / usual(row) for row in group) if quiet else []
        if ratios:
            told[name] = {
                "count": len(ratios),
                "p50": float(np.percentile(ratios, 50)),
                "p95": float(np.percentile(ratios, 95)),
                "p99": float(np.percentile(ratios, 99)),
                "p99_ms": float(np.percentile([row.ms for row in group], 99)),
            }
    return told


def failures(rows: list[dict[str, Any]]) -> Counter[str]:
    """How often what was said."""
    return Counter(row["failed"] for row in rows)


def _speed(history: dict[str, Any]) -> dict[str, Any]:
    points = history["latency"]
    return {
        "version": history["version"],
        "first_ms": statistics.median(p["us"] for p in points[:3]) / 1e3,
        "last_ms": statistics.median(p["us"] for p in points[-3:]) / 1e3,
        "versions": [
            {key: v[key] for key in ("number", "why", "old_us", "new_us", "quarantine")}
            for v in history["versions"]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", action="store_true", help="make everything fail that can")
    parser.add_argument("--cache", help="cache folder to use, with the device's measured peaks")
    parser.add_argument("--out", help="folder for soak.json and pictures")
    options = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        result = soak(options, Path(name))
    show(result)


def show(result: dict[str, Any]) -> None:
    rows = [
        ("device", f"{result['device']['name']}, driver {result['device']['driver_version']}"),
        ("requests", f"{result['requests']} in {result['seconds']:.0f} s"),
        ("failed", str(len(result["failed"]))),
        (
            "wrong",
            f"{len(result['wrong'])}, largest difference {result['largest_difference']:.1e} of the range",
        ),
    ]
    for group, f in result["latencies"].items():
        shares = f"over the usual: p50 {f['p50']:.2f}, p95 {f['p95']:.2f}, p99 {f['p99']:.2f}"
        rows.append((group, f"{f['count']} requests; {shares}; p99 {f['p99_ms']:.1f} ms"))
    for model, f in result["models"].items():
        speed = f"{f['first_ms']:.1f} ms at first, {f['last_ms']:.1f} ms at last"
        rows.append((model, f"{speed}, version {f['version']}"))
    lease = result["lease"]
    left = lease["release"]
    rows += [
        ("lease", f"{lease['seconds']:.0f} s, granted {lease['granted']} times, overdue {lease['overdue']}"),
        ("left after", f"{left['p50_ms']:.1f} ms (median), {left['max_ms']:.1f} ms at most"),
        ("bound", f"{CANDIDATE_SECONDS * 1e3:.0f} ms"),
        *(("failed", f"{count} times: {text}") for text, count in failures(result["failed"]).items()),
        *(("fault", line) for line in result["faults"]),
        ("in the kernel log", json.dumps(result["gpu_faults"])),
    ]
    for name, text in rows:
        print(f"{name:24s} {text}")


if __name__ == "__main__":
    main()
