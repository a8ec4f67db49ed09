"""What the methods of the socket do."""
