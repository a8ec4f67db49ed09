"""Selects what serves a model: one of the configured devices, with a compiled file, or the CPU engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from honed.daemon.aio import in_thread
from honed.daemon.store.store import EngineTimes, Manifest, Store
from honed.protocol.errors import HonedError, InvalidArgument, NotFound
from honed.runtime.engines import allowance, can_compiled_serve

from .engine_server import EngineServer
from .loader import LONGEST_OWN_MS, Loader
from .trial import Runner, paired_trial

_FASTEST = "fastest"  # Selects the fastest device by measurement
Kind = Literal["gpu", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The configured name of a model's device, and the reason."""

    device: str
    why: str


class Placement:
    """The placement by `device`, `devices` and `placement` of [service]; device names ignore case.

    `names` has the name of every device, as configured, the default first; "" is the best there is.
    """

    def __init__(self, device: str, devices: Sequence[str], by_model: Mapping[str, str]) -> None:
        self.default = device or (devices[0] if devices else "")
        self._by_model = by_model
        self._names: dict[str, str] = {}
        for name in (self.default, *devices):
            self._names.setdefault(name.casefold(), name)
        self.names = tuple(self._names.values())

    def find(self, device: str) -> str | None:
        """Return the configured name of a device, or None if no such device is configured."""
        return self._names.get(device.casefold())

    def home(self, model: str, kept: str, why: str) -> PlacementDecision:
        """Return a model's device; `kept` is the one it was added for, "" for none, and `why` the reason.

        The configuration has priority. A device that is no longer configured is replaced by the default.
        """
        configured = self._by_model.get(model)
        if configured is not None:
            return PlacementDecision(
                device=self.find(configured) or self.default, why="placed by the configuration"
            )
        if not kept:
            return PlacementDecision(device=self.default, why="")
        found = self.find(kept)
        if found is None:
            return PlacementDecision(
                device=self.default, why=f"it was added for {kept}, which is not configured any more"
            )
        return PlacementDecision(device=found, why=why)

    def select(self, model: str, device: str, specs: Mapping[str, str]) -> tuple[str, ...]:
        """Return the configured names of the devices that a user requests.

        The user gives a device by its name or a part of `specs`, or all: _FASTEST means all. `specs` are the
        full names, by configured name, of devices seen so far. Raises InvalidArgument if the configuration
        places the model elsewhere, NotFound if none or several fit.
        """
        found = self.names if device == _FASTEST else (self._matching(device, specs),)
        configured = self._by_model.get(model)
        if configured is not None and found != (self.find(configured),):
            raise InvalidArgument(
                f"the configuration places {model} on {configured}; change service.placement there, or do "
                "not ask for a device"
            )
        return found

    def _matching(self, device: str, specs: Mapping[str, str]) -> str:
        found = self.find(device)
        if found is not None:
            return found
        fitting = [name for name, full in specs.items() if device.casefold() in full.casefold()]
        if len(fitting) != 1:
            shown = "; ".join(specs.get(name) or name for name in self.names) or "none"
            problem = "fits several devices" if fitting else "is none of the devices"
            raise NotFound(
                f"{device[:80]!r} {problem} of this service; use one of: {shown}; or add it to "
                "service.devices in the configuration"
            )
        return fitting[0]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """A chosen engine and the reason."""

    engine: Kind
    why: str
    times: EngineTimes | None = None


def choose(times: EngineTimes, owner: int | None = None) -> EngineChoice:
    """Return the faster engine; for a user's own model (`owner`), the CPU if its runs would be long."""
    gpu, cpu = (f"{float(f'{ms:.3g}'):,g} ms" for ms in (times.gpu_ms, times.cpu_ms))
    measured = f"compiled {gpu}, ONNX Runtime {cpu}, measured in turns"
    if times.others_percent is not None:
        measured += (
            f" while other programs took {times.others_percent:.0f} % of the processors, "
            "so it is measured again when the machine is idle"
        )
    if _blocks_others(times, owner):
        why = f"a run on the device would keep others waiting for more than {LONGEST_OWN_MS:g} ms"
        return EngineChoice("cpu", f"{why}: {measured}", times)
    if not can_compiled_serve(times.gpu_ms, times.cpu_ms, same_cores=times.same_cores):
        return EngineChoice("cpu", f"the CPU engine is faster: {measured}", times)
    return EngineChoice("gpu", f"the compiled form is as fast or faster: {measured}", times)


