"""Runs the jobs of a farm: its scheduler, a board, and the making of certificates."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from honed.jobs import events
from honed.jobs.commands import Job, Work
from honed.jobs.events import Done, R
from honed.protocol.errors import NotFound

Emit = Callable[[events.News], None]
_MISSING = "{} is not installed; install honed-farm (apt install honed-farm, or pip install 'honed[farm]')"


@dataclass(frozen=True, slots=True, kw_only=True)
class InFarm(Job[R]):
    """A job in the farm whose scheduler is at `url`, with the certificate in `certificates`."""

    positional = "url"
    url: str
    certificates: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmScheduler(InFarm[Done]):
    """The job of the scheduler, which listens at `url`."""

    command = ("farm", "scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmWorker(InFarm[Done]):
    """The job of a board that measures on `device`, a spec, under the lease of the service at `socket`.

    With `alone` there is no service on this machine. With `bench` it predicts times, as `Search` says.
    """

    command = ("farm", "worker")
    device: str | None = None
    socket: str | None = None
    alone: bool = False
    bench: str | None = None
    bench_root: Path | None = None
    cache_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmCertificates(Job[Done]):
    """The job that makes a folder in `folder` with a certificate for each of `names`, separated by commas."""

    command = ("farm", "certificates")
    positional = "folder"
    folder: Path
    names: str


def scheduler(job: FarmScheduler, emit: Emit) -> Done:
    """Run the scheduler until SIGINT or SIGTERM."""
    _need()
    from .scheduler import run

    run(job.url, job.certificates, lambda text: emit(events.Note(text=text)))
    return Done()


def worker(job: FarmWorker, emit: Emit) -> Done:
    """Run a board, or the bench of one, until SIGINT or SIGTERM."""
    _need()
    from honed.tuner.measure.measurer import kernel_log
    from honed.valhall.compiler import ROOT, OfflineCompiler

    from .board import BenchBoard, FarmBoard, LeasedGate, MeasuringBoard, serve
    from .scheduler import check_address, security

    security(check_address(job.url), job.certificates)  # Fail before the device is measured

    def tell(text: str) -> None:
        emit(events.Note(text=text))

    board: FarmBoard
    if job.bench is not None:
        threads = len(os.sched_getaffinity(0))
        board = BenchBoard(job.bench, OfflineCompiler(job.bench_root or ROOT, threads), threads)
    else:
        gate = None if job.alone else LeasedGate(job.socket)
        board = MeasuringBoard(job.device, job.cache_dir, gate, lambda: kernel_log(tell))
    serve(job.url, job.certificates, board, tell)
    return Done()


def certificates(job: FarmCertificates, emit: Emit) -> Done:
    """Make a certificate for each name; raise NotFound without the package cryptography."""
    _need()
    try:
        from .certificates import issue
    except ModuleNotFoundError as error:
        raise NotFound(_MISSING.format("cryptography")) from error

    for folder in issue(job.folder, job.names.split(",")):
        emit(events.Note(text=f"{folder} is made; copy it to that machine, as /etc/honed/farm"))
    return Done()


def _need() -> None:
    try:
        import distributed  # noqa: F401
    except ModuleNotFoundError as error:
        raise NotFound(_MISSING.format("Dask's distributed")) from error


JOBS: Final[Mapping[type[Job[Any]], Work]] = {
    FarmScheduler: scheduler,
    FarmWorker: worker,
    FarmCertificates: certificates,
}
