"""Records of requests and devices: times, shares, faults."""
