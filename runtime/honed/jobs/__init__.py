"""The interface between service, tool and compiler: jobs of `python -m honed.tuner`, and their events."""
