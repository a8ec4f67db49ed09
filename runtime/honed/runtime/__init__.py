"""Runs models through the honed service, or compiled ones in this process.

`Client` and `AsyncClient` talk to the service and need only NumPy and msgpack; `load` runs a `.honed` file in
this process and needs pyopencl. Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .client import Client
    from .execution.executor import load

__all__ = ["AsyncClient", "Client", "load"]
# Read here by pyproject.toml and libhoned/Makefile, too: metadata of packages takes 20 ms to look up.
HONED_VERSION: Final = "0.2.0"

_HOMES = {"AsyncClient": ".aio", "Client": ".client", "load": ".execution.executor"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)
