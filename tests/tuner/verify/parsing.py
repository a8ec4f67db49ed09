"""What tests of verification share: models written as ONNX's text."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import parser

from honed.tuner.verify.inputs import Inputs


def parsed(text: str, opset: int = 18) -> onnx.ModelProto:
    """A model of ONNX's operators of an opset; the text begins with the graph's name."""
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{text}')


def generate(
    model: onnx.ModelProto, count: int = 3, seed: int = 0, *, shrink: int = 0
) -> list[dict[str, np.ndarray]]:
    """Sets of inputs of a model."""
    return Inputs(model).draw(count, seed, shrink=shrink)
