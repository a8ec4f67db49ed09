"""The jobs of a farm: its meeting place, a board's part in it, certificates."""

from __future__ import annotations

import os
from collections.abc import Callable

from honed.jobs import commands, events
from honed.protocol.errors import NotFound
from honed.valhall.compiler import ROOT, OfflineCompiler

Emit = Callable[[events.News], None]
_MISSING = "{} is not installed; install honed-farm (apt install honed-farm, or pip install 'honed[farm]')"


def scheduler(job: commands.FarmScheduler, emit: Emit) -> events.Done:
    """Run the scheduler until told to stop."""
    _need()
    from .scheduler import run

    run(job.url, job.certificates, lambda text: emit(events.Note(text=text)))
    return events.Done()


def worker(job: commands.FarmWorker, emit: Emit) -> events.Done:
    """Be a board, or the bench of one, until told to stop."""
    _need()
    from honed.tuner.measure.measurer import kernel_log

    from .board import BenchBoard, FarmBoard, LeasedGate, MeasuringBoard, serve
    from .scheduler import checked, security

    security(checked(job.url), job.certificates)  # before the device is looked at

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
    return events.Done()


def certificates(job: commands.FarmCertificates, emit: Emit) -> events.Done:
    """Make a certificate for each name."""
    _need()
    try:
        from .certificates import issue
    except ModuleNotFoundError as error:
        raise NotFound(_MISSING.format("cryptography")) from error

    for folder in issue(job.folder, job.names.split(",")):
        emit(events.Note(text=f"{folder} is made; copy it to that machine, as /etc/honed/farm"))
    return events.Done()


def _need() -> None:
    try:
        import distributed  # noqa: F401
    except ModuleNotFoundError as error:
        raise NotFound(_MISSING.format("Dask's distributed")) from error
