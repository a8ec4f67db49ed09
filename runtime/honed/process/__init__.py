"""The two protocols with child processes: typed calls to lasting ones, and jobs that print JSON lines."""
