"""What each user holds, so that one cannot use up what is there for all."""

from __future__ import annotations


class Usage:
    """Amounts by user id, with one limit for each user and one for all together (0: none)."""

    def __init__(self, limit: int, in_all: int = 0) -> None:
        self.limit = limit
        self.in_all = in_all
        self._amounts: dict[int, int] = {}
        self._sum = 0

    def change(self, uid: int, amount: int) -> bool:
        """Add `amount` (it may be negative); False where the user is then above the limit."""
        total = self._amounts.get(uid, 0) + amount
        self._sum += amount
        if total:
            self._amounts[uid] = total
        else:
            self._amounts.pop(uid, None)
        return total <= self.limit

    @property
    def overfull(self) -> bool:
        """Whether all users together are above their limit."""
        return bool(self.in_all) and self._sum > self.in_all

    @property
    def largest(self) -> int:
        """The user who holds most; there must be one."""
        return max(self._amounts, key=lambda uid: self._amounts[uid])

    def of(self, uid: int) -> int:
        """What a user holds."""
        return self._amounts.get(uid, 0)
