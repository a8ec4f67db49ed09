"""Shared by benchmarks that run models: compiling without a service, made-up inputs, runs in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import numpy as np

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled.model import SourceModel
from honed.runtime.execution.executor import Executor
from honed.tuner import frontend
from honed.tuner.compiler import fusion
from honed.tuner.compiler.assemble import assemble
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.compiler.verification import open_executor
from honed.tuner.frontend import Normalised
from honed.tuner.lower.module import LoweredModel, lower_module

Arrays = dict[str, np.ndarray]


def normalised(
    path: Path, profile: DeviceProfile, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Normalised:
    """Return a model in the types that a device has."""
    return frontend.normalise(frontend.load(path), shapes=shapes or {}, profile=profile)


def first_served(model: Normalised, profile: DeviceProfile) -> LoweredModel:
    """Return the model's kernels as the service has them before any trial."""
    joins = fusion.FusionPolicy(profile)
    return lower_module(frontend.import_relax(model), profile, first=untuned_kernels, joins=joins)


def ready(model: Normalised, lowered: LoweredModel, device: Device) -> Executor:
    """Return a lowered model, ready to run."""
    source = SourceModel(
        sha256="0" * 64, filename="bench", producer="", opset=17, precision=model.precision, notes=()
    )
    return open_executor(*assemble(source, device.profile, model, lowered, None), device)


def made_up(model: Normalised) -> Arrays:
    """Return inputs of a model: normal, of a standard deviation of 0.1, the same every time."""
    rng = np.random.default_rng(0)
    return {i.name: (0.1 * rng.standard_normal(i.shape)).astype(i.numpy) for i in model.inputs}


def in_turns(runs: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return median seconds of each, after a few runs that do not count; the order is random.

    In each turn the second of two runs is timed, after all threads of this process slept: those of a session
    of ONNX Runtime with its defaults spin on for tens of milliseconds, on processors that others need.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for run in list(runs.values()) * 3:
        run()
    for _ in range(turns):
        for name, run in order.sample(list(runs.items()), len(runs)):
            _let_sleep()
            run()
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: median(found) for name, found in times.items()}


def _let_sleep() -> None:
    """Wait until no thread of this process takes processor time."""
    while True:
        before = time.process_time()
        time.sleep(0.002)
        if time.process_time() - before < 0.0005:
            return


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference, over the largest value."""
    exact = one.astype(np.float64)
    if not exact.size:
        return 0.0
    return float(np.abs(exact - other.reshape(one.shape)).max() / max(1e-30, float(np.abs(exact).max())))
