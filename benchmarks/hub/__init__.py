"""What a hub is worth: one machine tunes, others have it without a search."""
