"""Measures what a farm of four boards gains over one."""
