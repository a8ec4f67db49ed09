"""Has children of the service do jobs of the compiler, `python -m honed.tuner`, within limits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.core.messages import LoadedProof
from honed.daemon.core.model import is_cpu
from honed.daemon.serving.engine_server import DeviceServer
from honed.daemon.settings import places
from honed.daemon.settings.schema import Limits
from honed.daemon.store.files import StoredFile, receive
from honed.daemon.store.store import Manifest, Store
from honed.daemon.worker.builder import Progress
from honed.daemon.worker.supervisor import WorkerDied
from honed.jobs.commands import Job, Listener
from honed.jobs.events import News, NoEvent, R, Stage
from honed.process import aio
from honed.process.aio import Child
from honed.process.children import Bounds, Died
from honed.protocol import strict
from honed.protocol.errors import (
    DeviceError,
    InvalidArgument,
    ModelRefused,
    ResourceExhausted,
    Unavailable,
)
from honed.protocol.params import LoadOptions, LoadParams
from honed.protocol.results import ObservedSizes
from honed.runtime.compiled import modelfile

_log = logging.getLogger(__name__)


# The least that is needed, by the models of tests/models and LightGlue: compiling each took 330 MiB, and 7
# to 30 times its file beside that.
_COMPILER_MIB, _COMPILER_TIMES = 320, 4
_ENGINE_MIB = 80


def check_compiler_fits(nbytes: int, limits: Limits) -> None:
    """Raise ModelRefused for files of so many bytes that the compiler's memory cannot do for."""
    needs = _COMPILER_MIB + (_COMPILER_TIMES * nbytes >> 20)
    _check_fits("compiling it", needs, limits.compile_memory_mib, "limits.compile_memory_mib")


def check_engine_fits(nbytes: int, server: DeviceServer) -> None:
    """Raise ModelRefused for a model of so many bytes in memory that an engine's process cannot hold."""
    program, profile = server.supervisor.program, server.supervisor.profile
    if profile is not None and not profile.limits.host_unified:
        return  # a device with memory of its own
    _check_fits("loading it", _ENGINE_MIB + (nbytes >> 20), program.memory_mib, program.setting)


def _check_fits(doing: str, needs: int, most: int, setting: str) -> None:
    if most and needs > most:
        raise ModelRefused(
            f"{doing} takes at least {needs:,} MiB of memory, more than the {most:,} MiB of {setting}; "
            "use a smaller model, or raise that in the configuration where the machine has more"
        )


async def compile_model(
    job: Job[R], seconds: float, progress: Callable[[Stage], None], *, niceness: int = 0
) -> R:
    """Compile, or only check, within the job's memory too. Cancelling ends the child.

    Raises ModelRefused with every reason, MissingFiles, ResourceExhausted where a limit was reached,
    Unavailable without a compiler, or another error the compiler reports.
    """

    def heard(news: News) -> None:
        if isinstance(news, Stage):
            progress(news)

    try:
        bounds = Bounds(memory_mib=job.memory_mib, niceness=niceness)
        return await do(job, heard, bounds, seconds=seconds)
    except TimeoutError as error:
        raise ResourceExhausted(
            f"compiling took longer than {seconds:g} s; raise compile_seconds in the configuration, "
            "or use a smaller model"
        ) from error
    except Died as died:
        memory = f"it may have needed more than the {job.memory_mib} MiB of compile_memory_mib, "
        why = memory if died.death.out_of_memory else ""
        raise ModelRefused(
            f"the compiler stopped without a result ({died}); {why}the service's log says more"
        ) from died


async def do(
    job: Job[R],
    heard: Callable[[News], None],
    bounds: Bounds,
    *,
    seconds: float | None,
    started: Callable[[Child], None] = lambda _: None,
) -> R:
    """Run a job in a child process and return its result, after passing on the news that the child sent.

    Cancelling ends the child. Raises the error that the child reports, Died, Unavailable without a compiler,
    and TimeoutError after `seconds`.
    """
    if not places.compiler():
        raise Unavailable("the compiler is not installed; install honed-tuner (apt install honed-tuner)")
    listener = Listener(job)

    def hear(line: bytes) -> None:
        try:
            news = listener.hear(line)
        except NoEvent as error:
            _log.warning("the compiler wrote what is no event: %s", error)
            return
        if news is not None:
            heard(news)

    return listener.result(await aio.run(job.program(), hear, bounds, seconds=seconds, started=started))


