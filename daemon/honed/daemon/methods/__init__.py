"""The methods of the socket."""
