"""What runs compiled models on a device."""
