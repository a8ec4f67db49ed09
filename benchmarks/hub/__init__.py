"""Measures what a hub is worth: one machine tunes, and others get its results without a search."""
