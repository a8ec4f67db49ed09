"""Where a session waits for its turn."""

from __future__ import annotations


class Gate:
    """One that is always open."""

    def enter(self) -> bool:
        """Before each candidate and each other step: returns when the device may be used, False to stop."""
        return True

    def leave(self) -> None:
        """The device is not used until `enter` is called again."""
