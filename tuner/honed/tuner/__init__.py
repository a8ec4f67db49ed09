"""ONNX in, compiled model out, and the search for a better one: the only part that knows TVM."""
