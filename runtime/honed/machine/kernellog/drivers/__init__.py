"""What kernel drivers write, a table for each."""
