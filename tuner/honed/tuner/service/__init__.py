"""The tuner as a service of its own: a client of honed that tunes its models while the machine is idle."""
