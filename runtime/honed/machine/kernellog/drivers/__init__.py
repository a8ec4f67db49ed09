"""The records of kernel drivers, a table for each."""
