"""The program: `honed-frigate`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from honed.bridge import launch
from honed.runtime import AsyncClient

from .bridge import Bridge, FrigateSettings

CONFIG: Final = Path("/etc/honed/honed-frigate.toml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bridge; gives the exit status."""
    return launch.launch(
        parser(), arguments, FrigateSettings, CONFIG, lambda *given: asyncio.run(_serve(*given))
    )


def parser() -> argparse.ArgumentParser:
    """The program's options."""
    return launch.parser(
        "honed-frigate", "Detect objects for Frigate by models that a honed service runs.", CONFIG
    )


async def _serve(settings: FrigateSettings, socket: str | None) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncClient(socket, timeout=settings.retry_seconds or 1.0) as client:
        serving = asyncio.create_task(Bridge(settings, client).serve())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving


if __name__ == "__main__":
    sys.exit(main())
