"""Searches for better schedules: the spaces of schedules for devices, and the choice of candidates."""