# ---- Files of a model that is to be compiled: received from a client, or as they were stored ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Files in a staging folder, and how they are to be compiled. `device` is what the user asked for.

    `calibration` is a folder of inputs, None where there are none of the user's. `like` is a compiled form of
    the same model for other shapes, whose choice of precision is taken. Not `foreground`: nobody waits.
    """

    folder: Path
    sources: tuple[tuple[StoredFile, Path], ...]  # empty where a compiled file was given
    given: Path  # the model file
    shapes: dict[str, tuple[int, ...]]
    precision: str
    device: str | None
    calibration: Path | None = None
    like: Path | None = None
    foreground: bool = True
    state: dict[str, str] = field(default_factory=dict)  # inputs by output, as the user named them
    owner: int | None = None  # as in the manifest
    sizes: tuple[ObservedSizes, ...] = ()  # of parts, to compile them for
    slower_too: bool = False  # parts are to run compiled for sizes whatever the CPU engine takes
    seconds: float | None = None  # that compiling may take, where that is less than for others


async def stage(
    params: LoadParams, descriptors: Sequence[int], options: LoadOptions, folder: Path, most: int
) -> Staged:
    """Receive the files that a client sent, of at most `most` bytes in all.

    Raises InvalidArgument for options that a compiled file cannot have.
    """
    given, calibration = folder / "given", folder / "calibration"
    sources = len(params.files) - (options.calibration or 0)
    files = []
    for number, (name, descriptor) in enumerate(zip(params.files, descriptors, strict=True)):
        place = given if number < sources else calibration
        file, path = await in_thread(receive, descriptor, name, place, most)
        most -= file.nbytes
        files.append((file, path))
    compiled = await in_thread(is_compiled, files[0][1])
    if compiled and (len(files) > 1 or options.shapes or options.precision not in (None, "auto")):
        raise InvalidArgument(
            f"{params.files[0]} is compiled already; shapes, precision, calibration inputs and external "
            "data cannot be given"
        )
    return Staged(
        folder=folder,
        sources=() if compiled else tuple(files[:sources]),
        given=files[0][1],
        shapes=dict(options.shapes or {}),
        precision=options.precision or "auto",
        device=options.device or None,
        calibration=calibration if options.calibration else None,
        state=dict(options.state or {}),
    )


def stage_again(store: Store, manifest: Manifest, folder: Path, most: int) -> Staged:
    """Copy the stored sources of a model to `folder` under their names; blocking.

    Raises ModelRefused where they are damaged, or there are none.
    """
    files = []
    for file in manifest.sources:
        try:
            descriptor = store.open_file(file)
        except Unavailable as error:
            raise ModelRefused(str(error)) from error
        try:
            copied, path = receive(descriptor, file.name, folder / "given", most)
        finally:
            os.close(descriptor)
        if copied.sha256 != file.sha256:
            raise ModelRefused(f"the stored {file.name} is damaged too; add the model again")
        files.append((copied, path))
    if not files:
        raise ModelRefused("it was added compiled, so it cannot be compiled again; add it again")
    given = files[0][1]
    left_out = ("calibration", "like", "sizes", "slower_too", "seconds", "foreground")
    return strict.copy_fields(
        Staged, manifest, *left_out, folder=folder, sources=tuple(files), given=given, device=None
    )


def copies(staged: Staged) -> list[tuple[StoredFile, Path]]:
    """Return hard links to the sources, which can be moved to the store; blocking."""
    copies = []
    for number, (file, path) in enumerate(staged.sources):
        copy = staged.folder / f"source-{number}"
        os.link(path, copy)
        copies.append((file, copy))
    return copies


def is_compiled(path: Path) -> bool:
    """Return whether a file is a compiled file, by its first bytes."""
    with path.open("rb") as file:
        return file.read(len(modelfile.MAGIC)) == modelfile.MAGIC


_ENDED_DRIVER = (
    "the device's driver failed twice while it loaded the model; try another precision, or update the driver"
)
_ENDED_ONNX_RUNTIME = "the model ended ONNX Runtime's process twice while it was loaded; export it again"


async def load(
    server: DeviceServer,
    key: str,
    path: Path,
    limits: Limits,
    progress: Progress = lambda _, __: None,
    *,
    foreground: bool = True,
) -> LoadedProof:
    """Load and check in the device's worker; a model of which two workers die is refused."""
    for last in (False, True):
        await server.wait_ready(limits.load_seconds)
        try:
            return await server.loader.load(key, str(path), foreground=foreground, progress=progress)
        except DeviceError as error:
            raise ModelRefused("this device cannot run the model", (str(error),)) from error
        except WorkerDied as error:
            if last:
                cpu = is_cpu(server.name)
                raise ModelRefused(_ENDED_ONNX_RUNTIME if cpu else _ENDED_DRIVER, (str(error),)) from error
    raise AssertionError("the loop above returns or raises")
