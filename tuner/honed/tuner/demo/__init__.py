"""Builds models for a first inference without a download."""
