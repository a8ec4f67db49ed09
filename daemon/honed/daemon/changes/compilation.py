"""Has children of the service do jobs of the compiler, `python -m honed.tuner`, within limits."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.core.messages import LoadedProof
from honed.daemon.serving.engine_server import DeviceServer
from honed.daemon.serving.pool import Pool
from honed.daemon.settings import places
from honed.daemon.settings.schema import CHECKING_MIB, Limits
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.files import StoredFile, describe, receive
from honed.daemon.store.inspect import Inspector
from honed.daemon.store.store import Manifest, Store
from honed.daemon.worker.builder import Progress
from honed.daemon.worker.supervisor import WorkerDied
from honed.jobs.commands import Check, Compile, Died, Job, Listener
from honed.jobs.events import News, NoEvent, R, Stage
from honed.machine import profilefile
from honed.machine.aiochildren import Child, spawn
from honed.machine.children import Bounds, kill_group
from honed.machine.files import replacing
from honed.protocol import strict
from honed.protocol.errors import (
    DeviceError,
    HonedError,
    InvalidArgument,
    ModelRefused,
    ResourceExhausted,
    Unavailable,
)
from honed.protocol.params import LoadOptions, LoadParams
from honed.protocol.results import MetSizes, ModelAdded
from honed.protocol.service import JobStatus
from honed.protocol.strict import Map
from honed.runtime.compiled import modelfile

_log = logging.getLogger(__name__)


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
        raise ModelRefused(
            f"the compiler stopped without a result ({died}); it may have needed more than "
            f"the {job.memory_mib} MiB of compile_memory_mib, the service's log says more"
        ) from died


async def do(
    job: Job[R],
    heard: Callable[[News], None],
    bounds: Bounds,
    *,
    seconds: float | None,
    started: Callable[[Child], None] = lambda _: None,
) -> R:
    """The job's result, after what the child told meanwhile was passed on; cancelling ends the child.

    Raises what it reports, Died, Unavailable without a compiler, and TimeoutError after `seconds`.
    """
    if not places.compiler():
        raise Unavailable("the compiler is not installed; install honed-tuner (apt install honed-tuner)")
    listener = Listener(job)
    process = await spawn(job.program(), bounds, stdout=True)
    try:
        started(process)
        async with asyncio.timeout(seconds):
            await _listen(process, listener, heard)
            return listener.result(await process.wait())
    finally:
        await process.end()


async def _listen(process: Child, listener: Listener[R], heard: Callable[[News], None]) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a line longer than can be read
            kill_group(process.pid)
            return
        if not line:
            return
        try:
            news = listener.hear(line)
        except NoEvent as error:
            _log.warning("the compiler wrote what is no event: %s", error)
            continue
        if news is not None:
            heard(news)


# ---- Files of a model that is to be compiled: received from a client, or as they were stored ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Files in a staging folder, and how they are to be compiled. `device` is what the user asked for.

    `calibration` is a folder of inputs, None where there are none of the user's. `like` is a compiled form of
    the same model for other shapes, whose choice of precision is taken. Not `hurried`: the model is served.
    """

    folder: Path
    sources: tuple[tuple[StoredFile, Path], ...]  # empty where a compiled file was given
    given: Path  # the model file
    shapes: dict[str, tuple[int, ...]]
    precision: str
    device: str | None
    calibration: Path | None = None
    like: Path | None = None
    hurried: bool = True
    state: dict[str, str] = field(default_factory=dict)  # inputs by output, as the user named them
    owner: int | None = None  # as in the manifest
    sizes: tuple[MetSizes, ...] = ()  # of parts, to compile them for
    slower_too: bool = False  # parts are to run compiled for sizes whatever the CPU engine takes
    seconds: float | None = None  # that compiling may take, where that is less than for others


async def stage(
    params: LoadParams, descriptors: Sequence[int], options: LoadOptions, folder: Path, most: int
) -> Staged:
    """What a client sent, of `most` bytes in all.

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
    """The stored sources of a model, copied to `folder` under their names; blocking.

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
    return strict.like(Staged, manifest, folder=folder, sources=tuple(files), given=given, device=None)


def copies(staged: Staged) -> list[tuple[StoredFile, Path]]:
    """The sources once more, to be moved to the store; blocking."""
    copies = []
    for number, (file, path) in enumerate(staged.sources):
        copy = staged.folder / f"source-{number}"
        os.link(path, copy)
        copies.append((file, copy))
    return copies


