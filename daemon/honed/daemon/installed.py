"""Whether the compiler, honed-tuner, is on this machine. Imports nothing, for the tool needs it at once."""

from __future__ import annotations

import importlib.util


def compiler() -> bool:
    """It is looked for and not imported."""
    return importlib.util.find_spec("honed.tuner") is not None
