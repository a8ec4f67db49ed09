"""The version of honed that runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version of the installed package; "unknown" when run from a bare checkout."""
    try:
        return version("honed")
    except PackageNotFoundError:
        return "unknown"
