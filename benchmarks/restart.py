"""Restart of the whole service: `python -m benchmarks.restart [--minutes 1] [--times 3]`.

Adds real models, tunes and publishes two, and offers a wrong successor so that one version is in quarantine.
Then stops the service by SIGTERM and by kill -9 and starts it again, while an app for each model sends
requests until it gets a right answer, and a tuner that had the lease asks for it again. Prints seconds from
the start of the process to each right answer, and whether versions, kernels, quarantine and programs were
kept.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests import models as trained
from tests.daemon.running import Service, start, wait_for

from honed.runtime import Client
from honed.runtime.calling.leaseclient import LeaseHolder
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import ScheduleProvenance
from honed.runtime.errors import HonedError
from honed.tuner import lightglue

TRAINED = ("mobilenet_v2_035_128", "squeezenet_fp16", "super_resolution", "yolox_nano")
TUNED = ("lightglue", "mobilenet_v2_035_128")
BOUND_SECONDS = 2.0  # Limit for each model
TOLERANCE = 1e-3  # Share of an output's range that answers may differ from those before
PAUSE_SECONDS = 0.01  # Pause between an app's attempts while nobody listens
# Settings by which the machine counts as idle at once, whatever else it does, unless there are requests.
CONFIG = """[idle]
quiet_seconds = 0.0
settle_seconds = 0.0
max_pressure_percent = 1000
max_load_per_core = 1000
max_gpu_percent = 100
max_temperature_c = 1000
on_battery = true
max_candidate_seconds = 10.0
"""
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(slots=True)
class App:
    """An app of one model, with the answer it had first."""

    socket: Path
    model: str
    inputs: Arrays
    expected: Arrays
    usual: float  # Seconds that an answer takes
    answered: float = 0.0  # Monotonic
    wrong: int = 0

    def ask(self) -> None:
        """Send a request until the answer is right, as apps do while a service starts."""
        while True:
            try:
                with Client(self.socket) as client:
                    answer = client.infer(self.model, self.inputs)
            except HonedError:
                time.sleep(PAUSE_SECONDS)
                continue
            self.answered = time.monotonic()
            if all(close(self.expected[name], answer[name]) for name in self.expected):
                return
            self.wrong += 1


def close(expected: np.ndarray, found: np.ndarray) -> bool:
    """Return whether an answer is right."""
    scale = float(np.max(np.abs(expected), initial=0.0)) or 1.0
    return float(np.max(np.abs(found - expected), initial=0.0)) <= TOLERANCE * scale


def inputs_of(client: Client, name: str) -> Arrays:
    """Return seeded inputs of the shapes that the model takes."""
    rng = np.random.default_rng(7)
    kinds = {"FP32": np.float32, "FP16": np.float16}
    return {
        tensor["name"]: rng.random(tensor["shape"]).astype(kinds[tensor["datatype"]])
        for tensor in client.metadata(name)["inputs"]
    }


def known_to(client: Client, socket: Path, name: str) -> App:
    """Return an app that was served before."""
    given = inputs_of(client, name)
    expected, taken = client.infer(name, given), []
    for _ in range(3):
        begun = time.monotonic()
        client.infer(name, given)
        taken.append(time.monotonic() - begun)
    return App(socket, name, given, expected, usual=statistics.median(taken))


def tune(service: Service, name: str, minutes: float) -> None:
    """Tune a model as a user would, until the new version has passed its canary."""
    command = [sys.executable, "-m", "honed.tool.main", "tune", name, f"--socket={service.socket}"]
    subprocess.run([*command, f"--minutes={minutes:g}", "--json"], check=True, stdout=subprocess.DEVNULL)
    with service.client() as client:
        given = inputs_of(client, name)

        def settled() -> bool:
            client.infer(name, given)
            return not client.history(name)["on_trial"]

        wait_for(settled, "the tuned version to prove itself", service)


def offer_wrong(service: Service, name: str, folder: Path) -> None:
    """Publish a successor with other weights and other probes, which the service rejects for good."""
    given, path = folder / "given.honed", folder / "wrong.honed"
    with service.client() as client:
        with client.export(name) as served:
            given.write_bytes(served.compiled.read())
            expected = served.sha256
        with contextlib.closing(modelfile.read(given)) as file:
            proof = file.model.proof
            assert proof is not None
            kept = {index for probe in proof.probes for index in probe.inputs}
            places = enumerate(buffer.place for buffer in file.model.buffers)
            values = {index: np.array(file.constant(index)) for index, place in places if place == "constant"}
            for index, value in values.items():
                if index not in kept and value.dtype.kind == "f":
                    values[index] = value * np.asarray(1.01, value.dtype) + np.asarray(1, value.dtype)
            sources = (
                file.model.sources[0] + "\n",
                *file.model.sources[1:],
            )  # Other kernels than those served
            modelfile.write(path, dataclasses.replace(file.model, sources=sources), values)
        published = client.publish(name, path, expected=expected, why="made wrong on purpose")
        assert not published["published"], published


def kept(service: Service, cache: Path) -> dict[str, Any]:
    """Return the state that must be the same after a restart."""
    with service.client() as client:
        found: dict[str, Any] = {"programs": sorted(p.name for p in cache.glob("programs/*/*"))}
        for model in client.models():
            name = model["name"]
            history, shown = client.history(name), client.show(name)
            found[name] = {
                "sha256": shown["sha256"],
                "version": history["version"],
                "tuned kernels": sum(ScheduleProvenance.parse(k["schedule"]).tried for k in shown["kernels"]),
                "quarantine": [v["number"] for v in history["versions"] if v["quarantine"]],
                "stints": len(history["stints"]),
            }
    return found


def restart(service: Service, apps: list[App], *, hard: bool) -> dict[str, float]:
    """Restart; return seconds from the process's start until it listens, by model, and until the lease."""
    with LeaseHolder(0.2, socket=str(service.socket)) as lease:
        assert lease.wait_until_granted(60), lease.why
        if hard:
            service.kill()
        else:
            service.process.terminate()
            assert service.process.wait() == 0
        asking = [threading.Thread(target=app.ask) for app in apps]
        begun = time.monotonic()
        service.restart()
        for thread in asking:
            thread.start()
        while not service.answers():
            time.sleep(PAUSE_SECONDS)
        times = {"listens": time.monotonic() - begun}
        for app, thread in zip(apps, asking, strict=True):
            thread.join()
            times[app.model] = app.answered - begun
        times["last answer"] = max(times.values())
        assert lease.wait_until_granted(60), lease.why
        times["lease granted again"] = time.monotonic() - begun
    return times


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Restart the service under load, and return the clients' results."""
    cache = folder / "cache"
    service = start(folder / "state", cache, config=CONFIG)
    try:
        lightglue.write(folder / "lightglue.onnx", 64)
        files = {"lightglue": folder / "lightglue.onnx"} | {name: trained.path(name) for name in TRAINED}
        with service.client() as client:
            for name, path in files.items():
                print(f"add {name}", file=sys.stderr)
                client.add(path, name=name)
        for name in TUNED if options.minutes else ():
            print(f"tune {name}", file=sys.stderr)
            tune(service, name, options.minutes)
        offer_wrong(service, TUNED[1], folder)
        with service.client() as client:
            apps = [known_to(client, service.socket, name) for name in files]
        before = kept(service, cache)
        rounds = []
        for hard in (False, True) * options.times:
            seconds = restart(service, apps, hard=hard)
            service.wait_ready()
            after = kept(service, cache)
            rounds.append(
                {"how": "kill -9" if hard else "SIGTERM", "seconds": seconds, "same": after == before}
            )
            print(json.dumps(rounds[-1]), file=sys.stderr)
        offer_again(service, folder)
        return {
            "kept": before,
            "rounds": rounds,
            "usual": {app.model: app.usual for app in apps},
            "wrong": sum(app.wrong for app in apps),
        }
    finally:
        service.stop()


