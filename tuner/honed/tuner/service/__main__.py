"""`honed-tuner`: tunes the models of a honed service while the machine is idle."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from honed.protocol.errors import HonedError
from honed.runtime import HONED_VERSION

_EXAMPLES = """examples:
  honed-tuner                              for the service of this user
  honed-tuner --socket /run/honed/honed.sock

It asks the service for the idle lease, leaves the device within one candidate when a request comes, and
publishes what it found through the service, which takes only what is right and faster. 'hone status' shows
what it does, 'hone history M' its results.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until stopped by a signal; return the exit status: 0 stopped, 1 failed, 2 used wrongly."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _step_aside()
    from .loop import Tuner

    tuner = Tuner(options.socket)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: tuner.stop())
    try:
        tuner.run()
    except HonedError as error:
        print(f"honed-tuner: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="honed-tuner",
        description="Tune the models of a honed service while the machine is idle.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--socket", metavar="PATH", help="the service's socket (or HONED_SOCKET)")
    parser.add_argument(
        "--version",
        action="version",
        version=f"honed-tuner {HONED_VERSION}",
        help="print the version and exit",
    )
    return parser


def _step_aside() -> None:
    """Run, with all children, only when no other process wants the processor, if the kernel can do so."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main())
