"""The configuration's tables, limits, and paths."""
