"""TunerRun: the compiler's commands on models and records, run in the service for who manages its models.

The state folder is the service's alone; here an admin who is not its user tunes by hand, and reads and
extends the records, without touching the folder.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    ModelRefused,
    NotFound,
    ResourceExhausted,
)
from honed.runtime.protocol import PublishParams, TunerRunParams, error_from_map

from . import tunerprocess
from .blocking import cleared_in_thread, in_thread
from .children import Child, describe_exit
from .connection import WithDescriptors
from .fleet import Fleet
from .jobs import Jobs
from .kernelfaults import kernel_log
from .limits import RECORDS_COMMANDS, RECORDS_MIB, Limits
from .models import Registry
from .publishing import Publisher
from .store import Store, receive

MEASURING = ("tasks", "tune")
RECORDS = ("history", "faults", "export", "import")
_TAKES = {  # besides `command`
    "tasks": {"model"},
    "tune": {"model", "trials", "seconds"},
    "history": {"model"},
    "faults": set[str](),
    "export": {"best"},
    "import": {"device"},
}
_NEWS = frozenset({"stage", "note", "tasks", "round", "trial"})  # events that are not a child's last word
_log = logging.getLogger(__name__)
Event = dict[str, Any]
Notify = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class _Measuring:
    """A child that measures. It may be told to stop before it was started."""

    process: Child | None = None
    stopped: bool = False

    def begin(self, process: Child) -> None:
        self.process = process
        if self.stopped:
            self.stop()

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)


class TunerRuns:
    """Runs `python -m honed.tuner` for clients: one that measures at a time, and a few on the records."""

    def __init__(
        self,
        *,
        limits: Limits,
        store: Store,
        registry: Registry,
        fleet: Fleet,
        jobs: Jobs,
        publisher: Publisher,
        records: Path,
        cache_dir: Path,
        tuner_mib: int,
    ) -> None:
        """`tuner_mib` is the memory of each process of a search, 0 for no limit."""
        self._limits = limits
        self._tuner_mib = tuner_mib
        self._store = store
        self._registry = registry
        self._fleet = fleet
        self._jobs = jobs
        self._publisher = publisher
        self._records = records
        self._cache_dir = cache_dir
        self._measuring: dict[str, _Measuring] = {}  # by model; at most one
        self._others = 0

    async def run(
        self, params: TunerRunParams, descriptors: Sequence[int], notify: Notify
    ) -> dict[str, Any] | WithDescriptors:
        """The result of TunerRun. Cancelling ends the child."""
        _check(params, descriptors)
        if params.command in MEASURING:
            return await self._measure(params, notify)
        if self._others >= RECORDS_COMMANDS:
            raise ResourceExhausted(f"{self._others} commands work on the records already; wait for one")
        self._others += 1
        try:
            return await self._on_records(params, descriptors, notify)
        finally:
            self._others -= 1

    def stop(self, model: str) -> None:
        """Have the search for a model end; raises NotFound where none is under way."""
        if model not in self._measuring:
            raise NotFound(f"{model[:80]!r} is not being tuned by hand; 'hone status' shows what is done")
        self._measuring[model].stop()

    async def _measure(self, params: TunerRunParams, notify: Notify) -> dict[str, Any]:
        entry, _ = self._registry.compiled(params.model or "")
        self._fleet.check_at_home(entry)
        if not entry.manifest.sources:
            raise ModelRefused(
                f"{entry.name} was added compiled, so there is no source to tune; "
                f"add it as ONNX: 'hone add FILE.onnx --name {entry.name} --replace'"
            )
        for name in self._measuring:
            raise AlreadyExists(f"{name} is being tuned by hand right now; wait for that to end")
        run = self._measuring[entry.name] = _Measuring()
        try:
            async with cleared_in_thread(self._store.staging()) as folder:
                staged = await in_thread(self._jobs.stage_again, entry.manifest, folder)
                tuned = folder / "tuned.honed"
                current = self._store.object(entry.manifest.compiled)
                arguments = [params.command, f"--current={current}"]
                if params.command == "tune":
                    arguments += [f"--output={tuned}"]
                    arguments += [f"--trials={params.trials}"] if params.trials is not None else []
                    arguments += [f"--seconds={params.seconds:g}"] if params.seconds is not None else []
                arguments += [
                    f"--shape={name}={','.join(map(str, shape))}" for name, shape in staged.shapes.items()
                ]
                device = self._fleet.of(entry).supervisor.spec
                arguments += [f"--device={device}"] if device else []
                arguments += [
                    f"--precision={staged.precision}",
                    f"--records={self._records}",
                    f"--cache-dir={self._cache_dir}",
                    f"--name={entry.name}",
                    str(staged.given),
                ]
                seconds = self._limits.compile_seconds if params.command == "tasks" else None
                last = await self._child(arguments, notify, seconds, run=run)
                return {"event": last, "published": await self._published(entry.name, entry.key, last, tuned)}
        finally:
            del self._measuring[entry.name]

    async def _published(self, name: str, served: str, last: Event, tuned: Path) -> dict[str, Any] | None:
        """Serve the version that was tuned, if the serving worker finds it right and faster, too."""
        if not last.get("output"):
            return None
        descriptor = os.open(tuned, os.O_RDONLY | os.O_CLOEXEC)
        try:
            why = f"hone tune: {last.get('trials')} trials in {float(last.get('seconds') or 0):.0f} s"
            return await self._publisher.publish(
                PublishParams(name=name, expected=served, why=why), [descriptor]
            )
        finally:
            os.close(descriptor)

    async def _on_records(
        self, params: TunerRunParams, descriptors: Sequence[int], notify: Notify
    ) -> dict[str, Any] | WithDescriptors:
        arguments = ["records", params.command, f"--records={self._records}"]
        async with cleared_in_thread(self._store.staging()) as folder:
            written = folder / "records.jsonl"
            match params.command:
                case "history":
                    arguments.append(f"--name={params.model}")
                case "faults":
                    log = await in_thread(kernel_log)
                    none = {"event": "faults", "faults": []}
                    there = self._records.exists()
                    found = await self._child(arguments, notify) if there else none
                    return {"event": found, "kernel_log": log}
                case "export":
                    arguments += [f"--output={written}", *(("--best",) if params.best else ())]
                case "import":
                    limit = self._limits.max_model_bytes
                    await in_thread(receive, descriptors[0], written.name, folder, limit)
                    device = params.device or self._fleet.default.supervisor.spec
                    arguments += [*((f"--device={device}",) if device else ()), "--", str(written)]
            last = await self._child(arguments, notify)
            if params.command != "export":
                return {"event": last}
            return WithDescriptors({"event": last}, (os.open(written, os.O_RDONLY | os.O_CLOEXEC),))

    async def _child(
        self,
        arguments: Sequence[str],
        notify: Notify,
        seconds: float | None = 600.0,
        *,
        run: _Measuring | None = None,
    ) -> Event:
        """Its last word. Raises what it reports, ResourceExhausted where it takes too long, and Internal."""
        last: Event | None = None

        def heard(line: bytes) -> None:
            nonlocal last
            event = _event(line)
            if event is not None and event["event"] in _NEWS:
                notify({"event": event})
            elif event is not None:
                last = event

        try:
            status = await tunerprocess.run(
                arguments,
                heard,
                memory_mib=self._tuner_mib if run is not None else RECORDS_MIB,
                seconds=seconds,
                started=run.begin if run is not None else lambda _: None,
            )
        except TimeoutError as error:
            raise ResourceExhausted(f"the compiler took longer than {seconds:g} s; try again") from error
        if last is None:
            raise Internal(
                f"the compiler stopped without a result ({describe_exit(status)}); its log says more"
            )
        if last["event"] == "refused":
            raise ModelRefused(str(last.get("message")), tuple(map(str, last.get("reasons", ()))))
        if last["event"] == "error":
            raise error_from_map(last)
        if status != 0:
            raise Internal(
                f"the compiler failed after its work ({describe_exit(status)}); the service's log says more"
            )
        return last


def _event(line: bytes) -> Event | None:
    """What one line of a child says; None where it is no event."""
    try:
        event: Any = json.loads(line)
        event["event"]
    except (ValueError, TypeError, KeyError):
        _log.warning("the compiler wrote what is no event: %.200r", line)
        return None
    return dict(event)


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
