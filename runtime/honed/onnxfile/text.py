"""Text out of untrusted files."""

from __future__ import annotations


def shown(text: str, limit: int = 400) -> str:
    """Text out of an untrusted file on one line, without control characters, cut at `limit`."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    plain = " ".join(plain.split())
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."
