"""Profiles a loaded model: the mean of several timed inferences, as plain maps for the socket."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.runtime.dtypes import dtype
from honed.runtime.executor import Executor
from honed.runtime.profilefile import to_dict
from honed.runtime.timing import InferenceProfile, KernelTiming


def profile(executor: Executor, runs: int) -> dict[str, Any]:
    """The result of ModelProfile without the model's name (docs/protocol.md)."""
    inputs = _inputs(executor)
    profiles = [executor.profile(inputs) for _ in range(runs)]
    merged = merge(profiles)
    plain = to_dict(executor.device.profile)
    return {
        "runs": runs,
        "launches": merged.launches,
        "whole_us": merged.whole_us,
        "sum_us": merged.sum_us,
        "device": plain["identity"],
        "peaks": {"fp16_gflops": None, **plain["peaks"]} if "peaks" in plain else None,
        "rows": [asdict(row) for row in merged.kernels],
    }


def merge(profiles: list[InferenceProfile]) -> InferenceProfile:
    """The mean of profiles of one model: times are means, rates are those of the mean times."""
    total = sum(p.sum_us for p in profiles) / len(profiles)
    times: dict[str, list[float]] = {}
    for each in profiles:
        for row in each.kernels:
            times.setdefault(row.name, []).append(row.us)
    rows = [_with_time(row, sum(times[row.name]) / len(profiles), total) for row in profiles[0].kernels]
    return InferenceProfile(
        kernels=tuple(sorted(rows, key=lambda row: -row.us)),
        launches=profiles[0].launches,
        sum_us=total,
        whole_us=sum(p.whole_us for p in profiles) / len(profiles),
    )


def _with_time(row: KernelTiming, us: float, total: float) -> KernelTiming:
    faster = row.us / us if us else 0.0
    return replace(
        row,
        us=us,
        share=us / total if total else 0.0,
        gflops=None if row.gflops is None else row.gflops * faster,
        gbs=None if row.gbs is None else row.gbs * faster,
        peak_share=None if row.peak_share is None else row.peak_share * faster,
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
