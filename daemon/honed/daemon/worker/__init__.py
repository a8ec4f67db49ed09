"""The processes that run models: their calls, how they are started and watched, and what runs in them."""
