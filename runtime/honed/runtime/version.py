"""The version of honed, which pyproject.toml reads here: metadata of packages takes 20 ms to look up."""

from __future__ import annotations

from typing import Final

HONED_VERSION: Final = "0.1.0"
