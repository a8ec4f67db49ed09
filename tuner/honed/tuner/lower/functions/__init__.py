"""Operators to fused functions of TIR."""
