"""Changes to models: adding, compiling, verifying, committing and publishing."""
