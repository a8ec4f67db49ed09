"""Compiled models: what they are, their file, and what must hold of both."""
