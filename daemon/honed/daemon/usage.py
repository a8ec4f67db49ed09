"""What each user holds, so that one cannot use up what is there for all."""

from __future__ import annotations


class Usage:
    """Amounts by user id, with one limit for each user."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._amounts: dict[int, int] = {}

    def change(self, uid: int, amount: int) -> bool:
        """Add `amount` (it may be negative); False where the user is then above the limit."""
        total = self._amounts.get(uid, 0) + amount
        if total:
            self._amounts[uid] = total
        else:
            self._amounts.pop(uid, None)
        return total <= self.limit

    def of(self, uid: int) -> int:
        """What a user holds."""
        return self._amounts.get(uid, 0)
