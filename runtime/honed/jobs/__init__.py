"""What the service, the tool and the tuner agree on: jobs of `python -m honed.tuner`, and what it tells."""
