"""Evaluates the original model with something that shares nothing with TVM or the frontend.

ONNX Runtime where it is installed and can run the model, else ONNX's reference evaluator; each in a child
process of its own, bounded in time and memory, because the model is untrusted. What goes wrong is a value.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from honed.protocol.errors import ModelRefused

from . import confined, graphs
from .confined import DEFAULT_LIMITS, EvaluationLimits
from .evaluator import EVALUATORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the reference gave: for every set of inputs, the outputs by name, in the model's order."""

    outputs: tuple[dict[str, np.ndarray], ...]
    evaluator: str  # name and version, "onnxruntime 1.20.0"
    note: str | None  # why the first choice of evaluator was not used, one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFailure:
    """No evaluator could evaluate the model within its limits; `reason` is one sentence.

    `inputs`: the last that was tried runs the model, but not on these inputs.
    """

    reason: str
    inputs: bool = False

    def refusal(self) -> ModelRefused:
        """Of a model that this leaves without a proof."""
        why = f"the model's answers cannot be proven right, so it is not served: {self.reason}"
        return ModelRefused(why, (self.reason,))


def evaluate(
    model: onnx.ModelProto,
    inputs: Sequence[Mapping[str, np.ndarray]],
    limits: EvaluationLimits = DEFAULT_LIMITS,
    evaluators: Sequence[str] = EVALUATORS,
) -> Reference | ReferenceFailure:
    """Run the model, with static shapes and all its tensors inside, on every set of inputs.

    `evaluators` are tried in order ("onnxruntime", "reference"); one that runs out of time or memory ends
    the evaluation, one that fails otherwise hands over to the next. Raises InvalidArgument where the
    inputs or shapes of the model are not such as honed carries.
    """
    names = [v.name for v in graphs.inputs(model)]
    if model.ByteSize() > confined.MAX_MODEL:
        return ReferenceFailure(reason="the model is larger than 2 GiB, more than the reference can be given")
    deadline = time.monotonic() + limits.seconds
    reasons: list[str] = []
    with tempfile.TemporaryDirectory(prefix="honed-reference-") as folder:
        place = Path(folder)
        confined.write(place, model, names, inputs)
        for evaluator in evaluators:
            more = (evaluator, "--sets", str(len(inputs)))
            result = confined.run("honed.tuner.prove.evaluator", place, more, limits, deadline)
            if "evaluator" in result:
                return Reference(
                    outputs=_read(place, graphs.outputs(model), len(inputs)),
                    evaluator=result["evaluator"],
                    note="; ".join(reasons) or None,
                )
            reasons.append(f"{evaluator} could not evaluate the model: {result['failure']}")
            if result["kind"] not in ("failed", "inputs"):
                break
    return ReferenceFailure(reason="; ".join(reasons), inputs=result["kind"] == "inputs")


_MAPPED = 1 << 20  # bytes; larger values are mapped, which takes no memory until they are read


def _read(folder: Path, names: Sequence[str], sets: int) -> tuple[dict[str, np.ndarray], ...]:
    def value(path: Path) -> np.ndarray:
        mapped = path.stat().st_size > _MAPPED
        return np.asarray(np.load(path, mmap_mode="r" if mapped else None))

    return tuple(
        {name: value(folder / f"output.{i}.{j}.npy") for j, name in enumerate(names)} for i in range(sets)
    )