def _blocks_others(times: EngineTimes, owner: int | None) -> bool:
    """Return whether runs of a user's own model on the device keep others waiting for too long."""
    return owner is not None and times.gpu_ms > LONGEST_OWN_MS


def is_only_slower(manifest: Manifest) -> bool:
    """Return whether only times chose the CPU engine, which a pin of the compiled form overrides.

    A compiled form without times is not right, or was never compared.
    """
    chosen, times = manifest.decision.chosen, manifest.decision.times
    return chosen == "cpu" and times is not None and not _blocks_others(times, manifest.owner)


async def engines_timed(device: Loader, cpu: Loader, by_device: Runner, by_cpu: Runner) -> EngineTimes:
    """Time the compiled file and the CPU engine in turns at the same work; raise what a turn raises."""
    same_cores = device.engine.on_processor
    allowed, processes = allowance(same_cores=same_cores), (device.pid, cpu.pid)
    result = await paired_trial(by_cpu, by_device, allowed, processes)
    cpu_seconds, gpu_seconds = result.runs.times
    return EngineTimes(
        gpu_ms=1e3 * gpu_seconds,
        cpu_ms=1e3 * cpu_seconds,
        device=device.engine.fingerprint,
        runtime=cpu.engine.fingerprint,
        same_cores=same_cores,
        others_percent=result.others_percent,
    )


async def measure(device: Loader, key: str, compiled: Path, cpu: Loader, source: str) -> EngineTimes:
    """Time both engines in turns between requests, on the probe inputs of the compiled file.

    `key` identifies the compiled file loaded on the device, `source` the file that the CPU engine has loaded.
    Raises a HonedError if they cannot be compared.
    """
    async with device.comparing:
        return await engines_timed(
            device, cpu, partial(device.time_compiled_run, key), partial(cpu.time_cpu_run, source, compiled)
        )


async def compare(
    device: Loader, key: str, compiled: Path, cpu: Loader, source: str, owner: int | None = None
) -> EngineChoice:
    """Return the engine that is to serve a model of `owner` with a new compiled file.

    If the two cannot be compared, that is the device, as the compiled file was verified. For a user's own
    model it is the CPU engine, because it is not known how long a run would block the device.
    """
    try:
        return choose(await measure(device, key, compiled, cpu, source), owner)
    except HonedError as error:
        if owner is not None:
            return EngineChoice("cpu", f"the compiled form could not be compared with it: {error}")
        return EngineChoice(
            "gpu", f"the compiled form; it could not be compared with the CPU engine: {error}"
        )


async def compare_again(
    device: EngineServer, cpu: EngineServer, manifest: Manifest, store: Store, seconds: float
) -> EngineTimes:
    """Time both engines again for a stored model, and load it where necessary; the caller pins both files.

    Each engine may take `seconds` to be ready. Raises a HonedError if one cannot run the model.
    """
    for server, key in ((device, manifest.key), (cpu, manifest.source_key)):
        await server.wait_ready(seconds)
        await server.loader.load(key, str(await in_thread(store.form, manifest, key)))
    path = store.form(manifest, manifest.key)
    return await measure(device.loader, manifest.key, path, cpu.loader, manifest.source_key)


def cpu_serves(manifest: Manifest, configured: str) -> bool:
    """Return whether the CPU engine is to serve a stored model; `configured` is the setting serve.engine."""
    if manifest.interface is None:
        return False
    if manifest.compiled is None:
        return True
    wanted = manifest.engine_wanted(configured)
    return wanted == "cpu" or (wanted == "fastest" and manifest.decision.chosen == "cpu")


def is_unfinished(manifest: Manifest, configured: str) -> bool:
    """Return whether compiling a stored model was interrupted, or lacked a compiler or a device."""
    left = not manifest.decision.reason or manifest.decision.awaits_compiler
    return manifest.compiled is None and left and (manifest.decision.requested or configured) != "cpu"
