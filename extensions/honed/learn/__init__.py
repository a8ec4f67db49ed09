"""Learns the prior of a family from records of tuning, and judges it by tasks that it did not see."""

from .command import learn

__all__ = ["learn"]
