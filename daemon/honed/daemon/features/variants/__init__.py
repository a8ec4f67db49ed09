"""Variants: a model compiled for further shapes, and asked in its own name."""
