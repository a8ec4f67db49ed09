"""A service under mixed load for an hour: python -m benchmarks.soak [--minutes 60] [--faults] [--out DIR].

Plain `hone add` adds a detector, a voice detector, a decoder and a model with open sizes on the best OpenCL
device here. Clients come and go: each opens a connection, sends a burst and closes it. Every answer is
compared with ONNX Runtime's in this process, without optimisations. Between bursts all clients pause, so that
the service compiles and tunes. Meanwhile the service is restarted twice and workers are killed three times.
With --faults all of `faults` is injected instead: processes are killed and stopped, the disk is filled, wrong
and crashing versions are offered, and a GPU's fault record is written.

Prints requests, failures, wrong answers, the memory of each process at the start and the end, and versions
published and rolled back; with --out DIR also as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
import psutil
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from tests import decoders, models
from tests.daemon.running import Service, memory, start, wait_for

from honed.runtime import Client
from honed.runtime.errors import HonedError, SequenceLost

from . import faults

Arrays = dict[str, NDArray[Any]]
CONFIG: Final = """
[limits]
run_seconds = 20
[idle]
quiet_seconds = 4
settle_seconds = 1
max_pressure_percent = 80
max_load_per_core = 3
[serve]
engine = "fastest"
[tuner]
spawn = true
"""
CLIENTS: Final = 3
BUSY_SECONDS, REST_SECONDS = 45.0, 75.0  # Phases of a cycle
KILLED_SECONDS: Final = 30.0  # Time after a kill in which a worker's sequences may be lost
STEPS: Final = 12  # Steps of a sequence
INPUTS: Final = 4  # Sets of inputs for each model
TOLERANCE: Final = 2e-3  # Share of the range of an output


@dataclass(frozen=True)
class Course:
    """Requests that follow each other, in one sequence where the model has state, with the right answers."""

    inputs: tuple[Arrays, ...]
    expected: tuple[Arrays, ...]


@dataclass(frozen=True)
class Subject:
    """A model under test; `state` has its outputs that are state, by input."""

    name: str
    path: Path
    courses: tuple[Course, ...]
    state: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Row:
    """The time, model, duration and result of a request."""

    at: float
    model: str
    ms: float = 0.0
    failed: str = ""
    disturbed: bool = False  # The service was being restarted, or a killed worker had its state
    error: float = 0.0  # Largest difference, of the range of the output


def reference(path: Path) -> ort.InferenceSession:
    """Return a session without optimisations, on one thread that leaves the processors to the service."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answered(session: ort.InferenceSession, inputs: Arrays) -> Arrays:
    """Return all outputs by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def detector(folder: Path) -> Subject:
    """Return YOLOX-nano on made-up pictures."""
    path = models.path("yolox_nano")
    session = reference(path)
    (image,) = session.get_inputs()
    height, width = image.shape[2:]
    pictures = [models.picture(height, width, seed)[None] for seed in range(INPUTS)]
    return Subject("detector", path, tuple(_alone(session, {image.name: picture}) for picture in pictures))


def voice(folder: Path) -> Subject:
    """Return Silero VAD, which carries its state from a window of sound to the next."""
    path = models.path("silero_vad")
    session = reference(path)
    rng = np.random.default_rng(1)
    rate = {"sr": np.array(16000, np.int64)}

    def windows() -> Iterator[Arrays]:
        for _ in range(STEPS):
            yield {"input": (rng.standard_normal((1, 576)) * 0.1).astype(np.float32), **rate}

    start_state = {"state": np.zeros((2, 1, 128), np.float32)}
    state = {"state": "stateN"}
    courses = tuple(_sequence(session, list(windows()), start_state, state) for _ in range(INPUTS))
    return Subject("voice", path, courses, state)


def decoder(folder: Path) -> Subject:
    """Return a small decoder, whose keys and values grow: a prompt, then a token at a time."""
    path = decoders.decoder(folder / "decoder.onnx")
    rng = np.random.default_rng(2)
    courses = []
    for length in (3, 9, 70, 1)[:INPUTS]:
        app = decoders.InApp(path)
        ids = [rng.integers(0, decoders.VOCABULARY, (1, n)) for n in (length, *[1] * STEPS)]
        logits = [{"logits": app.step(each)} for each in ids]
        courses.append(Course(tuple({"input_ids": each} for each in ids), tuple(logits)))
    return Subject("decoder", path, tuple(courses), {"": ""})


def open_sizes(folder: Path) -> Subject:
    """Return a convolution, a softmax and a mean on images of any size."""
    rng = np.random.default_rng(3)
    weights = numpy_helper.from_array(rng.standard_normal((8, 3, 3, 3)).astype(np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Softmax", ["r"], ["y"], axis=1),
        helper.make_node("ReduceMean", ["r"], ["mean"], axes=[2, 3], keepdims=0),
    ]
    sizes = {"image": [1, 3, "h", "w_"], "y": [1, 8, "h", "w_"], "mean": [1, 8]}
    image, *outputs = (helper.make_tensor_value_info(name, 1, shape) for name, shape in sizes.items())
    graph = helper.make_graph(nodes, "g", [image], outputs, [weights])
    path = folder / "open.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    session = reference(path)
    shapes = ((64, 64), (48, 80), (33, 17), (96, 64))[:INPUTS]
    images = [rng.standard_normal((1, 3, *shape)).astype(np.float32) for shape in shapes]
    return Subject("open", path, tuple(_alone(session, {"image": each}) for each in images))


SUBJECTS: Final[tuple[Callable[[Path], Subject], ...]] = (detector, voice, decoder, open_sizes)


def _alone(session: ort.InferenceSession, inputs: Arrays) -> Course:
    return Course((inputs,), (answered(session, inputs),))


def _sequence(
    session: ort.InferenceSession, steps: list[Arrays], state: Arrays, names: dict[str, str]
) -> Course:
    """Return a sequence by ONNX Runtime, which is given its state back."""
    expected = []
    for step in steps:
        outputs = answered(session, step | state)
        state = {name: outputs.pop(output) for name, output in names.items()}
        expected.append(outputs)
    return Course(tuple(steps), tuple(expected))


def difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Return the largest difference over the expected output's range; infinite for NaN or other shapes."""
    if expected.shape != found.shape or not np.array_equal(np.isnan(expected), np.isnan(found)):
        return float("inf")
    scale = float(np.nanmax(np.abs(expected), initial=0.0)) or 1.0
    return float(np.nanmax(np.abs(found - expected), initial=0.0)) / scale


