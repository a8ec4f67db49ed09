"""InferenceSession: an ONNX file that the service serves to this app.

ONNX Runtime itself serves it where it is installed and the app allows that.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from honed import standin
from honed.protocol import errors as honed_errors
from honed.protocol.errors import Busy, HonedError, NotFound, ResourceExhausted, Unavailable
from honed.runtime.calling.in_app import Loan
from honed.runtime.client import Client
from honed.runtime.encodings import MAP_KEYS, Maps, decode_maps, maps_names

from . import errors
from .errors import Fail, InvalidArgument, said, translated, unsaid
from .modelproto import ModelMetadata, NodeArg, read_file
from .options import (
    FALLBACK,
    OrtAllocatorType,
    OrtMemoryInfo,
    OrtMemType,
    RunOptions,
    SessionOptions,
    requested,
)
from .values import IOBinding, OrtValue, numpy_type, type_of


def genuine_session(given: Any, options: SessionOptions, kwargs: Mapping[str, Any]) -> Any:
    """Return a session of ONNX Runtime's own with the options given; None where it is not installed."""
    found = standin.genuine()
    if found is None:
        return None
    return found.InferenceSession(
        given, sess_options=_translated(options, found), providers=["CPUExecutionProvider"], **kwargs
    )


def genuine_run_options(options: RunOptions | None) -> Any:
    """Return an app's options for a run of such a session as ONNX Runtime's own RunOptions.

    Returns None where there are no options or ONNX Runtime is not installed.
    """
    found = standin.genuine()
    if options is None or found is None:
        return None
    made = found.RunOptions()
    for name, value in options.given().items():
        setattr(made, name, value)
    for key, value in options.entries().items():
        made.add_run_config_entry(key, value)
    return made


def _translated(options: SessionOptions, found: ModuleType) -> Any:
    """Return the options that an app has set as ONNX Runtime's own SessionOptions."""
    made = found.SessionOptions()
    for name, value in options.given().items():
        if isinstance(value, enum.IntEnum):
            value = getattr(found, type(value).__name__)(int(value))
        setattr(made, name, value)
    for name, size in options.sizes().items():
        made.add_free_dimension_override_by_name(name, size)
    for key, value in options.entries().items():
        if key != FALLBACK:
            made.add_session_config_entry(key, value)
    return made


Array = NDArray[Any]
_RUN_SECONDS = 600.0
_AGAIN_SECONDS = 15.0  # a service that starts, is restarted, or upgraded, is waited for
_BUSY_SECONDS = 60.0  # one that serves others first
_PAUSE = 0.2
_IN_THE_APP: Final = "onnxruntime"  # the engine of a session that ONNX Runtime runs in the app
T = TypeVar("T")
_log = logging.getLogger("honed.ort")
_lock = threading.Lock()
_clients: dict[int, Client] = {}  # by process: a forked child has a connection of its own
_absent: dict[int, float] = {}  # by process: until when a service that does not answer is waited for
_pools: dict[int, ThreadPoolExecutor] = {}


