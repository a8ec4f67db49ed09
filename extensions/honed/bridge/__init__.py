"""What bridges between the service and other protocols have in common: settings, addresses, their start."""
