"""ModelInfer, ModelPrepare and ModelRun, field by field: almost right, and the answers that are due."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from tests.daemon.raw import Raw

from .attack import Attack
from .bed import VICTIM, Bed
from .descriptors import memfd
from .frames import note
from .material.mutate import INTEGERS, TEXTS, Mutator, shown

_CODES = "OK INVALID_ARGUMENT NOT_FOUND NOT_PREPARED DEADLINE_EXCEEDED RESOURCE_EXHAUSTED CANCELLED"
_ALLOWED = frozenset(_CODES.split())
_RUNS = ("id", "raw_input_contents")  # what ModelRun has of a whole request
_DATATYPES = ("FP32", "FP16", "FP64", "INT32", "BOOL", "UINT8", "fp32", "FP32\0", "", "BF16", "x" * 5000)
_REGION, _PAGE = "place", 4096


class InferFields(Attack):
    """One connection after the other with requests that are wrong in one or a few fields."""

    name = "infer-fields"
    what = "whole and prepared requests with altered names, shapes, datatypes, contents, options, places"
    _numbers: Sequence[int] = ()  # of other connections, too

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        mutator = Mutator(rng)
        descriptor = memfd(2 * _PAGE)
        try:
            while time.monotonic() < end:
                with bed.raw() as raw, contextlib.suppress(ConnectionError, TimeoutError):
                    raw.call(
                        "SystemSharedMemoryRegister", {"name": _REGION, "byte_size": 2 * _PAGE}, [descriptor]
                    )
                    for _ in range(40):
                        if time.monotonic() > end or not self._one(bed, raw, mutator):
                            break
        finally:
            os.close(descriptor)

    def _one(self, bed: Bed, raw: Raw, mutator: Mutator) -> bool:
        """Ask once; False where the connection is of no use any more."""
        x = np.asarray([mutator.rng.uniform(-100, 100) for _ in range(VICTIM.n)], np.float32)
        right = VICTIM.request("victim", x, id=mutator.rng.choice(("", "7", *TEXTS)))
        wrong = self._altered(right, mutator)
        if mutator.rng.random() < 0.5:
            return self._asked(bed, raw, "ModelInfer", wrong, wrong, x) is not None
        prepared = {name: each for name, each in wrong.items() if name not in _RUNS}
        answer = self._asked(bed, raw, "ModelPrepare", prepared)
        if answer is None:
            return False
        run = {name: wrong[name] for name in _RUNS if name in wrong}
        numbers = [answer["number"]] * 4 if "number" in answer else []
        run["number"] = mutator.rng.choice((*numbers, *self._numbers[-3:], *INTEGERS))
        self._numbers = [*self._numbers[-100:], *numbers[:1]]
        run = mutator.rng.choice((run, run, run, mutator.tree(run, 1)))
        whole = wrong if numbers and isinstance(run, dict) and run.get("number") == numbers[0] else None
        return self._asked(bed, raw, "ModelRun", run, whole, x) is not None

    def _asked(
        self, bed: Bed, raw: Raw, method: str, params: Any, whole: Any = None, x: Any = None
    ) -> dict[str, Any] | None:
        """Ask for what is a right or wrong request; the result, {} for an error, and None at the end."""
        label = f"{method} {shown(params)}"
        try:
            data = msgpack.packb([0, 1, method, [params]])
        except (ValueError, TypeError, OverflowError, UnicodeEncodeError):
            return {}
        bed.findings.offered(label, data)
        raw.send(data)
        message = raw.read()
        if message is None:
            return None
        note(bed, message, label)
        if message[0] != 1:
            return None
        if message[2] is not None:
            if message[2]["code"] not in _ALLOWED:
                bed.findings.problem(f"{message[2]['code']} for {label}: {message[2]['message']}")
            return {}
        if whole is not None:
            asked = {name: each for name, each in whole.items() if name not in _RUNS} | params
            self._compare(bed, asked, message[3], x, label)
        result: dict[str, Any] = message[3]
        return result

    def _altered(self, right: dict[str, Any], mutator: Mutator) -> dict[str, Any]:
        """One of many ways to be wrong; sometimes none."""
        rng = mutator.rng
        entry: dict[str, Any] = dict(right["inputs"][0])
        place = {
            "shared_memory_region": rng.choice((_REGION, _REGION, "other", "", *TEXTS)),
            "shared_memory_byte_size": rng.choice((4 * VICTIM.n, 4 * VICTIM.n, *INTEGERS)),
            "shared_memory_offset": rng.choice((0, 64, _PAGE, 2 * _PAGE - 4 * VICTIM.n, 8161, *INTEGERS)),
        }
        options: dict[str, Any] = {
            "timeout": rng.choice((1, 1000, 10**6, *INTEGERS)),
            "priority": rng.choice((1, 2, 3, *INTEGERS)),
        }
        options["finite"] = rng.choice((True, False, None))
        kinds: tuple[dict[str, Any], ...] = (
            right,
            {**right, "parameters": options},
            {**right, "inputs": [{**entry, "datatype": rng.choice(_DATATYPES)}]},
            {
                **right,
                "inputs": [
                    {**entry, "shape": rng.choices((8, 1, 2, 4, *INTEGERS), k=rng.choice((0, 1, 2, 40)))}
                ],
            },
            {
                **right,
                "inputs": [{**entry, "name": rng.choice(("x", "y", *TEXTS))}] * rng.choice((0, 1, 2, 99)),
            },
            {**right, "inputs": [{**entry, "parameters": place}], "raw_input_contents": []},
            {**right, "outputs": [{"name": rng.choice(("y", "x", *TEXTS)), "parameters": place}]},
            {**right, "outputs": [{"name": "y"}] * rng.choice((0, 1, 2, 1000))},
            {
                **right,
                "raw_input_contents": [rng.randbytes(rng.choice((0, 31, 32, 33, 5000)))]
                * rng.choice((0, 1, 2)),
            },
            {**right, "model_name": rng.choice(("victim", "nosuch", *TEXTS))},
            {**right, "model_version": rng.choice(("", "1", "2", *TEXTS))},
            mutator.tree(right, rng.choice((1, 1, 2, 3))),
        )
        return rng.choice(kinds)

    def _compare(self, bed: Bed, asked: dict[str, Any], result: dict[str, Any], x: Any, label: str) -> None:
        """An answer must be the right one for what was asked, wherever its inputs lay."""
        places = any(entry.get("parameters") for entry in asked["inputs"])
        given = [] if places else [asked["raw_input_contents"][0]]
        names = [entry["name"] for entry in result["outputs"]]
        if result["id"] != (asked.get("id") or ""):
            bed.findings.problem(f"another id came back for {label}: {shown(result['id'])}")
        if asked["model_name"] != "victim" or names != ["y"]:
            return
        if given and result["raw_output_contents"]:
            wanted = VICTIM.answer(np.frombuffer(given[0], np.float32))
            with np.errstate(all="ignore"):
                if result["raw_output_contents"][0] != wanted.tobytes() and not np.isnan(wanted).any():
                    bed.findings.wrong += 1
                    bed.findings.problem(f"a wrong answer for {label}")
