"""What is remembered of requests and devices: times, shares, faults."""
