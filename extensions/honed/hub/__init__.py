"""Shares records of tuning between boards, as signed files in a folder that any URL serves."""
