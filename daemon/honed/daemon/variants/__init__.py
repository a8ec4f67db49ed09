"""Variants: compiled forms of a model for shapes that its own compiled form does not have."""
