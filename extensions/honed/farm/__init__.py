"""Searches on many machines: one compiles and searches, boards measure."""
