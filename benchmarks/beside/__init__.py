"""Programs with an ONNX Runtime of their own, alone and beside honed."""
