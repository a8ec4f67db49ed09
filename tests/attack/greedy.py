"""Greedy clients: each takes all it can get, of one user, while an honest one of another asks beside them."""

from __future__ import annotations

import contextlib
import os
import random
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from honed.runtime.errors import HonedError
from tests.daemon import spin
from tests.daemon.raw import Raw, packed

from . import users
from .attack import Attack
from .bed import Bed, quietly
from .clients import beside
from .descriptors import memfd
from .frames import note
from .material.mutate import LARGE

_PROFILES = 6  # connections
_FLOODS = 4  # connections with 64 requests each: the whole queue
_FRAMES = 6
_REGION_BYTES = 256 << 20
SPIN_REQUEST: dict[str, Any] = {
    "model_name": "spin",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [spin.SIZE]}],
    "raw_input_contents": [spin.X.tobytes()],
}


class _Greedy(Attack):
    """Several connections of one user, each in a thread, until the time is over."""

    least_seconds = 2.5
    connections = 1

    def others_ms(self, bed: Bed) -> float | None:
        return bed.others_ms

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        seeds = [rng.random() for _ in range(self.connections)]
        beside([partial(self._guarded, bed, random.Random(seed), end) for seed in seeds])

    def _guarded(self, bed: Bed, rng: random.Random, end: float) -> None:
        while time.monotonic() < end:
            try:
                self.take(bed, rng, end)
            except (OSError, AssertionError, HonedError) as error:
                bed.findings.answered({"code": type(error).__name__}, "")
                time.sleep(0.01)

    def take(self, bed: Bed, rng: random.Random, end: float) -> None:
        """What one connection does; called again until the end."""
        raise NotImplementedError


class Profiles(_Greedy):
    """Profiles hold the device for many runs."""

    name = "greedy-profiles"
    what = "profiles of 100 runs of a slow model on six connections"
    connections = _PROFILES

    def take(self, bed: Bed, rng: random.Random, end: float) -> None:
        with bed.raw(users.GREEDY) as raw:
            params = {"name": "spin", "parameters": {"runs": 100}}
            bed.findings.offered("a profile of 100 runs", packed(1, "ModelProfile", params))
            raw.socket.settimeout(max(0.1, end - time.monotonic()))
            note(bed, raw.call("ModelProfile", params), "a profile")


class Queue(_Greedy):
    """Fills the queue and keeps it full."""

    name = "greedy-queue"
    what = "256 requests of a slow model in the queue at any time, of every priority"
    connections = _FLOODS

    def take(self, bed: Bed, rng: random.Random, end: float) -> None:
        with bed.raw(users.GREEDY) as raw:
            raw.socket.settimeout(5.0)
            for number in range(64):
                self._ask(bed, raw, rng, number)
            number = 64
            while time.monotonic() < end:
                message = raw.read()
                if message is None:
                    return
                note(bed, message, "a flood")
                if message[0] == 1:
                    if message[2] is not None:
                        time.sleep(0.002)  # refused at once: another one would be too
                    number += 1
                    self._ask(bed, raw, rng, number)

    def _ask(self, bed: Bed, raw: Raw, rng: random.Random, number: int) -> None:
        params = {**SPIN_REQUEST, "parameters": {"priority": rng.choice((1, 2, 3))}}
        data = packed(number, "ModelInfer", params)
        bed.findings.offered("a flood", data)
        raw.send(data)


class LargeFrames(_Greedy):
    """Messages as large as may be, in parallel."""

    name = "greedy-frames"
    what = "messages of 60 MiB on six connections, whole, in halves, as tensors and as other fields"
    connections = _FRAMES

    def take(self, bed: Bed, rng: random.Random, end: float) -> None:
        kind = rng.choice(("contents", "id", "half", "text"))
        params: dict[str, Any] = {**SPIN_REQUEST, "id": ""}
        if kind == "contents":
            params["raw_input_contents"] = [bytes(LARGE)]
        else:
            params["id" if kind != "text" else "model_version"] = "i" * LARGE
        data = packed(3, "ModelInfer", params)
        if kind == "half":
            data = data[: len(data) // 2]
        bed.findings.offered(f"60 MiB: {kind}", data[:1000])
        with bed.raw(users.GREEDY) as raw:
            raw.socket.settimeout(3.0)
            raw.send(data)
            if kind == "half":
                time.sleep(0.3)
                return
            message = raw.read()
            if message is not None:
                note(bed, message, f"60 MiB: {kind}")


class Regions(_Greedy):
    """Regions of any size, as many as may be."""

    name = "greedy-regions"
    what = "64 regions on each of four connections, sparse ones of 1 TiB, each used"
    connections = 4

    def take(self, bed: Bed, rng: random.Random, end: float) -> None:
        with ExitStack() as held:
            raw = held.enter_context(bed.raw(users.GREEDY))
            raw.socket.settimeout(5.0)
            for number in range(70):
                if time.monotonic() > end:
                    return
                size = rng.choice((4096, _REGION_BYTES, 1 << 40))
                descriptor = memfd(size)
                held.callback(os.close, descriptor)
                params = {"name": f"r{number}", "byte_size": size}
                bed.findings.offered(
                    f"region {number} of {size}", packed(1, "SystemSharedMemoryRegister", params)
                )
                note(bed, raw.call("SystemSharedMemoryRegister", params, [descriptor]), "a region")
                place = {
                    "shared_memory_region": f"r{number}",
                    "shared_memory_offset": (size - 4 * spin.SIZE) // 64 * 64,
                    "shared_memory_byte_size": 4 * spin.SIZE,
                }
                entry = {**SPIN_REQUEST["inputs"][0], "parameters": place}
                params = {**SPIN_REQUEST, "inputs": [entry], "raw_input_contents": []}
                if number % 4 == 0:
                    note(bed, raw.call("ModelInfer", params), f"a region of {size}")


class Connections(_Greedy):
    """As many connections as may be, opened and closed."""

    name = "greedy-connections"
    what = "thousands of connections, opened and closed or held, with and without requests"
    connections = 3

    def others_ms(self, bed: Bed) -> float | None:
        return 0.0

    def take(self, bed: Bed, rng: random.Random, end: float) -> None:
        with ExitStack() as held:
            for _ in range(rng.choice((10, 60, 140))):
                if time.monotonic() > end:
                    return
                bed.findings.offered("a connection")
                raw = bed.raw(users.GREEDY)
                if rng.random() < 0.5:
                    held.enter_context(raw)
                else:
                    quietly(partial(raw.send, packed(1, "ServerLive", {})))
                    raw.socket.close()
            with contextlib.suppress(IndexError):
                time.sleep(0.02)
