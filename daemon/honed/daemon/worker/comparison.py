"""In the worker: two versions of a model run in turns on the same inputs, one run at a time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.runtime.dtypes import dtype
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.proof import compare
from honed.runtime.execution.rows import aligned

Inputs = dict[str, NDArray[Any]]
_RECORDED_BYTES = 16 << 20  # of one model's inputs; larger ones are not recorded
_RECORDED = 2
_PERIOD = 5.0  # seconds between two that are recorded


class Recorder:
    """The last inputs that clients sent to each model, to compare its successor on."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Inputs]] = {}
        self._noted: dict[str, float] = {}

    def note(self, key: str, inputs: Inputs) -> None:
        """Keep a copy now and then: the arrays may be a client's memory."""
        now = time.monotonic()
        if now - self._noted.get(key, -_PERIOD) < _PERIOD:
            return
        self._noted[key] = now
        if sum(array.nbytes for array in inputs.values()) * _RECORDED <= _RECORDED_BYTES:
            copies = {name: np.array(array) for name, array in inputs.items()}
            self._kept[key] = [*self._kept.get(key, []), copies][-_RECORDED:]

    def of(self, *keys: str) -> list[Inputs]:
        """What was recorded of these."""
        return [inputs for key in keys for inputs in self._kept.get(key, [])]

    def forget(self, key: str) -> None:
        """A model is gone."""
        self._kept.pop(key, None)
        self._noted.pop(key, None)


class Comparison:
    """Turn 0 runs the old version, 1 the new one, and so on, over the probes and the recorded inputs.

    Where the CPU engine runs a last part it is timed, too, and what it is given is compared: small
    differences may make it choose otherwise.
    """

    def __init__(self, old: Executor, new: Executor, recorded: list[Inputs]) -> None:
        self.pair = (old, new)
        probes = old.model.probes
        self.sets = [*recorded, *map(old.file.inputs, probes)] or [zeros(old)]
        self._tolerance = [
            2 * max((probe.tolerance[i] for probe in probes), default=1e-3)
            for i in range(len(old.model.outputs))
        ]
        self._answers: dict[int, Inputs] = {}

    def turn(self, number: int) -> tuple[int, str]:
        """Nanoseconds of one run, and how its answers differ from the old version's, or "".

        Either version may be off by the tolerance of its proof, so they may differ by twice that.
        """
        which = (number // 2) % len(self.sets)
        executor = self.pair[number % 2]
        begun = time.monotonic_ns()
        answers = executor.run_compiled(self.sets[which])
        executor.run_behind(answers, self.sets[which])
        taken = time.monotonic_ns() - begun
        if number % 2 == 0:
            self._answers[which] = answers
            return taken, ""
        return taken, self._difference(self._answers[which], answers)

    def _difference(self, expected: Inputs, found: Inputs) -> str:
        model = self.pair[0].model
        selections = model.proof.selections if model.proof is not None else ()
        names = [tensor.name for tensor in model.outputs]
        found = aligned(selections, names, expected, found, self._tolerance)
        for tensor, tolerance in zip(model.outputs, self._tolerance, strict=True):
            difference = compare(expected[tensor.name], found[tensor.name], tolerance, tensor.name)
            if not difference.right:
                return str(difference)
        return ""


def zeros(executor: Executor) -> Inputs:
    """Inputs for a model that has no probes."""
    return {t.name: np.zeros(t.shape, dtype(t.dtype).numpy) for t in executor.model.inputs}
