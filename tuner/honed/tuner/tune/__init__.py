"""Tuning a model: its tasks, what to try next, and the processes that do the work."""
