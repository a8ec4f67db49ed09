"""Sizes: parts of models whose sizes depend on the data, compiled for those that requests meet."""
