"""Reads ONNX files that nobody vouches for, for what compiles them and for what runs them as they are."""
