"""Tests of search on many machines."""
