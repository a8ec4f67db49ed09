"""What is served by what: a state machine without clocks or I/O. Events in, actions out (docs/serving.md)."""
