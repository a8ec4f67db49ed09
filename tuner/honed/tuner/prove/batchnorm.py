"""BatchNormalization of opsets 7 to 13 for ONNX's reference evaluator, which trains there instead of testing.

The specification of these opsets (onnx/docs/Changelog.md) has a node with one output normalise by the mean
and variance it is given. The evaluator (1.20.1, BatchNormalization_6 and _9) mixes those of the input in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

Array = np.ndarray[Any, Any]


class BatchNormalization(OpRun):  # type: ignore[misc]
    """(x - mean) / sqrt(var + epsilon) * scale + bias for every channel, axis 1 of `x`."""

    op_domain = ""

    def _run(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array, epsilon: float, **_: Any
    ) -> tuple[Array]:
        if sum(bool(name) for name in self.onnx_node.output) > 1:
            raise NotImplementedError("BatchNormalization with several outputs is for training")
        if scale.ndim > 1:
            raise NotImplementedError("BatchNormalization with spatial=0")
        channels = (-1,) + (1,) * (x.ndim - 2)
        scale, bias, mean, var = (each.reshape(channels) for each in (scale, bias, mean, var))
        return ((scale * (x - mean) / np.sqrt(var + epsilon) + bias).astype(x.dtype),)
