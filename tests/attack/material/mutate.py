"""Hostile values, and trees and bytes made a little wrong."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

LARGE = 60 << 20  # bytes: just inside of what one message may have
INTEGERS: tuple[int, ...] = (
    0,
    1,
    -1,
    2,
    7,
    255,
    4096,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
INTEGERS += (-(2**63), -(2**62))
FLOATS = (0.0, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
TEXTS: tuple[str, ...] = (
    "",
    "\0",
    "a\0b",
    "/",
    "..",
    "../../etc/passwd",
    "a/b",
    "a\\b",
    "%s%n{}{0}",
    "\u202e",
    "\ud7ff\U0010ffff",
)
TEXTS += (
    "x" * 65,
    "x" * 300,
    "x" * 5000,
    "'\"`$(id)",
    "\n\r\t",
    "victim\n",
    " victim",
    "victim\0",
    "-rf",
    "\ufeff",
)


class Mutator:
    """Makes wrong things out of right ones, with one source of randomness."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def scalar(self) -> Any:
        """Any small value MessagePack has."""
        choice: Callable[[], Any] = self.rng.choice(
            (
                lambda: self.rng.choice(INTEGERS),
                lambda: self.rng.choice(FLOATS),
                lambda: self.rng.choice(TEXTS),
                lambda: self.rng.choice((None, True, False)),
                lambda: self.rng.randbytes(self.rng.choice((0, 1, 3, 300))),
            )
        )
        return choice()

    def value(self, depth: int = 3) -> Any:
        """Any value, sometimes a container."""
        kind = self.rng.randrange(8) if depth else 0
        if kind == 6:
            return [self.value(depth - 1) for _ in range(self.rng.choice((0, 1, 2, 9, 200)))]
        if kind == 7:
            return {self.text(): self.value(depth - 1) for _ in range(self.rng.choice((0, 1, 2, 9)))}
        return self.scalar()

    def text(self) -> str:
        """A hostile string."""
        return self.rng.choice(TEXTS)

    def tree(self, tree: Any, times: int = 1) -> Any:
        """A copy with some places changed: replaced, removed, doubled, renamed, nudged."""
        tree = copy.deepcopy(tree)
        for _ in range(times):
            spots = _spots(tree)
            if not spots:
                return self.value()
            self._change(*self.rng.choice(spots))
        return tree

    def large(self, tree: Any, size: int = LARGE) -> tuple[Any, str]:
        """A copy with one string, key or list of about `size` bytes, and what was made large."""
        tree = copy.deepcopy(tree)
        spots = _spots(tree)
        holder, key = self.rng.choice(spots) if spots else (tree, "x")
        kind = self.rng.choice(("str", "bin", "key", "many"))
        if kind == "key" or not spots:
            maps = [each for each in _containers(tree) if isinstance(each, dict)] or [{}]
            self.rng.choice(maps)["k" * size] = None
            return tree, f"a key of {size >> 20} MiB"
        holder[key] = {"str": "s" * size, "bin": bytes(size), "many": [""] * 60_000}[kind]
        return tree, f"{key} a {kind} of {size >> 20} MiB"

    def _change(self, holder: Any, key: Any) -> None:
        old = holder[key]
        how = self.rng.randrange(7)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
        elif how == 1:
            holder[self.text()] = holder.pop(key)
        elif how == 2 and isinstance(old, int):
            holder[key] = old + self.rng.choice((-1, 1, -2, 8, 4096, 2**32))
        elif how == 3 and isinstance(old, str) and old:
            holder[key] = old.replace(self.rng.choice(old), "", 1)
        elif how == 3 and isinstance(old, bytes) and old:
            holder[key] = old[: self.rng.randrange(len(old))]
        elif how == 4:
            holder[key] = [old]
        else:
            holder[key] = self.value()

    def data(self, data: bytes, times: int = 0) -> bytes:
        """Bytes with some changed, cut out, doubled, moved or added."""
        changed = bytearray(data)
        for _ in range(times or self.rng.choice((1, 1, 2, 4, 16))):
            if not changed:
                return self.rng.randbytes(8)
            at = self.rng.randrange(len(changed))
            length = min(len(changed) - at, self.rng.choice((1, 1, 2, 4, 8, 64)))
            how = self.rng.randrange(6)
            if how == 0:
                changed[at] ^= 1 << self.rng.randrange(8)
            elif how == 1:
                changed[at : at + length] = self.rng.randbytes(length)
            elif how == 2:
                del changed[at : at + length]
            elif how == 3:
                changed[at:at] = changed[at : at + length] * self.rng.choice((1, 2, 30))
            elif how == 4:
                changed[at : at + length] = self.rng.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * length
            else:
                del changed[at:]
        return bytes(changed)


def _containers(tree: Any) -> list[Any]:
    """Every list and map in a tree."""
    found, todo = [], [tree]
    while todo:
        each = todo.pop()
        if isinstance(each, dict | list):
            found.append(each)
            todo += list(each.values()) if isinstance(each, dict) else each
    return found


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree: a container and a key or index of it."""
    return [
        (holder, key)
        for holder in _containers(tree)
        for key in (list(holder) if isinstance(holder, dict) else range(len(holder)))
    ]


def shown(value: Any, length: int = 160) -> str:
    """The beginning of a value, without building all of its text."""
    if isinstance(value, str | bytes):
        return repr(value[:length])
    if isinstance(value, dict):
        parts: Sequence[str] = [f"{shown(k, 30)}: {shown(v, 30)}" for k, v in list(value.items())[:6]]
        return f"{{{', '.join(parts)}}}"[:length]
    if isinstance(value, list):
        return f"[{', '.join(shown(item, 30) for item in value[:6])}]"[:length]
    return repr(value)[:length]
