"""Which engine is to serve a model: its compiled form on the device, or the CPU engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from honed.protocol.errors import HonedError

from .loading import Loader
from .store import Manifest

TIE = 1.2  # the compiled form may take so many times as long, and leaves the processor to apps
ROUNDS = 8  # runs of each engine at most, and at least so many
_LEAST = 3
_SECONDS = 5.0  # after which no more are begun than the least
Kind = Literal["gpu", "cpu"]


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and why."""

    engine: Kind
    why: str


def choose(gpu_ns: list[int], cpu_ns: list[int]) -> Choice:
    """By the lower quartiles of runs in turns: what else runs on the machine can only make a run longer."""
    gpu, cpu = (sorted(times)[(len(times) - 1) // 4] / 1e6 for times in (gpu_ns, cpu_ns))
    times = f"compiled {gpu:.3g} ms, ONNX Runtime {cpu:.3g} ms, measured in turns"
    if gpu > TIE * cpu:
        return Choice("cpu", f"the CPU engine is faster: {times}")
    return Choice("gpu", f"the compiled form is as fast or faster: {times}")


async def compare(
    device: Loader, key: str, compiled: Path, cpu: Loader, source: str, *, rounds: int = ROUNDS
) -> Choice:
    """Run both in turns between requests, on the inputs that came with the compiled form.

    `key` is the compiled form, loaded on the device, `source` what the CPU engine has loaded. Where they
    cannot be compared the compiled form serves, which was proven right.
    """
    gpu_ns: list[int] = []
    cpu_ns: list[int] = []
    end = time.monotonic() + _SECONDS
    try:
        async with device.comparing:
            for turn in range(rounds):
                cpu_ns.append(await cpu.turn(source, compiled, turn))
                gpu_ns.append(await device.alone(key, turn))
                if turn + 1 >= _LEAST and time.monotonic() > end:
                    break
    except HonedError as error:
        return Choice("gpu", f"the compiled form; it could not be compared with the CPU engine: {error}")
    return choose(gpu_ns, cpu_ns)


def cpu_serves(manifest: Manifest, configured: str) -> bool:
    """Whether the CPU engine is to serve a stored model; `configured` is the setting serve.engine."""
    if manifest.interface is None:
        return False
    if manifest.compiled is None:
        return True
    wanted = manifest.wanted or configured
    return wanted == "cpu" or (wanted == "fastest" and manifest.chosen == "cpu")


def unfinished(manifest: Manifest, configured: str) -> bool:
    """Whether compiling a stored model was interrupted."""
    return manifest.compiled is None and not manifest.why and (manifest.wanted or configured) != "cpu"
