"""Features of scheduled functions, by which cost models judge them: loops and memory, and no operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm.s_tir import meta_schedule as ms

from .costmodel import Array

_STORE_WIDTH = 164  # of MetaSchedule's features of one store
WIDTH = 2 * _STORE_WIDTH


def features(context: ms.TuneContext, candidates: Sequence[Any]) -> Array:
    """Features [n, WIDTH]: over a schedule's stores, the sum and the greatest of the logarithms."""
    found = np.zeros((len(candidates), WIDTH), np.float32)
    if not candidates:
        return found
    extractor = ms.feature_extractor.PerStoreFeature(extract_workload=False)
    for n, array in enumerate(extractor.extract_from(context, list(candidates))):
        stores = np.log1p(np.maximum(array.numpy().astype(np.float32), 0.0))
        if len(stores):
            found[n, :_STORE_WIDTH] = stores.sum(0)
            found[n, _STORE_WIDTH:] = stores.max(0)
    return found
