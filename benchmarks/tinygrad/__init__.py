"""Models beside tinygrad's OpenCL backend."""
