"""The library, built once for all tests of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .binding import SANITIZED, Library, build, compiled, lacking, objects

HERE = Path(__file__).parent
Made = Callable[[str, Callable[[Path], object]], Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the library cannot be built there is nothing to test."""
    missing = lacking()
    for item in items:
        if missing and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"there is no {', '.join(missing)}"))


@pytest.fixture(scope="session")
def built(made_once: Made) -> Path:
    """A folder with libhoned.so.0, as it is packaged."""
    return made_once("libhoned", build)


@pytest.fixture(scope="session")
def library(built: Path) -> Library:
    """The functions."""
    return Library(built)


@pytest.fixture(scope="session")
def driver(made_once: Made) -> Path:
    """driver.c with checks of memory and of undefined behaviour."""
    library = made_once("libhoned-sanitized-objects", lambda path: objects(path, *SANITIZED))
    return made_once(
        "libhoned-driver", lambda path: compiled(HERE / "driver.c", path, *SANITIZED, library=library)
    )


@pytest.fixture(scope="session")
def plain_driver(made_once: Made) -> Path:
    """driver.c without them, for Valgrind and for what is measured."""
    return made_once("libhoned-plain-driver", lambda path: compiled(HERE / "driver.c", path))
