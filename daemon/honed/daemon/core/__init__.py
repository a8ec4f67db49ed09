"""State machines of serving, without clocks or I/O: events in, actions out (docs/dev/serving.md)."""
