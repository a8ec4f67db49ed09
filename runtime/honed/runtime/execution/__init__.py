"""Runs compiled models on a device."""
