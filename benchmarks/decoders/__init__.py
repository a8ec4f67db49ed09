"""Models that generate, with random weights, as exporters write them."""
