"""Compiled models: their header, their file, and the rules of both."""
