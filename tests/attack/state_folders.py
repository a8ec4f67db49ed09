"""State folders as nobody should leave them: the service starts, serves what is healthy, tells the rest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from honed.runtime.errors import HonedError

from .attack import Attack
from .bed import Bed, until
from .judge import new_log
from .material.mutate import Mutator, shown

_START_SECONDS = 60.0  # until the service listens
_NEWER = "newer honed"


class StateFolders(Attack):
    """Stops the service, damages what belongs to the model "spare" or to none, and starts it again."""

    name = "state-folders"
    what = (
        "objects, manifests, usage, latencies, locks as folders, FIFOs, links, garbage, old, new, immutable"
    )
    allowed = frozenset({"UNAVAILABLE"})
    restarts = True
    least_seconds = 4.0

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        bed.stop()
        pristine = bed.folder / "pristine"
        shutil.copytree(bed.state, pristine)
        damage = Damage(bed, rng)
        try:
            while True:
                label = damage.some()
                bed.findings.offered(label, label)
                self._started(bed, label)
                bed.service.process.kill()
                bed.service.process.wait()
                self._restored(bed, pristine)
                if time.monotonic() > end:
                    break
        finally:
            if bed.alive():
                bed.stop()
            self._restored(bed, pristine)
            shutil.rmtree(pristine)
            bed.restart()

    def _started(self, bed: Bed, label: str) -> None:
        at = os.path.getsize(bed.service.log_file)
        bed.service.restart()
        listening = until(lambda: not bed.alive() or bed.service.answers(), _START_SECONDS)
        if not bed.alive() or not listening:
            told = new_log(bed.service.log_file, at)
            newer = _NEWER in told and "format" in label
            locked = label.startswith("the lock") and told.startswith("honed: ") and "Traceback" not in told
            if not newer and not locked:  # what cannot be locked may be another's: that is said
                how = "ended" if not bed.alive() else "does not listen"
                bed.findings.problem(f"the service {how} with {label}: {told[-600:]}")
            return
        if not until(lambda: self._settled(bed), 60.0):
            bed.findings.problem(f"models are LOADING for ever with {label}")
        try:
            self._compared(bed, label)
        except (HonedError, OSError) as error:
            bed.findings.problem(f"the service broke down with {label}: {error}")

    def _settled(self, bed: Bed) -> bool:
        with contextlib.suppress(HonedError), bed.client() as client:
            return client.ready() or all(m["state"] != "LOADING" for m in client.models())
        return False

    def _compared(self, bed: Bed, label: str) -> None:
        with bed.client() as client:
            there = {model["name"]: model for model in client.models()}
            damaged = client.status()["damaged"]
            for name, victim in bed.known.items():
                state = there.get(name, {"state": "absent", "reason": ""})
                if state["state"] == "READY":
                    x = np.linspace(-9, 9, victim.n, dtype=np.float32)
                    if client.infer(name, {"x": x})["y"].tobytes() != victim.answer(x).tobytes():
                        bed.findings.wrong += 1
                        bed.findings.problem(f"{name} answers wrong with {label}")
                elif name != "spare":
                    bed.findings.lost += 1
                    bed.findings.problem(f"{name} is {state['state']} ({state['reason'][:200]}) with {label}")
                elif (
                    not state["reason"]
                    and not any(name in sentence for sentence in damaged)
                    and "gone" not in label
                ):
                    bed.findings.problem(f"spare is {state['state']} and nothing says why, with {label}")

    def _restored(self, bed: Bed, pristine: Path) -> None:
        """The state folder as it was."""
        _mutable(bed.state)
        shutil.rmtree(bed.state, ignore_errors=True)
        shutil.copytree(pristine, bed.state)


class Damage:
    """One thing wrong at a time."""

    def __init__(self, bed: Bed, rng: random.Random) -> None:
        self._bed = bed
        self._rng = rng
        self._mutator = Mutator(rng)
        manifest = bed.state / "models" / "spare.json"
        self._manifest = manifest.relative_to(bed.state)
        self._object = (
            Path("objects") / json.loads(manifest.read_text().split("\n", 1)[1])["compiled"]["sha256"]
        )

    def some(self) -> str:
        """Do some damage; says what."""
        targets = {
            "the object": self._object,
            "the manifest": self._manifest,
            "usage.json": Path("usage.json"),
            "latencies.json": Path("latencies.json"),
            "the lock": Path("lock"),
            "staging": Path("staging"),
            "damaged": Path("damaged"),
            "records.sqlite": Path("records.sqlite"),
            "a foreign manifest": Path("models")
            / self._rng.choice(("x.json", ".x", "ü ñ.json", "a\nb.json", "README", "-.json")),
            "a foreign object": Path("objects") / self._rng.choice(("f" * 64, "x", ".x", "lost+found")),
            "an unfinished manifest": Path("models") / ".spare.json.0123456789ab.tmp",
        }
        name = self._rng.choice(list(targets))
        path = self._bed.state / targets[name]
        if self._rng.random() < 0.35:
            name = self._rng.choice(("the manifest", "usage.json", "latencies.json"))
            path = self._bed.state / targets[name]
            return f"{name} {self._said_otherwise(path, checksum=name == 'the manifest')}"
        kinds: dict[str, Callable[[Path], object]] = {
            "gone": lambda _: None,
            "an empty folder": lambda path: path.mkdir(),
            "a folder with files": _folder,
            "a FIFO": os.mkfifo,
            "a socket": _socket,
            "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
            "a link to /etc/hostname": lambda path: path.symlink_to("/etc/hostname"),
            "a link to nothing": lambda path: path.symlink_to("nothing"),
            "a link to itself": lambda path: path.symlink_to(path.name),
            "empty": lambda path: path.touch(),
            "garbage": lambda path: path.write_bytes(self._rng.randbytes(2000)),
            "zeros": lambda path: path.write_bytes(bytes(100_000)),
            "1 TiB of nothing": _sparse,
            "100,000 brackets": lambda path: path.write_bytes(b"[" * 100_000),
            "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}\n"),
        }
        if self._bed.root:
            kinds["a device"] = lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        if path.is_file():
            data = path.read_bytes()
            kinds |= {
                "cut": lambda path: path.write_bytes(data[: self._rng.randrange(len(data) + 1)]),
                "altered": lambda path: path.write_bytes(self._mutator.data(data)),
                "immutable": lambda path: _immutable(path, data),
                "unreadable": lambda path: _unreadable(path, data),
                "a link to itself elsewhere": lambda path: _elsewhere(path, data, self._bed.scratch),
            }
        kind = self._rng.choice(list(kinds))
        _cleared(path)
        kinds[kind](path)
        return f"{name} {kind}"

    def _said_otherwise(self, path: Path, *, checksum: bool) -> str:
        """Right JSON that says something else, under a right checksum where there is one."""
        body = path.read_text() if path.exists() else '{"format": 1, "saved": 1.0, "models": {}}'
        plain: Any = json.loads(body.split("\n", 1)[1] if checksum else body)
        if checksum and self._rng.random() < 0.2:
            wrong: Any = {**plain, "format": self._rng.choice((3, 10**9))}  # what a newer honed writes
        else:
            wrong = self._mutator.tree(plain, self._rng.choice((1, 1, 2, 4)))
        try:
            text = json.dumps(wrong, sort_keys=True, default=str)
        except (ValueError, TypeError):
            text = "NaN"
        data = text.encode(errors="surrogatepass")
        path.write_bytes(
            hashlib.sha256(data).hexdigest().encode() + b"\n" + data + b"\n" if checksum else data
        )
        kind = (
            "of another format"
            if isinstance(wrong, dict) and wrong.get("format") != plain.get("format")
            else ""
        )
        return f"saying something else {kind}: {shown(wrong, 300)}"


def _cleared(path: Path) -> None:
    """Nothing is at this place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"x")
    (path / "folder").mkdir()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        link = path.with_name("s")  # a short name: the path of an object is longer than a socket's may be
        with contextlib.suppress(OSError):
            listening.bind(str(link))
            link.rename(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _elsewhere(path: Path, data: bytes, folder: Path) -> None:
    """The right content, through a link."""
    (folder / "elsewhere").write_bytes(data)
    path.symlink_to(folder / "elsewhere")


def _immutable(path: Path, data: bytes) -> None:
    """As a file of another user is to a service that is not root."""
    path.write_bytes(data)
    subprocess.run(["chattr", "+i", str(path)], check=False, capture_output=True)


def _unreadable(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0)


def _mutable(folder: Path) -> None:
    subprocess.run(["chattr", "-R", "-i", str(folder)], check=False, capture_output=True)
