"""Profiles a loaded model: one timed inference."""

from __future__ import annotations

from dataclasses import astuple

from honed.protocol import strict
from honed.protocol.errors import InvalidArgument
from honed.protocol.results import ModelProfile
from honed.runtime.execution.executor import Executor

from .comparison import zeros

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
    probes = executor.model.probes
    found = executor.profile(executor.file.inputs(probes[0]) if probes else zeros(executor))
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
