"""The processes that run models: their calls, their supervision, and the code that runs in them."""
