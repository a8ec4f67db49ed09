"""Processes of users whose apps bring models: python -m tests.attack.bringing ROLE SOCKET UID SEED VICTIM ...

Each is really its user. An honest one brings what all bring, and what only it has, and asks for both; the
hostile one tries what it can on the service and on the VICTIMs, by their user ids. Both go on until their
standard input ends, and then tell in JSON what they found (`Told`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.daemon.features.user_models import AppsSettings
from honed.daemon.store.names import own_name
from honed.protocol.methods import MODEL_BRING, MODEL_FORM
from honed.protocol.params import FormParams, UploadParams
from honed.runtime import Client
from honed.runtime.errors import HonedError, NotFound, PermissionDenied, ResourceExhausted
from tests.daemon.raw import Raw, packed
from tests.daemon.serving.own_models import X, adding, answers

from .users import GROUP

COMMON = 1.0  # what every honest user's model adds, beside one that adds the user's own number
DEEDS = 8  # of the hostile user, each done once before any is done again
_MANY = 24  # threads of a flood
_HUGE = 1 << 40  # bytes of a file that holds nothing


@dataclass
class Told:
    """What a process did, and what must not have been."""

    rounds: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Running:
    """One of these processes."""

    def __init__(self, role: str, path: Path, uid: int, seed: int, victims: Sequence[int] = ()) -> None:
        command = [sys.executable, "-m", "tests.attack.bringing", role, str(path), str(uid), str(seed)]
        self.name = f"{role} {uid}"
        self.process = subprocess.Popen(
            [*command, *map(str, victims)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round_ends(self) -> bool:
        """Wait until it has done one round more; False where it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip() == "round"

    def end(self) -> Told:
        """Have it end, and tell."""
        out, _ = self.process.communicate()
        told = json.loads(out.splitlines()[-1]) if out.strip() else {"problems": [f"{self.name} died"]}
        return Told(**{**told, "codes": Counter(told.get("codes", {}))})


def main(arguments: Sequence[str]) -> None:
    """Be the user, and do as the role says."""
    role, path, uid, seed = arguments[0], arguments[1], int(arguments[2]), int(arguments[3])
    _ = MODEL_BRING.result, MODEL_FORM.result  # loads what it takes: other users may not read this checkout
    os.setgroups([GROUP])
    os.setgid(GROUP)
    os.setuid(uid)
    told, rng = Told(), random.Random(seed)
    with Client(path) as client:
        while not select.select([sys.stdin], [], [], 0)[0]:
            if role == "honest":
                _honest(client, uid, rng, told)
            else:
                _hostile(client, path, rng, [int(victim) for victim in arguments[4:]], told)
            told.rounds += 1
            print("round", flush=True)
        if role == "honest":
            for model in client.models():
                if model["owner"]:
                    client.remove(model["name"])
    print(json.dumps(vars(told)), flush=True)


def _honest(client: Client, uid: int, rng: random.Random, told: Told) -> None:
    """Bring both, ask for both, and see nothing else."""
    try:
        names = {client.upload(adding(number)).model_name: number for number in (COMMON, float(uid))}
        for name, number in names.items():
            if client.upload(adding(number)).model_name != name:
                told.problems.append("the same had another name")
        for _ in range(10):
            name = rng.choice(list(names))
            if not answers(client, name, names[name]):
                told.problems.append(f"user {uid} was answered wrongly")
        seen = {model["name"] for model in client.models() if model["owner"]}
        if seen != set(names):
            told.problems.append(f"user {uid} has {sorted(names)} and sees {sorted(seen)}")
        if rng.random() < 0.2:
            client.remove(rng.choice(list(names)))
    except HonedError as error:
        told.problems.append(f"user {uid}: {type(error).__name__}: {error}")


def _hostile(client: Client, path: str, rng: random.Random, victims: list[int], told: Told) -> None:
    """One of what may be tried."""
    deeds: list[Callable[[], None]] = [
        lambda: _guess(client, victims, told),
        lambda: _flood(path, rng, told),
        lambda: _bad_file(client, rng, told),
        lambda: _wrong_hash(client, rng, told),
        lambda: _huge_file(path, told),
        lambda: _half_sent(path, rng),
        lambda: _fill(client, rng, told),
        lambda: _remove_others(client, told),
    ]
    deed = deeds[told.rounds % len(deeds)] if told.rounds < DEEDS else rng.choice(deeds)
    with suppress(OSError, AssertionError):
        deed()


