"""Rewrites a model's manifest as another version of honed would have: manifest.py FILE older|newer."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path


def main(file: str, version: str) -> None:
    """Make the checksum in the first line fit; owner and mode of the file stay."""
    path = Path(file)
    plain = json.loads(path.read_text().partition("\n")[2])
    if version == "older":  # before a model had several versions, and a device
        for key in ("format", "history", "device", "placed"):
            plain.pop(key, None)
    else:
        plain |= {"format": 1000, "invention": {}}
    body = json.dumps(plain)
    path.write_text(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
