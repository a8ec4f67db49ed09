"""ONNX in, compiled model out: the stages of one compilation."""
