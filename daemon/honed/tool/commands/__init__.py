"""The commands, one module for a group of them."""