def is_compiled(path: Path) -> bool:
    """Whether it is a compiled file, by how it begins."""
    with path.open("rb") as file:
        return file.read(len(modelfile.MAGIC)) == modelfile.MAGIC


# ---- From staged files to a compiled model that a device has loaded and answered right ----

# Shares of a whole addition, for the progress shown.
RECEIVED, _COMPILED, BUILT = 0.02, 0.8, 0.98
_ROUNDS = 7  # of runs, where devices are compared
_NICENESS = 15  # of compiling that nobody waits for
Notify = Callable[[Map], None]


@dataclass(slots=True, kw_only=True)
class AddProgress:
    """A model being added, as ServerStatus shows it."""

    name: str
    notify: Notify
    stage: str = ""
    fraction: float = 0.0
    text: str = ""
    owner: int | None = None  # of a user's own
    unserved: str = ""  # why the CPU engine, which was to serve it first, does not

    def report(self, stage: str, fraction: float, text: str = "") -> None:
        """Note and pass on how far it is."""
        self.stage, self.fraction, self.text = stage, fraction, text
        self.notify(strict.to_plain(self.status()))

    def status(self) -> JobStatus:
        """As ServerStatus shows it, and a Progress notification but for the request's number."""
        return JobStatus(model_name=self.name, stage=self.stage, fraction=self.fraction, text=self.text)


