"""Replaces `InferenceSession.run` on the class: runs go to honed if their route says so.

Nothing here raises in an app's call, and nothing waits for the service beyond a routed run's deadline.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument, ModelRefused, NotFound
from honed.protocol.methods import MODEL_FORM
from honed.protocol.params import FormParams, RunReport
from honed.runtime.calling.rpc import Reply, RpcRequest
from honed.runtime.client import Client, SocketLink
from honed.runtime.dtypes import DTYPES

from .policy import NOTHING, OWN, REPORT, Route, SwitchingCost

_MOST_KINDS = 64  # Kinds of runs of a session that have routes
_NEVER = 1 << 62
_LISTED_DATA = "session.model_external_initializers_file_folder_path"
_TYPES = {f"tensor({each.onnx})": np.dtype(each.name) for each in DTYPES}
_ALTERING = ("add_initializer", "add_external_initializers", "register_custom_ops_library")
_now = time.perf_counter_ns
Array = NDArray[Any]
Shape = tuple[int, ...]
Own = Callable[..., list[Any]]


def _say(line: str) -> None:
    print(f"honed: {line}", file=sys.stderr, flush=True)


def _allowance(said: str) -> float:
    try:
        return max(0.0, float(said))
    except ValueError:
        _say(f"HONED_ORT_ALLOWANCE is {said!r}; give a number such as 1.3")
        return 1.0


_LOG = os.environ.get("HONED_ORT_LOG", "0") not in ("", "0")
_HALF = os.environ.get("HONED_ORT_PRECISION") == "auto"
_ALLOWANCE = _allowance(os.environ.get("HONED_ORT_ALLOWANCE") or "1")
_altered: weakref.WeakSet[Any] = weakref.WeakSet()  # Options that change outputs and cannot be read back
_sessions: weakref.WeakSet[_Session] = weakref.WeakSet()


class _Bounded(Client):
    """A client whose calls all end at `until`, in time.monotonic's seconds."""

    until = 0.0

    def _perform(self, link: SocketLink, ask: RpcRequest) -> Reply:
        ask.timeout = max(0.0, self.until - time.monotonic())
        return super()._perform(link, ask)


class _Process:
    """The state that all sessions of this process share; a forked child starts a new one."""

    def __init__(self) -> None:
        self.account = SwitchingCost(_now())
        self.free: list[_Bounded] = []
        self._asked: queue.SimpleQueue[tuple[_Session, _Kind, bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, session: _Session, kind: _Kind, *, report: bool) -> None:
        """Ask the service in the background."""
        self._asked.put((session, kind, report))
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer, name="honed-ort", daemon=True)
            self._thread.start()

    def _answer(self) -> None:
        with Client() as client:
            while True:
                session, kind, report = self._asked.get()
                session.learn(client, kind, report=report)
                del session, kind


_process = _Process()


class _Kind:
    """A kind of runs of one session: equal shapes of inputs, and equal outputs."""

    def __init__(self, outputs: Sequence[str], shapes: Mapping[str, Shape]) -> None:
        self.outputs, self.shapes = list(outputs), dict(shapes)
        self.route = Route(_process.account, _ALLOWANCE, half=_HALF, now=_now())
        self.ranks: list[int] = []  # Ranks of the outputs of its own runs
        self.reported = 0, 0  # Numbers of own and routed runs in reports so far
        self.said: tuple[str, str] = self.route.state, self.route.why

    def __str__(self) -> str:
        return ", ".join("x".join(map(str, shape)) for shape in self.shapes.values())

    def report(self) -> RunReport:
        """Return the report of the time since the last one."""
        route, (own, routed) = self.route, self.reported
        self.reported = route.own_runs, route.routed_runs
        return RunReport(
            app=Path((sys.argv or [""])[0] or sys.executable).name,
            own_us=(route.own_median or route.own.median()) // 1000,
            routed_us=(route.routed_median or route.routed.median()) // 1000,
            own_runs=route.own_runs - own,
            routed_runs=route.routed_runs - routed,
            state=route.state,
            why=route.why,
        )


