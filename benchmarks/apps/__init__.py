"""Apps from PyPI, unmodified, with onnxruntime and with honed in its place."""
