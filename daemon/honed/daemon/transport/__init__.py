"""Clients on the socket: who they are, their turns and shares, their frames."""