class _Session:
    """The routes of an app's session. Own runs before `rest_until` are not recorded."""

    def __init__(self, session: Any, opened: int) -> None:
        self.rest_until = 0
        self.skipped = [0]  # Runs since the last recorded one
        self._own = weakref.ref(session)
        self._inner = session._sess  # Replaced if the app's session falls back to other providers
        self._opened = opened  # Nanoseconds since 1970; the session does not run what changed later
        self._file = session._model_path
        self._folder = _option(session, _LISTED_DATA) or os.getcwd()
        self._path = os.path.abspath(self._file) if self._file is not None else None
        self._types = {each.name: _TYPES[each.type] for each in session.get_inputs()}
        self._outputs = [each.name for each in session.get_outputs()]
        self._kinds: dict[Any, _Kind] = {}
        self._name = ""  # Name of its model in the service
        self.lock = threading.Lock()
        self._title = Path(self._file).name if self._file is not None else "a model in memory"
        _sessions.add(self)
        if _LOG:
            weakref.finalize(self, _tell_runs, self._title, self._kinds, self.skipped)

    def run(self, own: Own, session: Any, names: Sequence[str] | None, feed: Mapping[str, Any]) -> list[Any]:
        """Run as ONNX Runtime does, in the service or in the session."""
        kind = self._kind(session, names, feed)
        if kind is None:
            return own(session, names, feed)
        route, begun = kind.route, _now()
        with self.lock:
            budget = route.begin(begun)
            route.own_runs += self.skipped[0]
            self.skipped[0] = 0
        if not budget:
            found = own(session, names, feed)
            ended = _now()
            with self.lock:
                route.record_own_run(ended, ended - begun)
                kind.ranks = [getattr(each, "ndim", -1) for each in found]
                self._after(kind, ended)
            return found
        routed: list[Any] | None = None
        try:
            routed = self._ask_service(kind, feed, begun, budget)
        finally:
            ended = _now()
            with self.lock:
                (route.record_routed_run if routed is not None else route.record_failure)(
                    ended, ended - begun
                )
                self._after(kind, ended)
        return own(session, names, feed) if routed is None else routed

    def _kind(self, session: Any, names: Sequence[str] | None, feed: Mapping[str, Any]) -> _Kind | None:
        """Return the kind of a run; None for one that is never routed."""
        if session._sess is not self._inner:
            self.rest_until = _NEVER
            return None
        try:
            shapes = tuple(
                [
                    (name, value.shape if isinstance(value, np.ndarray) else _shape_of(value))
                    for name, value in feed.items()
                ]
            )
            key = (None if names is None else tuple(names), shapes)
            kind = self._kinds.get(key)
        except (AttributeError, TypeError):
            return None
        if kind is None:
            with self.lock:
                kind = self._new_kind(key, names, dict(shapes))
        elif kind.route.state != OWN and any(
            isinstance(value, np.ndarray) and value.dtype != self._types[name] for name, value in feed.items()
        ):
            return None  # ONNX Runtime reports what is wrong with it
        return kind

    def _new_kind(self, key: Any, names: Sequence[str] | None, shapes: Mapping[str, Shape]) -> _Kind | None:
        wanted = list(names) if names is not None and len(names) else self._outputs
        odd = len(set(wanted)) < len(wanted) or any(0 in shape for shape in shapes.values())
        if odd or shapes.keys() != self._types.keys():
            return None
        if len(self._kinds) >= _MOST_KINDS:
            old = next((known for known, each in self._kinds.items() if each.route.state == OWN), None)
            if old is None:
                return None
            del self._kinds[old]
        return self._kinds.setdefault(key, _Kind(wanted, shapes))

    def _ask_service(self, kind: _Kind, feed: Mapping[str, Any], begun: int, budget: int) -> list[Any] | None:
        """Return the service's answer, or None without one in time."""
        seconds = (budget - (_now() - begun)) / 1e9
        try:
            client = _process.free.pop()
        except IndexError:
            client = _Bounded(timeout=seconds)
        client.timeout, client.until = seconds, time.monotonic() + seconds
        try:
            inputs = {name: np.asarray(value, self._types[name]) for name, value in feed.items()}
            answer = client.infer_response(
                self._name, inputs, outputs=kind.outputs, timeout=seconds, compiled=True
            ).outputs
            found = [answer[name] for name in kind.outputs]
        except Exception:  # noqa: BLE001 - whatever it is, the app's own session runs
            client.close()
            return None
        except BaseException:
            client.close()
            raise
        _process.free.append(client)
        return found if [each.ndim for each in found] == kind.ranks else None

    def _after(self, kind: _Kind, now: int) -> None:
        """Update state after a run; the caller holds the lock."""
        route = kind.route
        if (asked := route.ask(now)) != NOTHING:
            _process.ask(self, kind, report=asked == REPORT)
        self._tell(kind)
        if route.state == OWN:
            self.rest_until = min(each.route.rests_until(now) for each in self._kinds.values())

    def learn(self, client: Client, kind: _Kind, *, report: bool) -> None:
        """Ask the service for the compiled model of a kind, after uploading the file; in the background."""
        own, form, refused = self._own(), None, ""
        try:
            if own is not None and not self._name:
                self._name = self._bring(client, own, kind)
            news = kind.report() if report else None
            if self._name:
                form = client.ask(MODEL_FORM, FormParams(name=self._name, shapes=kind.shapes, report=news))
        except NotFound:
            self._name = ""  # The service removed it to make room; it is uploaded again
        except Exception as error:  # noqa: BLE001 - whatever it is, the app's own session runs
            if not self._name and isinstance(error, ModelRefused | InvalidArgument):
                refused = str(error)  # Permanent; other errors are tried again later
        with self.lock:
            now = _now()
            if form is not None and form.verified:
                kind.route.accept_time(now, form.time_us * 1000, half=form.precision == "fp16")
            else:
                kind.route.accept_absence(now)
            kind.route.why = refused or (form.why if form is not None and form.why else kind.route.why)
            self._tell(kind)
            self.rest_until = _NEVER if refused else 0

    def _bring(self, client: Client, own: Any, kind: _Kind) -> str:
        shapes = {name: shape for name, shape in kind.shapes.items() if shape}
        return client.upload(
            self._path if self._path is not None else own._model_bytes,
            shapes=shapes,
            precision="auto" if _HALF else "fp32",
            engine="opencl",
            folder=self._folder,
            unchanged_since=self._opened,
        ).model_name

    def _tell(self, kind: _Kind) -> None:
        """Write a line if the state of a route has changed."""
        route = kind.route
        said = route.state, route.why if route.state == OWN else ""
        if route.asking or said == kind.said:
            return
        kind.said = said
        if _LOG:
            times = f"own {route.own_median / 1e6:.3f} ms, routed {route.routed_median / 1e6:.3f} ms"
            why = f"; {said[1]}" if said[1] else ""
            _say(f"{self._title} ({kind}): {route.state}; {times}{why}")


