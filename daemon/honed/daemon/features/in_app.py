"""Small models that apps run in their own process: lent, counted, and called back.

What a request costs beside its run is more than the run of a small model. An app whose user may have the
model's file gets that, and the settings by which the CPU engine runs it. A page of memory that the service
shares with the app says whether the loan holds, so that the app sees the end of a loan before anyone is told
that the model has changed; in it the app counts its runs, which the service reads from time to time.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any

from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.state import Registry
from honed.daemon.feature import ApiCall, Feature, Handler
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving.pool import Pool
from honed.daemon.settings.schema import CpuSettings
from honed.daemon.store.names import is_own
from honed.daemon.store.store import Store
from honed.daemon.transport.connection import Connection, WithDescriptors
from honed.machine.processors import ThreadPlacement
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import ResourceExhausted, Unavailable
from honed.protocol.methods import MODEL_BORROW
from honed.protocol.params import BorrowParams
from honed.protocol.results import (
    NANOSECONDS,
    PAGE_BYTES,
    RECALLED,
    RETURNED,
    RUNS,
    ModelBorrowed,
    ModelSettings,
    SessionAsked,
)

MOST_LOANS, MOST_OF_USER = 512, 64  # at a time; each is a descriptor and a page
COUNT_SECONDS = 1.0  # between two looks at what apps have run
# In microseconds. A second thread makes no shorter run faster: until settings were compared, those have one.
# An app whose runs grow to more than twice as long asks again.
_SMALL_US = 400
_MOST_PER_SECOND = 1_000_000  # runs of a loan that are believed
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Loan:
    """A model that an app has, as it was when it was lent.

    `words` are those of the page. `runs` and `ns` were counted until `counted` (of time.monotonic).
    """

    connection: Connection
    entry: ServedModel
    asked: SessionAsked
    settings: ModelSettings
    words: memoryview
    counted: float
    runs: int = 0
    ns: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class InApp(Feature):
    """The loans of one service. `used` is called with a user's own model that was run.

    Models run on the threads of `placed` until better ones are found.
    """

    settings: Callable[[], CpuSettings]
    registry: Registry
    pool: Pool
    store: Store
    ledger: UsageLog
    leasing: Leasing
    used: Callable[[str], None]
    placed: ThreadPlacement
    _loans: list[_Loan] = field(init=False, default_factory=list)
    _ended: list[_Loan] = field(init=False, default_factory=list)  # whose last runs are counted next
    _watched: set[int] = field(init=False, default_factory=set)  # numbers of connections that had loans

    def methods(self) -> Mapping[str, Handler[Any, Any]]:
        """Answer ModelBorrow."""
        return {MODEL_BORROW.name: self._borrow}

    async def _borrow(self, call: ApiCall, params: BorrowParams) -> WithDescriptors[ModelBorrowed]:
        entry, connection = self.registry.model(params.name), call.connection
        why = self._refusal(entry, params.run_us)
        if why:
            raise Unavailable(f"model {entry.name!r} runs in the service: {why}")
        mine = [each for each in self._loans if each.connection.peer.uid == connection.peer.uid]
        if len(mine) >= MOST_OF_USER or len(self._loans) + len(self._ended) >= MOST_LOANS:
            raise ResourceExhausted("too many models run in apps already; it runs in the service")
        for each in mine:
            if each.connection is connection and each.entry is entry:
                self._recall(each, "it was lent again")
        terms = self._terms(entry, params.run_us)
        asked = self.registry.asked(entry.manifest.source_key)
        file = self.store.open_file(entry.manifest.sources[0], asked.half)
        try:
            page, words = _page()
        except OSError as error:
            os.close(file)
            raise ResourceExhausted(f"there is no memory to lend the model ({error.strerror})") from error
        loan = _Loan(
            connection=connection,
            entry=entry,
            asked=asked,
            settings=entry.manifest.settings,
            words=words,
            counted=time.monotonic(),
        )
        self._loans.append(loan)
        self.pool.watch = self._check
        if connection.closed:  # while its request waited for its turn in the loop
            self._gone(connection)
        elif connection.number not in self._watched:
            self._watched.add(connection.number)
            connection.when_closed(partial(self._gone, connection))
        _log.info("model %s runs in process %d of user %d", entry.name, *_peer(connection))
        return WithDescriptors(terms, (page, file))

    def _refusal(self, entry: ServedModel, run_us: int) -> str:
        """Return why a model is not lent, or ""."""
        bound_ms, manifest = self.settings().in_app_ms, entry.manifest
        if not bound_ms:
            return "in_app_ms of [cpu] is 0"
        if not entry.on_cpu or entry.state is not State.READY:
            return "the CPU engine does not serve it"
        if run_us > bound_ms * 1000:
            return f"a run takes {run_us} us, more than {bound_ms:g} ms, which is in_app_ms of [cpu]"
        if len(manifest.sources) != 1:
            return "it has external data"
        if manifest.settings.max_batch > 1:
            return "its requests are run together"
        if entry.blame.times:
            return "it has ended the CPU engine"
        if self._runtime(entry) is None:
            return "the CPU engine has not started yet"
        return ""

    def _runtime(self, entry: ServedModel) -> str | None:
        """Return the version of ONNX Runtime in the CPU engine; None until its process says it."""
        server = self.pool.cpu_for(entry.manifest.owner)
        identity = server.identity if server is not None else None
        return identity.driver_version if identity is not None else None

    def _terms(self, entry: ServedModel, run_us: int) -> ModelBorrowed:
        level, threads, spinning, arena, _ = self.registry.asked(entry.manifest.source_key)
        settings, first = self.settings(), self.placed.threads or 1
        bound_us, checked = round(settings.in_app_ms * 1000), entry.manifest.optimisation
        if not threads or settings.threads:
            threads = first
        compared = checked is not None and checked.session is not None
        if run_us <= _SMALL_US and not settings.threads and not compared:
            threads, bound_us = 1, min(bound_us, 2 * _SMALL_US)
        return ModelBorrowed(
            runtime=self._runtime(entry) or "",
            level=level,
            threads=threads,
            spinning=spinning,
            processors=self.placed.processors if threads <= first else (),
            bound_us=bound_us,
            arena=None if arena else False,
        )

    def _check(self) -> None:
        """Recall what is not served any more as it was lent."""
        off = not self.settings().in_app_ms
        for loan in list(self._loans):
            manifest = loan.entry.manifest
            if off:
                self._recall(loan, "in_app_ms of [cpu] is 0")
            elif not self.registry.serves(loan.entry):
                self._recall(loan, "it was replaced or removed")
            elif not loan.entry.on_cpu:
                self._recall(loan, "another engine serves it")
            elif (manifest.settings, self.registry.asked(manifest.source_key)) != (loan.settings, loan.asked):
                self._recall(loan, "its settings have changed")

    def _recall(self, loan: _Loan, why: str) -> None:
        """End a loan, unless it has ended: runs of the app that end from now on do not count as answers."""
        if loan not in self._loans:
            return
        loan.words[RECALLED] = 1
        self._loans.remove(loan)
        self._ended.append(loan)
        if not self._loans:
            self.pool.watch = None
        _log.info(
            "model %s is back from process %d of user %d: %s", loan.entry.name, *_peer(loan.connection), why
        )

    def _gone(self, connection: Connection) -> None:
        self._watched.discard(connection.number)
        for loan in [each for each in self._loans if each.connection is connection]:
            self._recall(loan, "the app has gone")

    async def run(self) -> None:
        """Count what apps have run."""
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            self._counted()

    def _counted(self) -> None:
        """Count all loans. Those that have ended are counted once more; then nothing holds their pages."""
        ended, self._ended = self._ended, []
        for loan in (*self._loans, *ended):
            self._count(loan)
            if loan.words[RETURNED]:
                self._recall(loan, "the app has given it back")

    def _count(self, loan: _Loan) -> None:
        """Count the runs since the last time, as far as these can be."""
        now, entry = time.monotonic(), loan.entry
        seconds, loan.counted = now - loan.counted, now
        runs, ns = loan.words[RUNS] - loan.runs, loan.words[NANOSECONDS] - loan.ns
        loan.runs, loan.ns = loan.runs + runs, loan.ns + ns
        runs = min(runs, round(seconds * _MOST_PER_SECOND))
        ns = max(0, min(ns, round(seconds * 1e9) * (os.cpu_count() or 1)))
        if runs <= 0:
            return
        entry.statistics.ran_in_app(runs, ns, now, time.time_ns() // 1_000_000)
        if self.registry.find(entry.name) is None:
            return
        self.ledger.ran(entry.name, ns / 1e9)
        if is_own(entry.name):
            self.used(entry.name)
        if self.leasing.came(entry.name, loan.connection.peer.pid):
            self.leasing.went(entry.name)

    def listed(self, entry: ServedModel) -> Mapping[str, object]:
        """Return how many processes run a model."""
        return {"in_apps": len({each.connection.peer.pid for each in self._loans if each.entry is entry})}

    shown = listed


def _page() -> tuple[int, memoryview]:
    """Return the page of a loan, as a descriptor for the app and as words.

    The app cannot make it smaller, which would end the service when it reads.
    """
    page = os.memfd_create("honed-loan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(page, PAGE_BYTES)
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return page, memoryview(mmap.mmap(page, PAGE_BYTES)).cast("Q")
    except BaseException:
        os.close(page)
        raise


def _peer(connection: Connection) -> tuple[int, int]:
    return connection.peer.pid, connection.peer.uid
