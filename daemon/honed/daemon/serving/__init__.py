"""The shell around the core: it has workers perform actions, and reports the results as events."""
