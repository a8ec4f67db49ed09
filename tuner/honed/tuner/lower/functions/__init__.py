"""Turns operators into fused functions of TIR."""