def _guess(client: Client, victims: list[int], told: Told) -> None:
    """The names of others' models can be computed, and are of no use."""
    for victim in victims:
        for number in (COMMON, float(victim)):
            digest = hashlib.sha256(adding(number)).hexdigest()
            name = own_name(victim, UploadParams(files=("model.onnx",), sha256=(digest,)))
            for what, call in _asking(client, name).items():
                try:
                    call()
                except (NotFound, PermissionDenied) as error:
                    told.codes[error.code] += 1
                    if name not in str(error) and what not in ("remove", "form"):
                        told.problems.append(f"{what} is told of another name: {error}")
                else:
                    told.problems.append(f"{what} of user {victim}'s model is done")


def _asking(client: Client, name: str) -> dict[str, Callable[[], object]]:
    return {
        "infer": lambda: client.infer(name, {"x": X}),
        "show": lambda: client.show(name),
        "profile": lambda: client.profile(name, 1),
        "history": lambda: client.history(name),
        "remove": lambda: client.remove(name),
        "form": lambda: client.ask(MODEL_FORM, FormParams(name=name, shapes={"x": (1, 1)})),
    }


def _flood(path: str, rng: random.Random, told: Told) -> None:
    """Many at once, all different and none a model, over many connections."""
    junk = [rng.randbytes(1000) for _ in range(_MANY)]

    def one(data: bytes) -> None:
        with Client(path) as client:
            _brought(client, data, told)

    threads = [threading.Thread(target=one, args=(data,)) for data in junk]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _bad_file(client: Client, rng: random.Random, told: Told) -> None:
    """A model of which some bytes are others."""
    data = bytearray(adding(rng.random()))
    for _ in range(rng.randrange(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    _brought(client, bytes(data), told)


def _wrong_hash(client: Client, rng: random.Random, told: Told) -> None:
    """Another's file by its hash alone, without its bytes."""
    digest = hashlib.sha256(adding(COMMON)).hexdigest()
    with _memfd(rng.randbytes(100)) as descriptor:
        error = _raw(client.socket, [digest], [descriptor])
    told.codes[str(error and error.get("code"))] += 1
    if error is None:
        told.problems.append("a model was brought by its hash alone")


def _huge_file(path: str, told: Told) -> None:
    """One of 1 TiB that takes no room."""
    with _memfd(b"") as descriptor:
        os.ftruncate(descriptor, _HUGE)
        error = _raw(path, ["0" * 64], [descriptor])
    told.codes[str(error and error.get("code"))] += 1
    if error is None or error.get("code") != "RESOURCE_EXHAUSTED":
        told.problems.append(f"a file of 1 TiB is answered {error}")


def _half_sent(path: str, rng: random.Random) -> None:
    """The descriptors, and a part of the message; then nothing more."""
    message = packed(1, "ModelBring", {"files": ["m.onnx"], "sha256": ["0" * 64]})
    with _memfd(adding(1)) as descriptor, Raw(Path(path)) as raw:
        raw.send(message[: rng.randrange(1, len(message))], [descriptor])


def _fill(client: Client, rng: random.Random, told: Told) -> None:
    """More than the quota holds."""
    for _ in range(AppsSettings().max_models + 1):
        _brought(client, adding(rng.random()), told)


def _remove_others(client: Client, told: Told) -> None:
    for model in client.models():
        if not model["owner"]:
            try:
                client.remove(model["name"])
            except PermissionDenied as error:
                told.codes[error.code] += 1
            else:
                told.problems.append(f"an administrator's model {model['name']} was removed")


def _brought(client: Client, data: bytes, told: Told) -> None:
    try:
        client.upload(data)
    except ResourceExhausted as error:
        told.codes[error.code] += 1
    except HonedError as error:
        told.codes[error.code] += 1
        if error.code == "INTERNAL":
            told.problems.append(f"a file is answered INTERNAL: {error}")
    else:
        told.codes["OK"] += 1


class _memfd:  # noqa: N801 - as a function
    """A descriptor of a file that holds the data."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> int:
        self._descriptor = os.memfd_create("m")
        os.write(self._descriptor, self._data)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _raw(path: str, digests: list[str], descriptors: list[int]) -> dict[str, Any] | None:
    """The error of a bring that no client would send."""
    with Raw(Path(path)) as raw:
        raw.socket.settimeout(60.0)
        raw.send(packed(1, "ModelBring", {"files": ["m.onnx"], "sha256": digests}), descriptors)
        while (message := raw.read()) is not None and message[0] != 1:
            pass
        error: dict[str, Any] | None = message[2] if message is not None else {"code": "closed"}
        return error


if __name__ == "__main__":
    main(sys.argv[1:])
