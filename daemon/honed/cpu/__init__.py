"""Provides the CPU engine, which runs ONNX files by ONNX Runtime. Only its own processes import it."""

from __future__ import annotations

import os

from honed.machine import bundle

bundle.use(__file__)
# The variable makes ONNX Runtime read its settings from the model file, which is untrusted.
os.environ.pop("ORT_LOAD_CONFIG_FROM_MODEL", None)
