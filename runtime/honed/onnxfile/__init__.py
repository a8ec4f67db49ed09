"""Reads untrusted ONNX files, for the compiler and for the CPU engine."""
