"""Five services on one machine, and nginx with a folder between them: one tunes, the others pull.

    python -m benchmarks.hub [FILE.onnx] [--trials N] [--turns N] [--services NAME,...]

Without a file the model is LightGlue for 64 keypoints. Services tune by `hone tune`, one after the other, and
are timed in turns, by the clock of the device. Needs nginx, PoCL, and honed's tuner. Two of them are not what
they seem: `other driver` says that its driver is another (another_driver.py), and `other device` has PoCL's
device "basic" in place of "pthread".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.serving import service
from honed.runtime.client import Client

MODEL: Final = "m"
SERVICES: Final = ("tunes", "pulls 1", "pulls 2", "other driver", "other device")
_HERE: Final = Path(__file__).parent
_NGINX: Final = """\
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 64; }}
http {{
  access_log {folder}/access.log; root {root};
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; }}
}}
"""
_CONFIG: Final = """\
[serve]
engine = "gpu"
[tuner]
spawn = false
[hub]
url = "http://127.0.0.1:{port}"
push_url = "{root}"
owner = "{owner}"
"""


@dataclass(kw_only=True)
class Machine:
    """A service and its results."""

    name: str
    folder: Path
    client: Client
    pulled: int = 0
    ways: Counter[str] = field(default_factory=Counter)  # Trials, by search strategy
    tuning_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def hone(self, *arguments: str) -> dict[str, Any]:
        """Return the JSON output of a command."""
        return hone(*arguments, f"--socket={self.folder / 's'}")

    def tune(self, trials: int) -> None:
        """Tune by `hone tune`, and count trials by search strategy."""
        began = time.monotonic()
        self.hone("tune", MODEL, "--trials", str(trials))
        self.tuning_seconds = time.monotonic() - began
        with sqlite3.connect(self.folder / "state" / "records.sqlite") as records:
            rows = records.execute("SELECT way, COUNT(*) FROM candidates WHERE way NOTNULL GROUP BY way")
            self.ways = Counter(dict(rows))

    def push(self) -> int:
        """Push the machine's records into the hub; return their number."""
        answer: int = self.hone("hub", "push", f"--folder={self.folder / 'hub'}")["records"]
        return answer

    def pull(self) -> None:
        """Pull the hub's records."""
        self.pulled = self.hone("hub", "pull", f"--folder={self.folder / 'hub'}")["added"]


def main() -> int:
    """Print the results; return 1 if a service that pulled is over 1.1 times as slow, or searched."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="hub-") as text, contextlib.ExitStack() as running:
        folder = Path(text)
        model = options.model or _lightglue(folder)
        port = running.enter_context(_nginx(folder))
        owner = hone("hub", "init", str(folder / "www"), f"--folder={folder / 'owner'}")["owner"]
        machines = []
        for name in options.services:
            machines.append(running.enter_context(_machine(folder, name, port, owner)))
            _say(f"{name}: adding the model")
            machines[-1].client.add(model, name=MODEL)
        tuner, *others = machines
        key = tuner.hone("hub", "key", f"--folder={tuner.folder / 'hub'}")["key"]
        trust = ("hub", "trust", str(folder / "www"), "first", key)
        hone(*trust, f"--folder={folder / 'owner'}")
        _say("tuning one")
        tuner.tune(options.trials)
        _say(f"it put {tuner.push()} records there")
        for machine in others:
            machine.pull()
            _say(f"{machine.name}: pulled {machine.pulled}")
            if machine.pulled:
                machine.tune(machine.pulled)
        _time(machines, options.turns)
        requests = len((folder / "access.log").read_text().splitlines())
        return _tell(machines, requests)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="FILE.onnx")
    parser.add_argument("--trials", type=int, default=200, help="of the one that tunes")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument(
        "--services",
        type=lambda text: text.split(","),
        default=SERVICES,
        help="the first is the one that tunes",
    )
    return parser.parse_args()


def hone(*arguments: str) -> dict[str, Any]:
    """Return the JSON output of a command; show its progress only if it fails."""
    command = [sys.executable, "-m", "honed.tool.main", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _lightglue(folder: Path) -> Path:
    file = folder / "lightglue.onnx"
    hone("demo", "lightglue", "--keypoints", "64", "-o", str(file))
    return file


@contextlib.contextmanager
def _nginx(folder: Path) -> Iterator[int]:
    """Run a web server of the folder www, and yield its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    (folder / "www").mkdir()
    for readable in (folder, folder / "www"):  # nginx's worker is another user's where this is root
        readable.chmod(0o755)
    file = folder / "nginx.conf"
    file.write_text(_NGINX.format(folder=folder, root=folder / "www", port=port))
    program = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    if program is None:
        raise SystemExit("this needs nginx: apt install nginx")
    process = subprocess.Popen([program, "-p", folder, "-c", file, "-e", folder / "nginx.log"])
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _machine(folder: Path, name: str, port: int, owner: str) -> Iterator[Machine]:
    own = folder / name.replace(" ", "-")
    own.mkdir()
    config = _CONFIG.format(port=port, root=folder / "www", owner=owner)
    with service(own, config, _environment(own, name)) as client:
        yield Machine(name=name, folder=own, client=client)


def _environment(folder: Path, name: str) -> Mapping[str, str]:
    if name == "other device":
        return {"POCL_DEVICES": "basic"}
    if name == "other driver":
        (folder / "site").mkdir()
        shutil.copy(_HERE / "another_driver.py", folder / "site" / "sitecustomize.py")
        return {"PYTHONPATH": f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}"}
    return {}


def _time(machines: Sequence[Machine], turns: int) -> None:
    """Measure the kernels of an inference by the device's clock, on all machines in turns."""
    for turn in range(turns + 1):
        for machine in machines:
            seconds = 1e-6 * machine.client.profile(MODEL, runs=3)["sum_us"]
            if turn:
                machine.seconds.append(seconds)


def _tell(machines: Sequence[Machine], requests: int) -> int:
    first = _quartile(machines[0])
    print("| service | records pulled | trials | of them hints | s tuning | ms | times the first |")
    print("|---|---|---|---|---|---|---|")
    good = True
    for machine in machines:
        ratio, hints = _quartile(machine) / first, machine.ways["again"]
        row = (machine.pulled, machine.ways.total(), hints, f"{machine.tuning_seconds:.0f}")
        times = f"{_quartile(machine) * 1e3:.3g} | {ratio:.2f}"
        print(f"| {machine.name} | {' | '.join(map(str, row))} | {times} |")
        if machine.pulled:
            good = good and ratio <= 1.1 and machine.ways.total() == hints
    print(f"{requests} requests reached nginx.")
    return 0 if good else 1


def _quartile(machine: Machine) -> float:
    return sorted(machine.seconds)[len(machine.seconds) // 4]


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
