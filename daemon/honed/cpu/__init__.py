"""The CPU engine: ONNX Runtime runs models as they were given. Only its own processes import it."""

from __future__ import annotations

import os

from honed.machine import bundle

bundle.use(__file__)
# With it ONNX Runtime would take its settings from the file, which is untrusted.
os.environ.pop("ORT_LOAD_CONFIG_FROM_MODEL", None)
