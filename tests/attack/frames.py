"""Frames: bytes that are no messages, messages that are no requests, requests of any size and shape."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import msgpack
import numpy as np

from honed.protocol.methods import METHODS
from tests.daemon.raw import packed

from .attack import Attack
from .bed import VICTIM, Bed
from .material.mutate import LARGE, Mutator, shown

_LAST = 3_000_000  # number of the request after the hostile one
# Parameters that are right, of methods that change nothing; the rest are called with wrong ones only.
HARMLESS: dict[str, dict[str, Any]] = {
    "ServerLive": {},
    "ServerReady": {},
    "ServerMetadata": {},
    "ServerStatus": {},
    "Metrics": {"format": "openmetrics"},
    "ConfigShow": {},
    "ModelReady": {"name": "victim", "version": "1"},
    "ModelMetadata": {"name": "victim", "version": ""},
    "ModelStatistics": {"name": "victim", "version": "1"},
    "ModelShow": {"name": "victim"},
    "ModelHistory": {"name": "victim"},
    "ModelProfile": {"name": "victim", "parameters": {"runs": 1}},
    "ModelPrepare": {"model_name": "victim", "inputs": [{"name": "x", "datatype": "FP32", "shape": [8]}]},
    "ModelRun": {"number": 1, "id": "", "timeout": 10**6, "raw_input_contents": [bytes(32)]},
    "SystemSharedMemoryStatus": {"name": ""},
    "SystemSharedMemoryUnregister": {"name": ""},
    "RepositoryIndex": {},
    "LeaseRelease": {"lease": 3},
    "TunerReport": {"text": "attacking"},
    "TunerStop": {"model": "nosuch"},
    "HintsExport": {},
}
# Their right parameters would change something: they name a model that is not there.
CHANGING: dict[str, dict[str, Any]] = {
    "ModelExport": {"name": "nosuch"},
    "ModelForm": {"name": "nosuch", "shapes": {"x": [1]}},
    "ModelPublish": {"name": "nosuch", "expected": "0" * 64, "why": "attack"},
    "ModelRollback": {"name": "nosuch", "version": 1},
    "ModelPin": {"name": "nosuch", "version": 1},
    "ModelSet": {"name": "nosuch", "max_batch": 4, "warm_up_shapes": {"x": [1]}},
    "RepositoryModelUnload": {"model_name": "nosuch"},
    "RepositoryModelLoad": {
        "model_name": "nosuch",
        "files": ["m.onnx"],
        "parameters": {"shapes": {"x": [1]}},
    },
    "ModelBring": {"files": ["m.onnx"], "sha256": ["0" * 64], "parameters": {"shapes": {"x": [1]}}},
    "SystemSharedMemoryRegister": {"name": "r", "offset": 0, "byte_size": 4096},
    "LeaseAsk": {"candidate_seconds": -1.0},
    "HintsImport": {"device": "nosuch"},
    "TunerRun": {
        "command": "tune",
        "model": "nosuch",
        "trials": 1,
        "seconds": 1.0,
        "best": True,
        "device": "",
    },
}
PIECES: tuple[bytes, ...] = (
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\xc6\x80\x00\x00\x00",
    b"\xdb\x03\xa0\x00\x00",
)
PIECES += (
    b"\xc7\x05\x01hello",
    b"\xd4\x01\x00",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xa3\xff\xfe\xfd",
    b"\x81\x01\x02",
)
PIECES += (
    b"\x91" * 40,
    b"\x81\xa0" * 40,
    b"\x82\xa1a\x01\xa1a\x02",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
)


class Frames(Attack):
    """Bytes to the socket."""

    name = "frames"
    what = "messages cut, altered, announced too large, nested, of wrong types, with strings of 60 MiB"

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        mutator = Mutator(rng)
        kinds = (self._bytes, self._announced, self._typed, self._many)
        self._large(bed, mutator)  # at least once
        while time.monotonic() < end:
            kind = self._large if rng.random() < 0.01 else rng.choice(kinds)
            kind(bed, mutator)
        with bed.raw() as raw:
            assert raw.call("ServerLive", {})[3] == {"live": True}

    def _bytes(self, bed: Bed, mutator: Mutator) -> None:
        """Right requests with bytes changed."""
        data = b"".join(self._right(mutator, i) for i in range(mutator.rng.choice((1, 1, 3))))
        self._send(bed, mutator.data(data), "altered bytes")

    def _announced(self, bed: Bed, mutator: Mutator) -> None:
        """Headers that promise more than there is, or that are none."""
        head = b"\x94\x00\x05" + msgpack.packb(mutator.rng.choice(list(METHODS))) + b"\x91\x81\xa1a"
        pieces = mutator.rng.choices(PIECES, k=mutator.rng.choice((1, 1, 2, 3)))
        self._send(bed, mutator.rng.choice((b"", head, b"\x94", b"\x93\x02")) + b"".join(pieces), "announced")

    def _typed(self, bed: Bed, mutator: Mutator) -> None:
        """Messages of right form with anything in them."""
        method = mutator.rng.choice((*HARMLESS, *CHANGING, mutator.text()))
        params = mutator.tree(HARMLESS.get(method, CHANGING.get(method, {})), mutator.rng.choice((1, 2, 4)))
        message: list[Any] = [0, mutator.rng.choice((1, 2, 2**32 - 1)), method, [params]]
        if mutator.rng.random() < 0.3:
            message = mutator.tree(message, 1)
        try:
            data: bytes = msgpack.packb(message)
        except (ValueError, TypeError, OverflowError, UnicodeEncodeError):
            return
        self._send(bed, data, f"{method[:40]} with {shown(params)}")

    def _many(self, bed: Bed, mutator: Mutator) -> None:
        """Numbers used twice, answers and notifications that nobody wants, requests cut by the end."""
        one = packed(7, "ModelInfer", VICTIM.request("victim", np.zeros(VICTIM.n, np.float32)))
        cancel = msgpack.packb(
            [2, "Cancel", [{"msgid": mutator.rng.choice((7, "7", None, 2**70 % 2**64, [7]))}]]
        )
        answer = msgpack.packb([1, 7, None, {}])
        data = b"".join(mutator.rng.choices((one, one, cancel, answer, one[:-3]), k=6))
        self._send(bed, data, "numbers twice, Cancel")

    def _large(self, bed: Bed, mutator: Mutator) -> None:
        """60 MiB in one field, key, method or number."""
        rng = mutator.rng
        method = rng.choice((*HARMLESS, *CHANGING, "ModelInfer", "ModelInfer", "ModelInfer"))
        right = {**HARMLESS, **CHANGING}.get(method) or {}
        if method == "ModelInfer":
            right = VICTIM.request("victim", np.zeros(VICTIM.n, np.float32), id="")
            right["parameters"] = {"timeout": 10**6}
            if rng.random() < 0.5:
                params, what = {**right, "id": "i" * LARGE}, "id a str of 60 MiB"
            else:
                params, what = mutator.large(right)
        else:
            params, what = mutator.large(right)
        data = packed(1, method, params)
        if rng.random() < 0.15:
            data, what = packed(1, "M" * LARGE, {}), "a method of 60 MiB"
        self._send(bed, data, f"{method} with {what}", patience=10.0)

    def _right(self, mutator: Mutator, number: int) -> bytes:
        method = mutator.rng.choice(list(HARMLESS))
        return packed(number, method, HARMLESS[method])

    def _send(self, bed: Bed, data: bytes, label: str, patience: float = 0.15) -> None:
        """One connection: send, ask once more, and read what comes until that is answered.

        Silence for so long is right: what was sent may be the beginning of a message.
        """
        bed.findings.offered(label, data)
        with bed.raw() as raw:
            with contextlib.suppress(OSError):
                raw.send(data)
            with contextlib.suppress(OSError):
                raw.send(packed(_LAST, "ServerLive", {}))
            raw.socket.settimeout(patience)
            try:
                while (message := raw.read()) is not None and message[:2] != [1, _LAST]:
                    note(bed, message, label)
            except OSError:
                return
            except ValueError as error:
                bed.findings.problem(f"the service sent what is no message ({error}) after {label}")


def note(bed: Bed, message: list[Any], label: str) -> None:
    """Count the code of an answer or of last words."""
    if message[0] == 1:
        bed.findings.answered(message[2], label)
    elif message[0] == 2 and message[1] == "Error":
        bed.findings.answered(message[2][0], label)
