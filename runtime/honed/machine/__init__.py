"""Describes the machine: its devices, processors, kernel log and files of /proc and /sys."""
