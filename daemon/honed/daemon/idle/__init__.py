"""When the machine is idle: signals it shows without privilege, and the decision over them (docs/idle.md)."""
