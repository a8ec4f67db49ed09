"""TunerRun: the compiler's commands on models and records, run in the service for who manages its models.

The state folder is the service's alone; here an admin who is not its user tunes by hand, and reads and
extends the records, without touching the folder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from honed.daemon.aio import clearing_in_thread, in_thread
from honed.daemon.changes import compilation
from honed.daemon.changes.change import stage_again
from honed.daemon.changes.publish import Publisher
from honed.daemon.core.state import Registry
from honed.daemon.observe.faults import kernel_log
from honed.daemon.serving.pool import EngineManager
from honed.daemon.settings.schema import HINTS_MIB, RECORDS_COMMANDS, RECORDS_MIB, Limits
from honed.daemon.store.files import receive
from honed.daemon.store.store import Manifest, Store
from honed.daemon.transport.connection import WithDescriptors
from honed.jobs import events
from honed.jobs.commands import Export, Import, Job, ListFaults, ShowHistory, Tasks, Tune
from honed.jobs.events import Done, Exported, Faults, Imported, News, R, Totals, Tuned
from honed.process.aio import Child
from honed.process.children import JobCrashed, ResourceLimits
from honed.protocol import strict
from honed.protocol.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    ModelRefused,
    NotFound,
    ResourceExhausted,
)
from honed.protocol.params import MEASURING, HintsImportParams, PublishParams, TunerRunParams
from honed.protocol.results import ModelPublished
from honed.protocol.service import HintsExported, HintsImported, TunerMeasured, TunerRan
from honed.protocol.strict import Map

from .process import TunerChild

_TAKES = {  # Besides `command`
    "tasks": {"model"},
    "tune": {"model", "trials", "seconds"},
    "history": {"model"},
    "faults": set[str](),
    "export": {"best"},
    "import": {"device"},
}
_NICENESS = 10
_LINES = "records.jsonl"  # Name of the file in a staging folder
Notify = Callable[[Map], None]


@dataclass(slots=True)
class _Measuring:
    """A measuring child, which may be stopped before it has started."""

    process: Child | None = None
    stopped: bool = False

    def begin(self, process: Child) -> None:
        self.process = process
        if self.stopped:
            self.stop()

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)


@dataclass(slots=True, kw_only=True, eq=False)
class TunerRuns:
    """A runner of `python -m honed.tuner` for clients: measuring commands, and a few on the records.

    `tuner_mib` is the memory of each process of a search, 0 for no limit; `hints` returns how many trials of
    a task the records of a hub may cost in a day.
    """

    limits: Limits
    store: Store
    registry: Registry
    engines: EngineManager
    publisher: Publisher
    tuner: TunerChild
    records: Path
    cache_dir: Path
    tuner_mib: int
    hints: Callable[[], int]
    _measuring: dict[str, _Measuring] = field(init=False, default_factory=dict)  # Measuring children by model
    _others: int = field(init=False, default=0)

    async def run(
        self, params: TunerRunParams, descriptors: Sequence[int], notify: Notify
    ) -> TunerRan | WithDescriptors[TunerRan]:
        """Run a tuner's command in a child process and return the result of TunerRun.

        Cancellation ends the child.
        """
        _check(params, descriptors)
        if params.command in MEASURING:
            return await self._measure(params, notify)
        with self._one_more():
            return await self._on_records(params, descriptors, notify)

    async def export_hints(self, *, spread: bool) -> WithDescriptors[HintsExported]:
        """Return the result of HintsExport: records measured here that others can use or learn from."""
        with self._one_more():
            exported, opened = await self._export(own=not spread, spread=spread)
            return WithDescriptors(HintsExported(count=exported.count), (opened,))

    async def import_hints(self, params: HintsImportParams, descriptors: Sequence[int]) -> HintsImported:
        """Import hints and return the result of HintsImport; none of them counts as measured here."""
        if len(descriptors) != 1:
            raise InvalidArgument(f"{len(descriptors)} descriptors came with the hints; send one, of a file")
        with self._one_more():
            async with clearing_in_thread(self.store.staging()) as folder:
                done = await self._import(folder, descriptors[0], params.device, hints=True)
                return strict.copy_fields(HintsImported, done)

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        """Count a command on the records while it runs; raise ResourceExhausted if too many run."""
        if self._others >= RECORDS_COMMANDS:
            raise ResourceExhausted(f"{self._others} commands work on the records already; wait for one")
        self._others += 1
        try:
            yield
        finally:
            self._others -= 1

    def stop(self, model: str) -> None:
        """End the search for a model; raise NotFound if there is none."""
        if model not in self._measuring:
            raise NotFound(f"{model[:80]!r} is not being tuned by hand; 'hone status' shows what is done")
        self._measuring[model].stop()

    async def _measure(self, params: TunerRunParams, notify: Notify) -> TunerMeasured:
        entry, _ = self.registry.require_compiled(params.model or "")
        self.engines.check_at_home(entry)
        if not entry.manifest.sources:
            raise ModelRefused(
                f"{entry.name} was added compiled, so there is no source to tune; "
                f"add it as ONNX: 'hone add FILE.onnx --name {entry.name} --replace'"
            )
        for name in self._measuring:
            raise AlreadyExists(f"{name} is being tuned by hand right now; wait for that to end")
        begun = entry.manifest
        run = self._measuring[entry.name] = _Measuring()
        try:
            async with clearing_in_thread(self.store.staging()) as folder:
                most = self.limits.max_model_bytes
                staged = await in_thread(stage_again, self.store, entry.manifest, folder, most)
                tasks = Tasks(
                    file=staged.model_file,
                    name=entry.name,
                    shapes=staged.shapes,
                    precision=staged.precision,
                    device=self.engines.device_of(entry).engine.spec or None,
                    current=self.store.form(entry.manifest, entry.key),
                    records=self.records,
                    cache_dir=self.cache_dir,
                    hints=self.hints(),
                )
                if params.command == "tasks":
                    await self._child(tasks, notify, self.limits.compile_seconds, run=run)
                    return TunerMeasured(event=events.to_map(Done()))
                output = folder / "tuned.honed"
                tune = tasks.derive(Tune, "seed", output=output, trials=params.trials, seconds=params.seconds)
                tuned = await self._child(tune, notify, None, run=run)
                published = await self._publish(entry.name, begun, tuned, output)
                return TunerMeasured(event=events.to_map(tuned), published=published)
        finally:
            del self._measuring[entry.name]

    async def _publish(self, name: str, begun: Manifest, tuned: Tuned, output: Path) -> ModelPublished | None:
        """Serve the tuned version if the serving worker finds it right and faster, too.

        It must be faster than the present version: an idle tuner may have published another since `begun`.
        """
        if tuned.output is None:
            return None
        now = self.registry.require_compiled(name)[0].manifest
        served = (now if now.added == begun.added else begun).key
        descriptor = os.open(output, os.O_RDONLY | os.O_CLOEXEC)
        try:
            why = f"hone tune: {tuned.trials} trials in {tuned.seconds:.0f} s"
            return await self.publisher.publish(
                PublishParams(name=name, expected=served, why=why), [descriptor]
            )
        finally:
            os.close(descriptor)

    async def _on_records(
        self, params: TunerRunParams, descriptors: Sequence[int], notify: Notify
    ) -> TunerRan | WithDescriptors[TunerRan]:
        records = self.records
        if params.command == "export":
            exported, opened = await self._export(notify, best=bool(params.best))
            return WithDescriptors(TunerRan(event=events.to_map(exported)), (opened,))
        async with clearing_in_thread(self.store.staging()) as folder:
            event: events.Result
            match params.command:
                case "history":
                    event = await self._child(ShowHistory(records=records, name=params.model or ""), notify)
                case "faults":
                    log = await in_thread(kernel_log)
                    faults = ListFaults(records=records)
                    event = await self._child(faults, notify) if records.exists() else Faults(faults=())
                    return TunerRan(event=events.to_map(event), kernel_log=log)
                case _:
                    event = await self._import(folder, descriptors[0], params.device, notify)
            return TunerRan(event=events.to_map(event))

    async def _export(
        self, notify: Notify = lambda _: None, *, best: bool = False, own: bool = False, spread: bool = False
    ) -> tuple[Exported, int]:
        """Write records to a file; return their number, and the descriptor, which the caller owns."""
        with ExitStack() as if_cancelled:
            async with clearing_in_thread(self.store.staging()) as folder:
                lines = folder / _LINES
                lines.touch()
                exported = Exported(output=str(lines), count=0)
                hints = own or spread  # Without records, hints are empty, but an export fails
                if self.records.exists() or not hints:
                    job = Export(records=self.records, output=lines, best=best, own=own, spread=spread)
                    exported = await self._child(job, notify)
                opened = os.open(lines, os.O_RDONLY | os.O_CLOEXEC)
                if_cancelled.callback(os.close, opened)
            if_cancelled.pop_all()  # Cancellation is impossible without a further await
            return exported, opened

    async def _import(
        self,
        folder: Path,
        descriptor: int,
        device: str | None,
        notify: Notify = lambda _: None,
        *,
        hints: bool = False,
    ) -> Imported:
        """Copy a client's file of records to the folder, import it, and return the result."""
        lines, most = folder / _LINES, HINTS_MIB << 20 if hints else self.limits.max_model_bytes
        await in_thread(receive, descriptor, lines.name, folder, most)
        device = device or self.engines.default.engine.spec or None
        return await self._child(Import(records=self.records, file=lines, device=device, hints=hints), notify)

    async def _child(
        self,
        job: Job[R],
        notify: Notify = lambda _: None,
        seconds: float | None = 600.0,
        *,
        run: _Measuring | None = None,
    ) -> R:
        """Run a job in a child process and return its result.

        Raises what it reports, ResourceExhausted where it takes too long, and Internal.
        """
        memory_mib = min(RECORDS_MIB, self.tuner_mib or RECORDS_MIB) if run is None else self.tuner_mib

        def forward(news: News) -> None:
            if isinstance(news, Totals):
                self.tuner.keep(news.tuning)
                return
            notify({"event": events.to_map(news)})

        try:
            return await compilation.do(
                job,
                forward,
                ResourceLimits(memory_mib=memory_mib, niceness=_NICENESS),
                seconds=seconds,
                started=run.begin if run is not None else lambda _: None,
            )
        except TimeoutError as error:
            raise ResourceExhausted(f"the compiler took longer than {seconds:g} s; try again") from error
        except JobCrashed as died:
            raise Internal(
                f"the compiler stopped without a result ({died}); the service's log says more"
            ) from died


def _check(params: TunerRunParams, descriptors: Sequence[int]) -> None:
    takes = _TAKES.get(params.command)
    if takes is None:
        known = ", ".join(_TAKES)
        raise InvalidArgument(f"there is no command {params.command[:80]!r}; use one of {known}")
    for name in ("model", "trials", "seconds", "best", "device"):
        if getattr(params, name) is not None and name not in takes:
            raise InvalidArgument(f"{params.command} takes no {name}; leave it out")
    if "model" in takes and not params.model:
        raise InvalidArgument(f"{params.command} wants a model; say which")
    if params.trials is not None and params.trials < 1:
        raise InvalidArgument(f"trials is {params.trials}; give at least 1")
    if params.seconds is not None and not 0 < params.seconds < float("inf"):
        raise InvalidArgument(f"seconds is {params.seconds}; give more than 0")
    wanted = 1 if params.command == "import" else 0
    if len(descriptors) != wanted:
        raise InvalidArgument(f"{len(descriptors)} descriptors came with {params.command}; send {wanted}")