class Load:
    """Clients that come and go; `rows` are their requests."""

    def __init__(self, service: Service, subjects: list[Subject], seconds: float) -> None:
        self.rows: list[Row] = []
        self.disturbed = threading.Event()  # The service is being restarted
        self.killed = float("-inf")  # Time of a worker's last kill
        self._service = service
        self._subjects = subjects
        self.began = time.monotonic()
        self._end = self.began + seconds
        self._threads = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def run(self, also: Callable[[], None]) -> None:
        """Run to the end, and `also` in this thread meanwhile."""
        for thread in self._threads:
            thread.start()
        also()
        while any(thread.is_alive() for thread in self._threads):
            time.sleep(10.0)
            bad = sum(bool(row.failed and not row.disturbed) or row.error > TOLERANCE for row in self.rows)
            line = f"\r{self.seconds:5.0f} s, {len(self.rows)} requests, {bad} failed or wrong"
            print(line, end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self._end:
            if self.seconds % (BUSY_SECONDS + REST_SECONDS) > BUSY_SECONDS:
                time.sleep(0.5)
                continue
            subject = rng.choice(self._subjects)
            courses = [rng.choice(subject.courses) for _ in range(rng.randint(1, 4))]
            self.burst(subject, courses)
            time.sleep(rng.uniform(0.05, 1.0))

    def burst(self, subject: Subject, courses: list[Course]) -> None:
        """Send some courses on a connection of their own."""
        row = Row(self.seconds, subject.name)
        try:
            with Client(self._service.socket) as client:
                for course in courses:
                    self._course(client, subject, course)
        except HonedError as error:  # Connection error
            row.failed, row.disturbed = f"{type(error).__name__}: {error}", self.disturbed.is_set()
            self.rows.append(row)

    def _course(self, client: Client, subject: Subject, course: Course) -> None:
        sequence = client.sequence(subject.name) if subject.state else None
        try:
            for inputs, expected in zip(course.inputs, course.expected, strict=True):
                row = Row(self.seconds, subject.name, disturbed=self.disturbed.is_set())
                self.rows.append(row)
                begun = time.monotonic()
                try:
                    found = sequence.infer(inputs) if sequence else client.infer(subject.name, inputs)
                except HonedError as error:
                    row.failed = f"{type(error).__name__}: {error}"
                    killed = isinstance(error, SequenceLost) and row.at - self.killed < KILLED_SECONDS
                    row.disturbed |= self.disturbed.is_set() or killed
                    return
                row.ms = (time.monotonic() - begun) * 1e3
                row.error = max(difference(right, found[name]) for name, right in expected.items())
        finally:
            if sequence:
                sequence.close()


@dataclass
class Events:
    """Restarts of the service and kills of workers, spread over the run; `story` has a line for each."""

    service: Service
    load: Load
    seconds: float
    restarts: int
    kills: int
    story: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Let each happen at its time."""
        planned = [self._restart] * self.restarts + [self._kill] * self.kills
        random.Random(0).shuffle(planned)
        for n, happen in enumerate(planned):
            at = self.seconds * (n + 1) / (len(planned) + 1)
            time.sleep(max(0.0, at - self.load.seconds))
            when = self.load.seconds
            self.story.append(f"{when:5.0f} s  {happen()}")

    def _restart(self) -> str:
        begun = time.monotonic()
        self.load.disturbed.set()
        self.service.process.terminate()
        self.service.process.wait()
        self.service.restart()
        self.service.wait_listening()
        self.service.wait_ready()
        self.load.disturbed.clear()
        return f"restarted: every model ready after {time.monotonic() - begun:.1f} s"

    def _kill(self) -> str:
        found = [role for role in processes(self.service) if "worker" in role or "cpu" in role]
        if not found:
            return "no worker was there to be killed"
        role = random.Random(len(self.story)).choice(found)
        self.load.killed = self.load.seconds
        processes(self.service)[role].kill()
        return f"kill -9 of {role}"


def processes(service: Service) -> dict[str, psutil.Process]:
    """Return the processes of a service by the program that they run."""
    found: dict[str, psutil.Process] = {}
    for process in [daemon := psutil.Process(service.process.pid), *daemon.children(recursive=True)]:
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        role = next((word for word in words if word.startswith("honed.")), " ".join(words[:2]))
        while role in found:
            role += "'"
        found[role] = process
    return found


def footprint(service: Service) -> dict[str, int]:
    """Return the bytes of each process's own memory."""
    found = {}
    for role, process in processes(service).items():
        try:
            found[role] = memory(process.pid)
        except (OSError, KeyError):
            continue
    return found


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all of it, and return the figures."""
    subjects = [make(folder) for make in SUBJECTS]
    holder = faults.Holder(folder)
    environment = holder.open() if options.faults else {}
    state = holder.state / "state" if options.faults else folder / "state"
    cache = Path(options.cache) if options.cache else folder / "cache"
    service = start(state, cache, config=CONFIG, environment=environment)
    try:
        with service.client() as client:
            for subject in subjects:
                print(f"add {subject.name}", file=sys.stderr)
                client.add(subject.path, name=subject.name)
        seconds = options.minutes * 60
        load = Load(service, subjects, seconds)
        for subject in subjects:
            load.burst(subject, [subject.courses[0]])
        before = footprint(service)
        if options.faults:
            inputs = {s.name: s.courses[0].inputs[0] for s in subjects if not s.state}
            injected = faults.Faults(service, holder, folder, inputs)
            load.run(lambda: injected.run(seconds))
            story = injected.story
        else:
            events = Events(service, load, seconds, options.restarts, options.kills)
            load.run(events.run)
            story = events.story
        return figures(service, load, subjects, before, story)
    finally:
        if options.out:
            Path(options.out).mkdir(parents=True, exist_ok=True)
            (Path(options.out) / "service.log").write_text(service.log)
        service.stop()
        holder.close()


def figures(
    service: Service, load: Load, subjects: list[Subject], before: dict[str, int], story: list[str]
) -> dict[str, Any]:
    """Return the figures to print."""
    wait_for(service.answers, "the service to answer", service)
    rows = load.rows
    with service.client() as client:
        status, served = client.status(), {model["name"]: model for model in client.models()}
        histories = {subject.name: client.history(subject.name) for subject in subjects}
        metrics = client.metrics()
    return {
        "device": status["device"],
        "seconds": load.seconds,
        "requests": dict(Counter(row.model for row in rows)),
        "failed": [asdict(row) for row in rows if row.failed and not row.disturbed],
        "lost to restarts and kills": sum(bool(row.failed) and row.disturbed for row in rows),
        "wrong": [asdict(row) for row in rows if row.error > TOLERANCE],
        "largest error": max((row.error for row in rows if not row.failed), default=0.0),
        "engines": {name: model["engine"] for name, model in served.items()},
        "versions": {
            name: [
                {key: version[key] for key in ("number", "why", "old_us", "new_us", "quarantine")}
                for version in history["versions"]
            ]
            for name, history in histories.items()
        },
        "memory": {"start": before, "end": footprint(service)},
        "lease": status["lease"],
        "retries": metrics["whole"].get("retries"),
        "tuning": metrics["tuning"],
        "story": story,
    }


def show(result: dict[str, Any]) -> None:
    """Print the result as a table."""
    rows = [
        ("device", f"{result['device']['name']}, driver {result['device']['driver_version']}"),
        ("time", f"{result['seconds']:.0f} s"),
        *(("requests", f"{name}: {count}") for name, count in result["requests"].items()),
        ("failed", str(len(result["failed"]))),
        ("lost", f"{result['lost to restarts and kills']} to restarts and kills"),
        ("wrong", f"{len(result['wrong'])}; largest error {result['largest error']:.1e} of the range"),
    ]
    failed = Counter(f"{row['model']}: {row['failed']}" for row in result["failed"])
    rows += [("failed", f"{count} times: {text}") for text, count in failed.items()]
    rows += [("engine", f"{name}: {engine}") for name, engine in result["engines"].items()]
    rows += [
        (
            "version",
            f"{name} {v['number']}: {v['why']}"
            + (f"; taken back: {v['quarantine']}" if v["quarantine"] else ""),
        )
        for name, versions in result["versions"].items()
        for v in versions
    ]
    begin, end = result["memory"]["start"], result["memory"]["end"]
    rows += [
        ("memory", f"{role}: {begin.get(role, 0) / 2**20:.0f} MiB, then {end.get(role, 0) / 2**20:.0f}")
        for role in sorted({*begin, *end})
    ]
    lease = result["lease"]
    rows.append(("lease", f"{lease['seconds']:.0f} s, granted {lease['granted']} times"))
    rows += [("event", line) for line in result["story"]]
    for name, text in rows:
        print(f"{name:10s} {text}")


def main() -> None:
    """Run the soak and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--faults", action="store_true", help="make everything fail that can (as root)")
    parser.add_argument("--cache", help="cache folder to use, with the device's measured peaks")
    parser.add_argument("--out", help="folder for soak.json and the service's log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = soak(options, Path(name))
    if options.out:
        (Path(options.out) / "soak.json").write_text(json.dumps(result, indent=1))
    show(result)
    raise SystemExit(bool(result["failed"] or result["wrong"]))


if __name__ == "__main__":
    main()
