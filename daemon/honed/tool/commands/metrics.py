"""Command metrics: every figure of the service, for collectors."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from honed.protocol.methods import METRICS
from honed.tool.output import Output, print_json
from honed.tool.parser import add_command


def register(commands: Any) -> None:
    """Add this command to the parser."""
    add_command(
        commands,
        "metrics",
        _metrics,
        about="print every figure the service has of itself, as OpenMetrics text",
        details="docs/metrics.md says what each means. With --json it is one document with more detail.",
        examples="hone metrics\nhone metrics --json",
    )


def _metrics(arguments: argparse.Namespace, output: Output) -> int:
    from honed.runtime.client import Client

    with Client(arguments.socket) as client:
        if output.json:
            print_json(client.ask(METRICS))
        else:
            sys.stdout.write(client.openmetrics())
    return 0
