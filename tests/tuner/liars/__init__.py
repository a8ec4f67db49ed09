"""Kernels that do not do what they should, one of a kind, and the honest ones they are taken from."""
