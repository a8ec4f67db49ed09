"""Command metrics: every figure of the service, for collectors."""

from __future__ import annotations

import argparse
import sys

from honed.protocol.methods import METRICS
from honed.runtime.client import Client
from honed.tool.output import Output, print_json
from honed.tool.parser import Parser, define


def define_metrics(metrics: Parser) -> None:
    """What `hone metrics` takes."""
    define(
        metrics,
        _metrics,
        details="docs/metrics.md says what each means. With --json it is one document with more detail.",
        examples="hone metrics\nhone metrics --json",
    )


def _metrics(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        if output.json:
            print_json(client.ask(METRICS))
        else:
            sys.stdout.write(client.openmetrics())