class InferenceSession:
    """A model of this app's, served by honed. Raises what ONNX Runtime raises, under its names.

    The file becomes a model of the service's by its contents, and all sessions of this user with the same
    file, in whatever process, share it. Threads may share a session.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Any]] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(path_or_bytes, str | bytes | os.PathLike):
            raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")
        if not isinstance(sess_options, SessionOptions | None):
            raise TypeError(f"sess_options is {sess_options!r:.80}; give SessionOptions")
        self._sess_options = sess_options.copied() if sess_options is not None else SessionOptions()
        self._enable_fallback = int(kwargs.get("enable_fallback", 1)) == 1
        self._register(providers, provider_options)
        self._model_path = None if isinstance(path_or_bytes, bytes) else os.fspath(path_or_bytes)
        self._model_bytes = path_or_bytes if isinstance(path_or_bytes, bytes) else None
        self._given, self._kwargs = path_or_bytes, kwargs
        self._changing = threading.Lock()  # who takes the session
        self._genuine: Any = None
        self._loan: Loan | None = None  # by which the model runs in the app
        self._name = self._engine = ""
        self._described = read_file(path_or_bytes)
        try:
            self._sess_options.check()
            self._bring()
            self._types = {each.name: numpy_type(each.type) for each in self._described.inputs}
        except (HonedError, Fail, errors.NotImplemented) as error:
            self._stand_in(error)
        self._described = self._described.with_sizes(self._sess_options.sizes())
        served = self._genuine or self._described
        self._inputs_meta: list[NodeArg] = list(served.get_inputs() if self._genuine else served.inputs)
        self._outputs_meta: list[NodeArg] = list(served.get_outputs() if self._genuine else served.outputs)
        self._overridable_initializers, self._model_meta = (
            self._described.overridable,
            self._described.metadata,
        )
        self._wanted = {each.name: each for each in self._inputs_meta}
        self._kinds = {each.name: each.type for each in self._outputs_meta}

    # What apps ask of a session

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs, without those that have values in the file."""
        return list(self._inputs_meta)

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs in their order."""
        return list(self._outputs_meta)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the inputs that have values in the file; honed keeps these values."""
        return list(self._overridable_initializers)

    def get_modelmeta(self) -> ModelMetadata:
        """Return what the file says of itself."""
        return self._model_meta

    def get_session_options(self) -> SessionOptions:
        """Return the options that were given, as they were then."""
        return self._sess_options

    @property
    def honed_engine(self) -> str:
        """What answered the latest run, or will answer the first.

        It is "gpu", "cpu" or "gpu+cpu" in the service, "onnxruntime" in the app. ONNX Runtime has no such
        attribute.
        """
        here = self._genuine or (self._loan is not None and not self._loan.ended)
        return _IN_THE_APP if here else self._engine

    def get_providers(self) -> list[str]:
        """Return the providers both requested and available; `honed_engine` tells what runs the model."""
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options that the app gave for each provider."""
        return {name: dict(options) for name, options in self._provider_options.items()}

    def get_input_memory_infos(self) -> list[OrtMemoryInfo]:
        """Return the memory of each input, always the host's."""
        return [_on_host() for _ in self._inputs_meta]

    def get_output_memory_infos(self) -> list[OrtMemoryInfo]:
        """Return the memory of each output, always the host's."""
        return [_on_host() for _ in self._outputs_meta]

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, Any]] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
    ) -> None:
        """Set the providers that the session reports; the service chooses what runs the model."""
        self._register(providers, provider_options)

    def enable_fallback(self) -> None:
        """Treat invalid providers as if none were given, as ONNX Runtime does."""
        self._enable_fallback = True

    def disable_fallback(self) -> None:
        """Raise ValueError for providers that are given wrongly."""
        self._enable_fallback = False

    def end_profiling(self) -> str:
        """Return the name of the profile: "", as none is written here; `hone profile` shows kernels."""
        return self._genuine.end_profiling() if self._genuine else ""

    def get_profiling_start_time_ns(self) -> int:
        """Return 0, as no profile is written; ONNX Runtime's own start time where it runs the session."""
        return self._genuine.get_profiling_start_time_ns() if self._genuine else 0

    def get_tuning_results(self) -> list[Any]:
        """Return an empty list: the service keeps its own tuning results."""
        return []

    def set_tuning_results(self, results: Any, *, error_on_invalid: bool = False) -> None:
        """Do nothing: honed takes no tuning results of ONNX Runtime's."""

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """Do nothing: the service takes no options of execution providers."""

    def io_binding(self) -> IOBinding:
        """Return an empty binding of inputs and outputs for this session."""
        return IOBinding(self)

    # Runs

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, ArrayLike | OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[Array | Maps]:
        """Return the requested outputs in the order of `output_names`; None or an empty list requests all.

        Outputs that are lists of maps are returned as lists of maps.
        """
        loan = self._loan
        if loan is not None and run_options is None:
            if output_names is None or output_names == []:
                output_names = loan.outputs
            if type(output_names) is list and (here := loan.run(output_names, input_feed)) is not None:
                return here
        if not isinstance(run_options, RunOptions | None):
            raise TypeError(f"run_options is {run_options!r:.80}; give RunOptions")
        feed = {name: _array(input_feed[name]) for name in input_feed.keys()}  # noqa: SIM118 - see below
        if run_options is not None and run_options.terminate:
            raise said(Fail, "the run was not begun, as its options say that it is to end (terminate)")
        names = self._names(output_names)
        if not self._genuine:
            try:
                made = self._run(feed, list(dict.fromkeys(names)))  # an app may ask for one twice
                return [made[name] for name in names]
            except (HonedError, errors.NotImplemented) as error:
                self._stand_in(error)
        found: list[Array | Maps] = self._genuine.run(names, feed, genuine_run_options(run_options))
        return found

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, ArrayLike],
        callback: Callable[[list[Array | Maps], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Run in another thread, which calls `callback` with the outputs, the data, and an error or "".

        Raises ValueError where an input is missing.
        """
        self._check_there(input_feed)

        def work() -> None:
            try:
                found = self.run(output_names, input_feed, run_options)
            except Exception as error:  # noqa: BLE001 - the app is told by its callback
                callback([], user_data, unsaid(error))
            else:
                callback(found, user_data, "")

        _pool().submit(work)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Run as `run` does, with OrtValues as inputs and outputs."""
        given = {name: value.numpy() for name, value in input_dict_ort_values.items()}
        return [OrtValue(array) for array in _tensors(self.run(output_names, given, run_options))]

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run as `run` does, from the bound inputs to the bound outputs; raise RuntimeError for invalid ones.

        Raises ValueError for a binding of another session.
        """
        if iobinding.session is not self:
            raise ValueError("IOBinding must be used with the session that created it.")
        names = list(iobinding.outputs)
        if not names:
            raise RuntimeError("Error in execution: At least one output should be requested.")
        try:
            found = _tensors(self.run(names, iobinding.inputs, run_options))
        except (InvalidArgument, ValueError) as error:
            raise RuntimeError(f"Error in execution: {unsaid(error)}") from error
        iobinding.ran(dict(zip(names, found, strict=True)))

    # How

    def _run(self, given: Mapping[str, ArrayLike], names: Sequence[str]) -> dict[str, Array | Maps]:
        inputs = self._checked(given)
        unknown = [name for name in names if name not in self._kinds]
        if unknown:
            raise said(InvalidArgument, f"Invalid output name: {unknown[0]}")
        in_maps = {name: maps_names(name) for name in names if self._kinds[name] in MAP_KEYS}
        made = self._inferred(inputs, [each for name in names for each in in_maps.get(name, (name,))])
        joined = {name: decode_maps(*(made[each] for each in both)) for name, both in in_maps.items()}
        return {name: joined[name] if name in joined else made[name] for name in names}

    def _inferred(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Return the service's outputs by name.

        Waits for a service that is unavailable, and gives it the model again where it no longer has the
        model.
        """

        def ask() -> dict[str, Array]:
            wanted = list(outputs)
            try:
                found = _client().answer(self._name, inputs, outputs=wanted, timeout=_RUN_SECONDS)
            except NotFound:
                # Gone with the least used ones, or with a service that was restarted: brought again.
                self._take()
                try:
                    found = _client().answer(self._name, inputs, outputs=wanted, timeout=_RUN_SECONDS)
                except NotFound as error:  # gone again meanwhile
                    raise Unavailable(str(error)) from error
            self._engine = found.engine
            if not self._sess_options.sizes():  # which ONNX Runtime would fix
                self._loan = _client().loan(self._name, max(0, self._sess_options.intra_op_num_threads))
            return found.outputs

        return _waited(ask, time.monotonic() + _AGAIN_SECONDS)

    def _checked(self, given: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """Return the inputs as arrays; raise what ONNX Runtime raises where they do not fit the model."""
        wanted = self._wanted
        self._check_there(given)
        inputs = {}
        for name, value in given.items():
            if name not in wanted:
                raise self._not_an_input(name)
            if value is None:
                raise said(Fail, f"Invalid input: {name} is None; give an array")
            expected = self._types[name]
            array = value if isinstance(value, np.ndarray) else np.asarray(value, expected)
            if array.dtype is not expected and type_of(array) != wanted[name].type:
                found = f"Actual: ({type_of(array)}) , expected: ({wanted[name].type})"
                raise said(InvalidArgument, f"Unexpected input data type. {found}")
            _check_shape(wanted[name], array)
            inputs[name] = array
        return inputs

    def _not_an_input(self, name: str) -> Exception:
        if any(name == each.name for each in self._described.overridable):
            text = f"honed keeps the value that the file gives {name!r}; leave it out, or out of the file"
            return said(errors.NotImplemented, text)
        return said(InvalidArgument, f"Invalid input name: {name}")

    def _check_there(self, given: Mapping[str, Any]) -> None:
        missing = [name for name in self._wanted if name not in given]
        if missing:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({list(given)}).")

    def _names(self, asked: Sequence[str] | None) -> list[str]:
        """Return the names of the outputs requested of a run; raise TypeError for anything but names."""
        if asked is None or len(asked) == 0:
            return list(self._kinds)
        if not isinstance(asked, Sequence | np.ndarray) or isinstance(asked, str | bytes):
            raise TypeError(f"output_names is {asked!r:.80}; give a list of names, or None for all")
        if not all(isinstance(each, str) for each in asked):
            raise TypeError(f"output_names is {asked!r:.80}; every one must be a str")
        return [str(each) for each in asked]

    def _bring(self) -> None:
        """Have the service serve the file; wait for a service that is unavailable, once in a process.

        Raises HonedError, or Fail where nothing serves the file.
        """
        end = _absent.setdefault(os.getpid(), time.monotonic() + _AGAIN_SECONDS)
        try:
            _waited(self._take, end)
        except Unavailable:
            raise  # and not waited for again by the sessions that follow
        except BaseException:
            _absent.pop(os.getpid(), None)
            raise
        _absent.pop(os.getpid(), None)

    def _take(self) -> None:
        answer = _client().bring(self._given)
        if not answer.ready:
            raise said(Fail, f"honed cannot run the model: {answer.engine_why}")
        self._name, self._engine = answer.model_name, answer.engine
        self._described.complete(answer.outputs)

    def _register(
        self,
        providers: Sequence[str | tuple[str, Any]] | None,
        provider_options: Sequence[Mapping[Any, Any]] | None,
    ) -> None:
        try:
            self._provider_options = requested(providers, provider_options)
        except ValueError as error:
            if not self._enable_fallback:
                raise
            warnings.warn(f"{error} They are taken for none.", UserWarning, stacklevel=3)
            self._provider_options = requested(None, None)
        self._providers = list(self._provider_options)

    def _stand_in(self, error: Exception) -> None:
        """Have ONNX Runtime itself take this session, where that is allowed; raise the error otherwise.

        It is allowed by default for the limits of the service, and for other errors where the app says so.
        """
        wrong = translated(error) if isinstance(error, HonedError) else error
        limit = isinstance(error, ResourceExhausted)
        asked = isinstance(error, honed_errors.InvalidArgument)  # the app's fault, wherever it runs
        if asked or not self._sess_options.allows_fallback(limit=limit):
            raise wrong from error
        with self._changing:
            if self._genuine:
                return
            found = genuine_session(self._given, self._sess_options, self._kwargs)
            if found is None:
                if limit:
                    hint = "where onnxruntime is installed the app runs such a model itself"
                    raise said(type(wrong), f"{error}; {hint}") from error
                raise wrong from error
            what = self._model_path or "a model of the app's"
            _log.warning("%s is run by ONNX Runtime in the app, and not by honed: %s", what, unsaid(wrong))
            self._genuine = found


def _waited(ask: Callable[[], T], end: float) -> T:
    """Return the service's answer, asking again while the service is unavailable or busy.

    Asks until `end` (of time.monotonic) while it is unavailable, and for _BUSY_SECONDS while it is busy with
    others; then raises the error.
    """
    patient = time.monotonic() + _BUSY_SECONDS
    logged = False
    while True:
        try:
            return ask()
        except (Unavailable, Busy) as error:
            if time.monotonic() > (end if isinstance(error, Unavailable) else patient):
                raise
            if not logged:
                _log.info("waiting for honed: %s", error)
                logged = True
            time.sleep(_PAUSE)


def _check_shape(wanted: NodeArg, array: Array) -> None:
    if not wanted.shape and array.ndim:
        return  # the file leaves the rank open, or the service says so
    if array.ndim != len(wanted.shape):
        raise said(
            InvalidArgument,
            f"Invalid rank for input: {wanted.name} Got: {array.ndim} Expected: {len(wanted.shape)} "
            "Please fix either the inputs/outputs or the model.",
        )
    wrong = [
        (index, got, size)
        for index, (got, size) in enumerate(zip(array.shape, wanted.shape, strict=True))
        if isinstance(size, int) and size >= 0 and got != size
    ]
    if wrong:
        text = "".join(f"\n index: {index} Got: {got} Expected: {size}" for index, got, size in wrong)
        raise said(
            InvalidArgument,
            f"Got invalid dimensions for input: {wanted.name} for the following indices{text}\n Please fix "
            "either the inputs/outputs or the model.",
        )


def _on_host() -> OrtMemoryInfo:
    return OrtMemoryInfo("Cpu", OrtAllocatorType.ORT_DEVICE_ALLOCATOR, 0, OrtMemType.DEFAULT)


def _tensors(outputs: Sequence[Array | Maps]) -> list[Array]:
    tensors = [each for each in outputs if isinstance(each, np.ndarray)]
    if len(tensors) < len(outputs):
        raise said(errors.NotImplemented, "an output is a list of maps, which is no OrtValue; use run")
    return tensors


def _array(value: ArrayLike | OrtValue) -> ArrayLike:
    return value._array if isinstance(value, OrtValue) else value


def _client() -> Client:
    with _lock:
        return _clients.setdefault(os.getpid(), Client(timeout=_RUN_SECONDS))


def _forked() -> None:
    """Make a new lock in a forked child, where a thread of the parent may have held the lock.

    That thread does not live in the child.
    """
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _pool() -> ThreadPoolExecutor:
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = ThreadPoolExecutor(4, "honed-ort")
        return _pools[os.getpid()]
