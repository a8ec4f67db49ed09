"""Measuring candidates in an expendable child: is it right, and how fast."""
