"""What tests of verification share: models written as ONNX's text."""

from __future__ import annotations

import onnx
from onnx import parser


def parsed(text: str, opset: int = 18) -> onnx.ModelProto:
    """A model of ONNX's operators of an opset; the text begins with the graph's name."""
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{text}')
