"""What is served by what: state machines without clocks or I/O. Events in, actions out (docs/serving.md)."""
