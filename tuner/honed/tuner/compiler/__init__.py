"""Compiles ONNX models: the stages of one compilation."""
