"""Draws what commands show: tables, trees, graphs and curves."""
