"""Small models that run in the app's own process: the service lends them (docs/protocol.md, ModelBorrow).

A loan has a page of memory that both sides see. In it the service says that it wants the model back, which
costs a run no system call, and the app counts its runs, which the service reads from time to time. Whatever
is unusual is left to the service: then `Loan.run` returns None, and the request goes by the socket.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from honed import standin
from honed.protocol import methods
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import HonedError
from honed.protocol.params import BorrowParams
from honed.protocol.results import NANOSECONDS, PAGE_BYTES, RECALLED, RETURNED, RUNS, ModelBorrowed
from honed.protocol.wire import close_all
from honed.runtime.dtypes import NARROW, STRING, from_onnx
from honed.runtime.encodings import MAP_KEYS
from honed.runtime.engines import session_options

from .steps import Ask, Reply, Steps

DEVICE: Final = "ONNX Runtime in the app"
ASKED_AFTER: Final = 20  # requests that the CPU engine has answered; twice as many each further time
_MOST_REQUESTS = 5_000  # between two times
_MODELS = 256  # of which requests are counted
_LOOK_NS = 50_000_000  # between two looks whether the service lives; it needs longer to start
_SLOW = 20  # runs beyond the bound, more than within it, after which the model is given back
_BORROW_SECONDS = 5.0
_log = logging.getLogger(__name__)
_loans: weakref.WeakSet[Loan] = weakref.WeakSet()
_barred = False  # this process was forked from one with sessions, whose threads it does not have


class Loan:
    """A model that runs here, until either side ends that. Threads may share it.

    `maps`: some of its outputs are lists of maps, as ONNX Runtime returns them. `failed`: a run has failed.
    """

    def __init__(self, session: Any, terms: ModelBorrowed, words: Any, alive: Callable[[], bool]) -> None:
        """Take over a session of ONNX Runtime; `alive` tells whether the service that lends it is there.

        Raises TypeError for a model with inputs or outputs of types that NumPy does not have.
        """
        self.threads = terms.threads
        self.outputs = [each.name for each in session.get_outputs()]
        self.failed = False
        self._inputs = [(each.name, _plain(each.type)) for each in session.get_inputs()]
        kinds = [each.type for each in session.get_outputs()]
        self.maps = any(kind in MAP_KEYS for kind in kinds)
        for kind in kinds:
            if kind not in MAP_KEYS:
                _plain(kind)
        # The object in C does without what ONNX Runtime checks in Python, which takes as long as a tiny run.
        self._session: Any = getattr(session, "_sess", session)
        self._bound_ns = terms.bound_us * 1000
        self._words = words
        self._alive = alive
        self._look = 0
        self._slow = 0
        self._counting = threading.Lock()
        _loans.add(self)

    @property
    def ended(self) -> bool:
        """Whether it has ended: it was given back or recalled, or the service has gone."""
        return self._session is None

    def end(self) -> None:
        """Give the model back; runs that are under way finish."""
        self._session = None
        self._words[RETURNED] = 1

    def run(self, names: Sequence[str], feed: Mapping[str, Any]) -> list[Any] | None:
        """Return the outputs of these names; None where the service is to answer.

        `feed` has an array for each input.
        """
        session, words = self._session, self._words
        if session is None or len(feed) != len(self._inputs) or type(feed) is not dict:
            return None
        begun = time.perf_counter_ns()
        if words[RECALLED] or (begun > self._look and not self._there(begun)):
            self.end()
            return None
        try:
            for name, kind in self._inputs:
                value = feed.get(name)
                if type(value) is not np.ndarray or value.dtype is not kind or not value.size:
                    return None
            found: list[Any] = session.run(names, feed, None)
        except Exception:  # noqa: BLE001 - the service says what is wrong
            self.failed = True
            return None
        ns = time.perf_counter_ns() - begun
        with self._counting:
            if words[RECALLED]:
                self.end()
                return None
            words[RUNS] += 1
            words[NANOSECONDS] += ns
            if ns > self._bound_ns:
                self._slow += 1
                if self._slow > _SLOW:
                    self.end()
            elif self._slow:
                self._slow -= 1
        return found

    def agrees(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> bool:
        """Return whether a run, which is not counted, gives bit by bit what the service has answered."""
        if not all(value.size for value in inputs.values()):
            return False
        names = list(self.outputs if self.maps else outputs)
        try:
            found = self._session.run(names, dict(inputs), None)
        except Exception:  # noqa: BLE001 - whatever it is, the service runs the model
            return False
        return self.maps or all(
            one.dtype == outputs[name].dtype
            and one.shape == outputs[name].shape
            and one.tobytes() == outputs[name].tobytes()
            for name, one in zip(names, found, strict=True)
        )

    def abandon(self) -> None:
        """Forget the session in a forked child, whose threads do not exist: ending it would wait for them."""
        if self._session is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))
            self._session = None
        self._words = array("Q", [1] * (NANOSECONDS + 1))
        self._counting = threading.Lock()

    def _there(self, now: int) -> bool:
        self._look = now + _LOOK_NS
        return self._alive()


@dataclass(slots=True)
class _Seen:
    """Requests for a model that the CPU engine has answered, of which `latest` took so many microseconds.

    After `needed` of them the service is asked for the model.
    """

    needed: int = ASKED_AFTER
    count: int = 0
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=ASKED_AFTER))

    def due(self, us: int) -> bool:
        """Count a request, and return whether the service is to be asked now."""
        self.count += 1
        self.latest.append(us)
        if self.count < self.needed:
            return False
        self.count, self.needed = 0, min(2 * self.needed, _MOST_REQUESTS)
        return True


class InApp:
    """The loans of one client, by model."""

    def __init__(self) -> None:
        self.loans: dict[str, Loan] = {}
        self._seen: dict[str, _Seen] = {}
        self._most: dict[str, int] = {}  # threads of one, where the app has said that

    def loan(self, model: str, threads: int) -> Loan | None:
        """Return the loan of a model, if there is one that takes no more than so many threads, 0: any number.

        A later loan takes no more.
        """
        if threads:
            self._most[model] = min(threads, self._most.get(model, threads))
        found = self.loans.get(model)
        return None if found is not None and 0 < threads < found.threads else found

    def end(self) -> None:
        """Give everything back."""
        while self.loans:
            self.loans.popitem()[1].end()

    def noted(
        self,
        model: str,
        us: int,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        link: Callable[[], Any],
    ) -> Steps[None]:
        """Note that the CPU engine answered a request within `us` microseconds; borrow the model in time.

        `link` returns the connection that there is.
        """
        loan = self.loans.get(model)
        if loan is not None:
            if loan.failed:  # here, and not in the service
                loan.end()
            if not loan.ended:
                return
            self.loans.pop(model, None)
        if model not in self._seen and len(self._seen) >= _MODELS:
            del self._seen[next(iter(self._seen))]
        seen = self._seen.setdefault(model, _Seen())
        if not seen.due(us) or _barred or not standin.installed():
            return
        lender = link()
        asked = BorrowParams(name=model, run_us=sorted(seen.latest)[len(seen.latest) // 2])
        try:
            reply = yield Ask(methods.MODEL_BORROW, asked, _BORROW_SECONDS)
        except HonedError as error:
            _log.debug("%s is run by the service: %s", model, error)
            return
        loan = _taken(model, reply, lender, self._most.get(model))
        if loan is not None and lender is link() and loan.agrees(inputs, outputs):
            self.loans[model] = loan
            return
        seen.needed = _MOST_REQUESTS  # it will hardly be otherwise soon, and loading a model takes time
        if loan is not None:
            loan.end()


def _taken(model: str, reply: Reply, link: Any, threads: int | None) -> Loan | None:
    """Return the loan that a reply brings, on so many threads at most; None where it cannot be run here."""
    words = None
    try:
        terms = methods.MODEL_BORROW.result_of(reply.result)
        terms = replace(terms, threads=min(terms.threads, threads or terms.threads))
        page, file = reply.descriptors
        words = memoryview(mmap.mmap(page, PAGE_BYTES)).cast("Q")
        with os.fdopen(file, "rb", closefd=False) as stream:
            return Loan(_session(stream.read(), terms), terms, words, link.usable)
    except Exception as error:  # noqa: BLE001 - whatever it is, the service runs the model
        _log.debug("%s is run by the service: %s", model, error)
        if words is not None:
            words[RETURNED] = 1
        return None
    finally:
        close_all(reply.descriptors)


def _session(data: bytes, terms: ModelBorrowed) -> Any:
    """Return a session of ONNX Runtime that runs a model as the CPU engine does; raise what is in the way."""
    found = standin.genuine()
    if found is None or found.__version__ != terms.runtime:
        raise ImportError(f"the service has verified the model with ONNX Runtime {terms.runtime}")
    arena = terms.arena is not False
    options = session_options(found, terms.threads, terms.level, spinning=terms.spinning, arena=arena)
    if terms.threads > 1:
        allowed = os.sched_getaffinity(0)
        if len(allowed) < terms.threads or not allowed.issuperset(terms.processors):
            raise OSError("this process may not use the processors that the model runs on")
        if terms.processors:
            # Of every thread but the one that calls; ONNX Runtime counts processors from 1.
            where = ",".join(str(number + 1) for number in terms.processors)
            places = ";".join([where] * (terms.threads - 1))
            options.add_session_config_entry("session.intra_op_thread_affinities", places)
    return found.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _plain(kind: str) -> np.dtype[Any]:
    """Return the NumPy type of a tensor, as ONNX Runtime calls it; raise TypeError where it has none."""
    found = from_onnx(kind)
    if found is None or found is STRING or found in NARROW:
        raise TypeError(f"{kind} is not run in apps")
    return found.numpy


def _forked() -> None:
    """Have a forked child use the service, and end without what ONNX Runtime does at the end of a process.

    That waits for threads which only the parent has, as soon as ONNX Runtime was imported there.
    """
    global _barred
    for loan in list(_loans):
        loan.abandon()
    if standin.loaded() and not _barred:
        _barred = True
        libc = ctypes.CDLL(None)
        with suppress(AttributeError):  # it is glibc's
            libc.on_exit(libc._exit, None)  # called first, with the status, as it is registered last


os.register_at_fork(after_in_child=_forked)
