"""What the service and the tuner both need of the machine they run on."""
