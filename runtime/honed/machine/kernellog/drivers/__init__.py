"""What each kernel driver writes, one module for each."""