def offer_again(service: Service, folder: Path) -> None:
    """Check after all restarts that the wrong version is still in quarantine."""
    with service.client() as client:
        name = TUNED[1]
        expected = client.show(name)["sha256"]
        published = client.publish(name, folder / "wrong.honed", expected=expected, why="once more")
        assert "quarantine" in published["sentence"], published


def show(result: dict[str, Any]) -> None:
    """Print the result as a table."""
    rounds, models = result["rounds"], [name for name in result["kept"] if name != "programs"]
    heads = ("SIGTERM", "kill -9", "any answer")
    print(f"{'seconds from the start, median (most)':40s} {heads[0]:>16s} {heads[1]:>16s} {heads[2]:>12s}")
    for what in rounds[0]["seconds"]:
        cells = []
        for how in ("SIGTERM", "kill -9"):
            values = [each["seconds"][what] for each in rounds if each["how"] == how]
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})")
        usual = f"{result['usual'][what]:.2f}" if what in models else ""
        print(f"{what:40s} {cells[0]:>16s} {cells[1]:>16s} {usual:>12s}")
    worst = max(each["seconds"]["last answer"] for each in rounds) / len(models)
    print(f"per model at most                        {worst:.2f} s of {BOUND_SECONDS:g} s allowed")
    print(f"answers that were wrong                  {result['wrong']}")
    same = sum(each["same"] for each in rounds)
    print(f"all as it was before                     {same} of {len(rounds)} restarts")
    for name in models:
        each = result["kept"][name]
        print(
            f"  {name}: version {each['version']} ({each['sha256'][:12]}), {each['tuned kernels']} tuned "
            f"kernels, in quarantine: {', '.join(map(str, each['quarantine'])) or 'none'}"
        )
    print(f"  {len(result['kept']['programs'])} programs kept, none built again")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="to tune each of two models, 0 for not at all"
    )
    parser.add_argument("--times", type=int, default=3, help="restarts of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = run(options, Path(name))
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    over = max(r["seconds"]["last answer"] for r in result["rounds"]) > BOUND_SECONDS * (
        len(result["kept"]) - 1
    )
    return int(over or result["wrong"] > 0 or not all(r["same"] for r in result["rounds"]))


if __name__ == "__main__":
    sys.exit(main())
