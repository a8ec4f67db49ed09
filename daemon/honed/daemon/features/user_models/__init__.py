"""Models that apps upload, each for its user only."""
