"""Implements `hone farm`, which makes this machine a part of a farm, on whose boards others tune."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from honed.daemon.settings.places import places
from honed.daemon.settings.schema import Limits
from honed.jobs.commands import Job
from honed.jobs.events import Done
from honed.tool.commands.tuning import BENCHES, add_bench_root, add_certificates, certificates, stopping
from honed.tool.compiler import follow, running_job
from honed.tool.output import Output
from honed.tool.parser import Parser, UsageError, add_action, add_actions

from .jobs import FarmCertificates, FarmScheduler, FarmWorker

_LOCAL = "tcp://127.0.0.1:8786"


def define_farm(farm: Parser) -> None:
    """Define the arguments of `hone farm`."""
    actions = add_actions(farm)
    _add_worker(actions)
    _add_scheduler(actions)
    _add_certificates(actions)


def _add_worker(actions: Any) -> None:
    worker = add_action(
        actions,
        "worker",
        _worker,
        about="measure on this machine what a farm asks for",
        details=(
            "Candidates are measured on the device while the service here is idle, under its lease, as its "
            "own tuner does. Everybody with a certificate of the farm can run any code on this machine. "
            "Runs until it is stopped, and waits for a scheduler that went away."
        ),
        examples="hone farm worker tls://pc:8786\nhone farm worker tls://pc:8786 --bench mali-g610",
    )
    _add_url(worker)
    worker.add_argument(
        "--device", metavar="SPEC", help="OpenCL device to measure on (default: the best there is)"
    )
    worker.add_argument(
        "--alone", action="store_true", help="there is no service here: measure at any time, without a lease"
    )
    worker.add_argument(
        "--bench", metavar="DEVICE", choices=BENCHES, help="predict times for this device on all cores"
    )
    add_bench_root(worker)


def _add_scheduler(actions: Any) -> None:
    scheduler = add_action(
        actions,
        "scheduler",
        _scheduler,
        about="run the scheduler of a farm",
        details="Workers and 'hone tune --farm' connect to it. Runs until it is stopped.",
        examples="hone farm scheduler tls://pc:8786\nhone farm scheduler tcp://127.0.0.1:8786",
    )
    _add_url(scheduler)


def _add_url(parser: Parser) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=os.environ.get("HONED_FARM") or _LOCAL,
        help=f"tls://HOST:PORT of the scheduler; without TLS only on this machine (default: $HONED_FARM, "
        f"else {_LOCAL})",
    )
    add_certificates(parser)


def _add_certificates(actions: Any) -> None:
    certificates = add_action(
        actions,
        "certificates",
        _certificates,
        about="make the certificates of a farm",
        details=(
            "Makes a folder in DIR for each machine, to be copied there as /etc/honed/farm, and an authority "
            "that stays in DIR: call it again for further machines."
        ),
        examples="hone farm certificates farm pc board1 board2",
    )
    certificates.add_argument("folder", metavar="DIR", type=Path, help="where they are made")
    certificates.add_argument("names", metavar="NAME", nargs="+", help="a machine of the farm")


def _scheduler(arguments: argparse.Namespace, output: Output) -> None:
    _stay(FarmScheduler(url=arguments.url, certificates=certificates(arguments)), output)


def _worker(arguments: argparse.Namespace, output: Output) -> None:
    if arguments.bench is None and arguments.bench_root is not None:
        raise UsageError("--bench-root goes with --bench; see 'hone farm worker --help'")
    if arguments.bench is not None and (arguments.alone or arguments.device is not None):
        raise UsageError("--bench uses no device; leave --device and --alone out")
    job = FarmWorker(
        url=arguments.url,
        certificates=certificates(arguments),
        device=arguments.device or os.environ.get("HONED_DEVICE") or None,
        socket=arguments.socket,
        alone=arguments.alone,
        bench=arguments.bench,
        bench_root=arguments.bench_root,
        cache_dir=places(os.environ, os.geteuid()).cache_dir,
    )
    _stay(job, output)


def _certificates(arguments: argparse.Namespace, output: Output) -> None:
    for name in arguments.names:
        if "," in name:
            raise UsageError(f"{name!r} is no name of a machine; see 'hone farm certificates --help'")
    job = FarmCertificates(folder=arguments.folder, names=",".join(arguments.names))
    _stay(job, output)


def _stay(job: Job[Done], output: Output) -> None:
    """Run a job without a time limit, and show its notes; SIGINT and SIGTERM end it."""
    with running_job(job, Limits()) as child, stopping(child, lambda: None):
        follow(child, "farm")
    output.say({}, "Done.")
