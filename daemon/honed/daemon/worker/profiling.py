"""Profiles a loaded model: one timed inference."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol import strict
from honed.protocol.errors import InvalidArgument
from honed.protocol.results import ModelProfile
from honed.runtime.dtypes import dtype
from honed.runtime.execution.executor import Executor

_MOST_SPANS = 8192  # of a timeline, which then fits a message


def profile(executor: Executor, name: str, *, timeline: bool) -> ModelProfile:
    """The result of ModelProfile for one run of the model called `name`.

    Raises InvalidArgument where a timeline is asked for that is too long.
    """
    if timeline and len(executor.model.steps) > _MOST_SPANS:
        raise InvalidArgument(
            f"an inference takes {len(executor.model.steps)} steps and a timeline holds {_MOST_SPANS}; "
            "profile the model without one"
        )
    found = executor.profile(_inputs(executor))
    device = executor.device.profile
    return strict.like(
        ModelProfile,
        found,
        name=name,
        runs=1,
        device=device.identity,
        peaks=device.peaks,
        rows=found.kernels,
        timeline=tuple(astuple(span) for span in found.spans) if timeline else None,
    )


def _inputs(executor: Executor) -> dict[str, NDArray[Any]]:
    """Those of the first probe; zeros where the file has none."""
    model = executor.model
    if model.proof and model.proof.probes:
        return {
            tensor.name: executor.file.constant(index)
            for tensor, index in zip(model.inputs, model.proof.probes[0].inputs, strict=True)
        }
    return {tensor.name: np.zeros(tensor.shape, dtype(tensor.dtype).numpy) for tensor in model.inputs}
