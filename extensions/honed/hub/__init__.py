"""Records of tuning that many boards share, as signed files in a folder that any URL serves."""
