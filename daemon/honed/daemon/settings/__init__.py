"""Sections of the configuration, limits, and where things are."""
