"""How models come to be served: compiling, proving, committing, publishing."""
