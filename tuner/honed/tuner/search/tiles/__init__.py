"""Tables of good numbers, one module for the sketches of a kind."""
