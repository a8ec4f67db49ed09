"""Models honed can make by itself, to show a first inference without a download."""
