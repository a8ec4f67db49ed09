"""Provides `hone`, the command line, one module per group of commands; `honed.tool.main` is its entry."""
