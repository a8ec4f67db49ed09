"""Tunes a model: its tasks, the choice of the next candidates, and the processes that do the work."""