class AddRequest:
    """One addition, for whoever waits for it."""

    def __init__(self, *, name: str, notify: Notify) -> None:
        self.notify = notify
        self.served: asyncio.Future[ModelAdded] = asyncio.get_running_loop().create_future()
        self._name = name
        self._begun = time.monotonic()

    def report_to(self, progress: Map) -> None:
        """Pass on how far it is, while somebody listens."""
        self.notify(progress)

    def is_served(self, manifest: Manifest) -> None:
        """The CPU engine serves it."""
        if not self.served.done():
            self.served.set_result(self.told(manifest))

    def told(self, manifest: Manifest) -> ModelAdded:
        """The result while the CPU engine serves the model as it was given."""
        return ModelAdded(
            model_name=self._name,
            sha256=manifest.source_key,
            seconds=time.monotonic() - self._begun,
            notes=(),
            kernels=0,
            launches=0,
            engine="cpu",
            engine_why=manifest.why or "it is being compiled",
        )

    def added(self, model: Compiled, sha256: str, manifest: Manifest | None = None) -> ModelAdded:
        """The result with a compiled form."""
        return ModelAdded(
            model_name=self._name,
            sha256=sha256,
            seconds=time.monotonic() - self._begun,
            notes=tuple(model.source.notes),
            kernels=sum(kernel.launches > 0 for kernel in model.kernels),
            launches=model.launches,
            engine="cpu" if manifest is not None and manifest.chosen == "cpu" else model.engine,
            engine_why=manifest.why if manifest is not None else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A compiled model in the worker of `server`. `measured` tells the times where devices were compared."""

    server: DeviceServer
    path: Path
    file: StoredFile
    model: Compiled
    proof: LoadedProof
    measured: str = ""


@dataclass(frozen=True, slots=True)
class _Steps:
    """A job whose present part is one of `count` equal ones."""

    job: AddProgress
    index: int
    count: int

    def report(self, stage: str, fraction: float, text: str = "") -> None:
        """`fraction` is of the part; the first part begins where everything has been received."""
        done = (self.index + (fraction - RECEIVED) / (1 - RECEIVED)) / self.count
        self.job.report(stage, RECEIVED + (1 - RECEIVED) * done, text)


class ModelBuilder:
    """Builds models, one compilation at a time."""

    def __init__(self, limits: Limits, pool: Pool, inspector: Inspector, records: Path) -> None:
        """`records` is what tuning has recorded, if there is any yet."""
        self._limits = limits
        self._pool = pool
        self._inspector = inspector
        self._records = records
        self._compiling = asyncio.Lock()
        self._checking = asyncio.Lock()

    async def build(
        self, job: AddProgress, staged: Staged, servers: Sequence[DeviceServer], held: AsyncExitStack
    ) -> Built:
        """On the one device, or on the fastest of several; `held` keeps it in the worker.

        Raises ModelRefused where it cannot be compiled or is not right, Unavailable where a worker does not
        start. Of several devices those that cannot take the model are left out, unless none can.
        """
        if len(servers) == 1:
            return await self._build(_Steps(job, 0, 1), staged, servers[0], held)
        best: tuple[float, Built] | None = None
        told: list[str] = []
        failures: list[HonedError] = []
        for index, server in enumerate(servers):
            steps = _Steps(job, index, len(servers))
            try:
                made = await self._build(steps, staged, server, held)
                us = await server.loader.median_us(made.file.sha256, _ROUNDS)
            except (ModelRefused, Unavailable) as error:
                failures.append(error)
                told.append(f"not on {server.shown}: {error}")
                _log.info("model %s is not placed on %s: %s", job.name, server.shown, error)
                continue
            told.append(f"{us / 1000:.3g} ms on {server.shown}")
            if best is None or us < best[0]:
                best = us, made
        if best is None:
            raise failures[0]
        return replace(best[1], measured=f"measured when it was added: {', '.join(told)}")

    async def _build(
        self, steps: _Steps, staged: Staged, server: DeviceServer, held: AsyncExitStack
    ) -> Built:
        compiled = staged.given
        if staged.sources:
            compiled = staged.folder / f"compiled-{steps.index}.honed"
            await self._compile(steps, staged, compiled, server)
        model = await self._inspector.inspect(compiled)
        file = await in_thread(describe, compiled, f"{steps.job.name}.honed")
        steps.report("load", _COMPILED, "building kernels and checking the answers on the device")
        held.enter_context(self._pool.keeping(server, file.sha256))

        def built(done: int, of: int) -> None:
            fraction = _COMPILED + (BUILT - _COMPILED) * done / of
            steps.report("load", fraction, f"built {done} of {of} kernels")

        proof = await load(server, file.sha256, compiled, self._limits, built, hurried=staged.hurried)
        return Built(server=server, path=compiled, file=file, model=model, proof=proof)

    async def _compile(self, steps: _Steps, staged: Staged, output: Path, server: DeviceServer) -> None:
        def report(stage: Stage) -> None:
            steps.report(stage.stage, RECEIVED + (_COMPILED - RECEIVED) * stage.fraction, stage.text)

        if self._compiling.locked() and staged.hurried:
            # What will be refused need not wait for others to be compiled.
            async with self._checking:
                job = await self._compilation(staged, output, server)
                check = job.derived(Check, memory_mib=min(CHECKING_MIB, job.memory_mib))
                await compile_model(check, self._limits.compile_seconds, lambda _: None)
            steps.report("check", RECEIVED, "waiting for another compilation")
        async with self._compiling:
            job = await self._compilation(staged, output, server)
            niceness = 0 if staged.hurried else _NICENESS
            seconds = self._limits.compile_seconds
            if staged.seconds is not None:
                seconds = min(seconds, staged.seconds)
            await compile_model(job, seconds, report, niceness=niceness)

    async def _compilation(self, staged: Staged, output: Path, server: DeviceServer) -> Compile:
        await server.supervisor.wait_ready(self._limits.load_seconds)
        profile = server.supervisor.profile
        assert profile is not None
        with replacing(output.with_suffix(".toml")) as file:
            file.write(profilefile.dumps(profile).encode())
        return strict.like(
            Compile,
            staged,
            file=staged.given,
            output=output,
            name=staged.sources[0][0].name,
            profile=output.with_suffix(".toml"),
            device=server.supervisor.spec,
            memory_mib=self._limits.compile_memory_mib,
            records=self._records if self._records.exists() else None,
        )


async def load(
    server: DeviceServer,
    key: str,
    path: Path,
    limits: Limits,
    progress: Progress = lambda _, __: None,
    *,
    hurried: bool = True,
) -> LoadedProof:
    """Load and check in the device's worker; a model of which two workers die is refused."""
    for last in (False, True):
        await server.supervisor.wait_ready(limits.load_seconds)
        try:
            return await server.loader.load(key, str(path), hurried=hurried, progress=progress)
        except DeviceError as error:
            raise ModelRefused("this device cannot run the model", (str(error),)) from error
        except WorkerDied as error:
            if last:
                raise ModelRefused(
                    "the device's driver failed twice while it loaded the model; try another precision, "
                    "or update the driver",
                    (str(error),),
                ) from error
    raise AssertionError("the loop above returns or raises")
