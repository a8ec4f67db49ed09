"""Removes from a text who ran it, and where: a report is sent to strangers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


def anonymous(text: str, names: Mapping[str, str]) -> str:
    """Return the text with each of `names` replaced by its value, except within longer words.

    Longer names go first, so that a folder is replaced before the user it belongs to. A user called "mali"
    must not change `mali_kbase`.
    """
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", names[name], text)
    return text


def secrets(user: str, hosts: Iterable[str], home: str, folders: Mapping[str, str]) -> dict[str, str]:
    """Return what a report must not contain, and the replacement of each.

    "root" and "localhost" reveal nothing.
    """
    found = {host: "HOST" for name in hosts for host in (name, name.partition(".")[0])}
    found |= {user: "USER"} | dict(folders)
    if home not in ("", "/", "/root"):
        found[home] = "~"
    return {name: secret for name, secret in found.items() if name not in ("", "root", "localhost")}
