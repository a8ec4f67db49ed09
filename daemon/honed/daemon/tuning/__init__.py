"""The tuner's process, and its jobs for clients."""