def _tell_runs(title: str, kinds: Mapping[Any, _Kind], skipped: list[int]) -> None:
    for kind in kinds.values():
        runs = kind.route.own_runs + kind.route.routed_runs + skipped[0]
        skipped[0] = 0
        _say(f"{title} ({kind}): {kind.route.routed_runs} of {runs} runs routed")


def _tell_cost() -> None:
    account = _process.account
    seconds = (_now() - account.begun) / 1e9
    _say(f"switching has cost {account.excess / 1e6:.1f} ms in {seconds:.1f} s")


if _LOG:
    atexit.register(_tell_cost)


def route(module: ModuleType) -> None:
    """Route runs of the sessions of ONNX Runtime's module, once."""
    sessions: Any = module.InferenceSession
    own_init, own_run = sessions.__init__, sessions.run
    if hasattr(own_run, "__honed__"):
        return

    @functools.wraps(own_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        opened = time.time_ns()
        own_init(self, *args, **kwargs)
        try:
            self._honed = _Session(self, opened) if _suits(self) else None
        except Exception:  # noqa: BLE001 - whatever it is, the session is there
            self._honed = None

    @functools.wraps(own_run)
    def run(self: Any, output_names: Any, input_feed: Any, run_options: Any = None) -> list[Any]:
        routes = self.__dict__.get("_honed")
        if routes is None or run_options is not None or _now() < routes.rest_until:
            if routes is not None and run_options is None:
                routes.skipped[0] += 1
            found: list[Any] = own_run(self, output_names, input_feed, run_options)
            return found
        routed: list[Any] = routes.run(own_run, self, output_names, input_feed)
        return routed

    run.__honed__ = True  # type: ignore[attr-defined]
    sessions.__init__, sessions.run = init, run
    options: Any = module.C.SessionOptions
    for name in _ALTERING:
        if (method := getattr(options, name, None)) is not None:
            setattr(options, name, _noting(method))


def _noting(method: Any) -> Any:
    """Return a method of session options that records in `_altered` which options it changed."""

    @functools.wraps(method)
    def note_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _altered.add(self)
        return method(self, *args, **kwargs)

    return note_and_call


def _suits(session: Any) -> bool:
    """Return whether runs of a session may be routed: its outputs are as in the file, in plain tensors."""
    options = session._sess_options_initial
    if options is not None and (options.enable_profiling or options in _altered):
        return False
    ends = (*session.get_inputs(), *session.get_outputs())
    return session.get_providers() == ["CPUExecutionProvider"] and all(each.type in _TYPES for each in ends)


def _option(session: Any, key: str) -> str:
    try:
        return str(session.get_session_options().get_session_config_entry(key))
    except RuntimeError:
        return ""


def _shape_of(value: Any) -> Shape:
    """Return the shape of nested lists, which ONNX Runtime accepts, too; raise TypeError for others."""
    if type(value) is not list:
        raise TypeError
    shape = [len(value)]
    while value and type(value[0]) is list:
        value = value[0]
        shape.append(len(value))
    return tuple(shape)


def _reset_after_fork() -> None:
    """Reset the state in a forked child, which lacks its parent's threads."""
    global _process
    _process = _Process()
    for session in list(_sessions):
        session.lock = threading.Lock()
        session.rest_until = 0
        session._kinds.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
