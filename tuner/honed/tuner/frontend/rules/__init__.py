"""Rewriting rules, one file for each family of operators: every ONNX operator that is compiled has one here,
or a function body in ONNX itself.

A rule gets a call with resolved inputs and emits nodes of the core set (`importing.CORE`) at TARGET_OPSET,
which are the only ones the importer knows.
"""

from __future__ import annotations

from . import (
    arithmetic,
    attention,
    contrib,
    contrib_forms,
    convolution,
    features,
    indexing,
    layout,
    linear,
    normalisation,
    pooling,
    quantisation,
    quantised,
    recurrence,
    reduction,
    resize,
    sampling,
    sequences,
    signal,
    training,
)

__all__ = [
    "arithmetic",
    "attention",
    "contrib",
    "contrib_forms",
    "convolution",
    "features",
    "indexing",
    "layout",
    "linear",
    "normalisation",
    "pooling",
    "quantisation",
    "quantised",
    "recurrence",
    "reduction",
    "resize",
    "sampling",
    "sequences",
    "signal",
    "training",
]
