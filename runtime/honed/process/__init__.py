"""The two protocols with child processes: typed calls to those that live, and jobs that tell JSON lines."""
