"""Clients on the socket: identity, permissions, fairness and frames."""
