"""Calls to the service: connections, shared memory, and the steps of each operation."""
