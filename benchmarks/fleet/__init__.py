"""Many boards and one hub, on paper: requests, bytes, and how long until all have what one learned."""
