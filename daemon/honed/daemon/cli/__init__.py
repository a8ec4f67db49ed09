"""The command line, one module per group of commands; `honed.daemon.tool` is its entry."""
