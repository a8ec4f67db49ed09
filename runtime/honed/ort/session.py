"""InferenceSession: an ONNX file that the service serves to this app."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from honed.protocol.errors import HonedError, NotFound, Unavailable
from honed.runtime import maps
from honed.runtime.client import Client
from honed.runtime.maps import Maps

from . import errors, genuine
from .errors import Fail, InvalidArgument, NoSuchFile, said, translated
from .modelproto import Described, ModelMetadata, NodeArg, describe
from .options import PROVIDERS, RunOptions, SessionOptions
from .values import IOBinding, OrtValue, numpy_type, type_of

Array = NDArray[Any]
_RUN_SECONDS = 600.0
_AGAIN_SECONDS = 15.0  # a service that is restarted, or upgraded, is waited for
_PAUSE = 0.2
_log = logging.getLogger("honed.ort")
_lock = threading.Lock()
_clients: dict[int, Client] = {}  # by process: a forked child has a connection of its own
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
        if not isinstance(sess_options, SessionOptions | None):
            raise TypeError(f"sess_options is {sess_options!r:.80}; give SessionOptions")
        self._options = sess_options if sess_options is not None else SessionOptions()
        self._check_providers(providers)
        self._given = path_or_bytes
        self._model_path = None if isinstance(path_or_bytes, bytes) else os.fspath(path_or_bytes)
        self._genuine: Any = None
        self._described = _described(path_or_bytes).with_sizes(self._options.sizes())
        try:
            self._options.check()
            self._name = self._brought()
            self._complete()
        except (HonedError, Fail, errors.NotImplemented) as error:
            self._stand_in(error, kwargs)
        self._inputs_meta, self._outputs_meta = self.get_inputs(), self.get_outputs()
        self._wanted = {} if self._genuine else {each.name: each for each in self._described.inputs}
        self._types = {name: numpy_type(each.type) for name, each in self._wanted.items()}
        self._kinds = {each.name: each.type for each in self._described.outputs}

    # What apps ask of a session

    def get_inputs(self) -> list[NodeArg]:
        """Inputs without those that have values in the file."""
        found: list[NodeArg] = self._genuine.get_inputs() if self._genuine else list(self._described.inputs)
        return found

    def get_outputs(self) -> list[NodeArg]:
        """Outputs in their order."""
        found: list[NodeArg] = self._genuine.get_outputs() if self._genuine else list(self._described.outputs)
        return found

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Inputs that have values in the file; honed keeps these."""
        return list(self._described.overridable)

    def get_modelmeta(self) -> ModelMetadata:
        """What the file says of itself."""
        return self._described.metadata

    def get_session_options(self) -> SessionOptions:
        """Those that were given."""
        return self._options

    def get_providers(self) -> list[str]:
        """Honed, which runs models on the GPU or the processor as it finds best."""
        return self._genuine.get_providers() if self._genuine else list(PROVIDERS)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """None are set."""
        return {name: {} for name in self.get_providers()}

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Changes nothing: the service chooses."""
        self._check_providers(providers)

    def enable_fallback(self) -> None:
        """Changes nothing."""

    def disable_fallback(self) -> None:
        """Changes nothing."""

    def end_profiling(self) -> str:
        """The name of the profile: "", as none is written here; `hone profile` shows kernels."""
        return self._genuine.end_profiling() if self._genuine else ""

    def get_profiling_start_time_ns(self) -> int:
        """0: none is written."""
        return self._genuine.get_profiling_start_time_ns() if self._genuine else 0

    def get_tuning_results(self) -> list[Any]:
        """None: the service keeps its own."""
        return []

    def set_tuning_results(self, results: Any, *, error_on_invalid: bool = False) -> None:
        """Changes nothing."""

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """Changes nothing."""

    def io_binding(self) -> IOBinding:
        """An empty binding."""
        return IOBinding(self)

    # Runs

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, ArrayLike | OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[Array | Maps]:
        """The outputs asked for, in that order; None or none: all. Lists of maps come as such."""
        if run_options is not None and run_options.terminate:
            raise said(Fail, "the run was not begun, as its options say that it is to end (terminate)")
        if self._genuine:
            feed = {name: _array(value) for name, value in input_feed.items()}
            found: list[Array | Maps] = self._genuine.run(
                output_names, feed, genuine.run_options(run_options)
            )
            return found
        names = list(output_names) if output_names else [each.name for each in self._described.outputs]
        asked = list(dict.fromkeys(names))  # an app may ask for one twice
        made = self._run({name: _array(value) for name, value in input_feed.items()}, asked)
        return [made[name] for name in names]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, ArrayLike],
        callback: Callable[[list[Array | Maps], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Run in another thread, which calls `callback` with the outputs, the data, and an error or ""."""

        def work() -> None:
            try:
                found = self.run(output_names, input_feed, run_options)
            except Exception as error:  # noqa: BLE001 - the app is told by its callback
                callback([], user_data, str(error))
            else:
                callback(found, user_data, "")

        _pool().submit(work)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """As `run`, of values and to values."""
        given = {name: value.numpy() for name, value in input_dict_ort_values.items()}
        return [OrtValue(array) for array in _tensors(self.run(output_names, given, run_options))]

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """As `run`, of what is bound and to what is bound."""
        names = list(iobinding.outputs) or [each.name for each in self.get_outputs()]
        found = _tensors(self.run(names, iobinding.inputs, run_options))
        iobinding.ran(dict(zip(names, found, strict=True)))

    # How

    def _run(self, given: Mapping[str, ArrayLike], names: Sequence[str]) -> dict[str, Array | Maps]:
        inputs = self._checked(given)
        unknown = [name for name in names if name not in self._kinds]
        if unknown:
            raise said(InvalidArgument, f"Invalid output name: {unknown[0]}")
        in_maps = {name: maps.travelling(name) for name in names if self._kinds[name] in maps.KEYS}
        made = self._inferred(inputs, [each for name in names for each in in_maps.get(name, (name,))])
        joined = {name: maps.together(*(made[each] for each in both)) for name, both in in_maps.items()}
        return {name: joined[name] if name in joined else made[name] for name in names}

    def _inferred(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """What the service answers; one that was away is waited for, and given the model again."""
        end = time.monotonic() + _AGAIN_SECONDS
        while True:
            try:
                return _client().infer(self._name, inputs, outputs=list(outputs), timeout=_RUN_SECONDS)
            except (NotFound, Unavailable) as error:
                # Gone with the least used ones, or with a service that was restarted: brought again.
                if time.monotonic() > end:
                    raise translated(error) from error
                time.sleep(_PAUSE)
                self._again()
            except HonedError as error:
                raise translated(error) from error

    def _again(self) -> None:
        try:
            self._name = self._brought()
        except Unavailable:
            return  # not there yet
        except HonedError as error:
            raise translated(error) from error

    def _checked(self, given: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """The inputs as arrays; raises what ONNX Runtime raises where they are not the model's."""
        wanted = self._wanted
        missing = [name for name in wanted if name not in given]
        if missing:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({list(given)}).")
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

    def _brought(self) -> str:
        """The name the service has for the file; raises HonedError, or Fail where nothing serves it."""
        brought = _client().bring(self._given)
        if not brought.ready:
            raise said(Fail, f"honed cannot run the model: {brought.engine_why}")
        return brought.model_name

    def _complete(self) -> None:
        """Types and shapes that the file leaves to be inferred are the service's."""
        described = self._described
        if all(each.type for each in described.outputs):
            return
        known = {each["name"]: each for each in _client().metadata(self._name)["outputs"]}
        described.outputs = [each if each.type else _inferred(each.name, known) for each in described.outputs]

    def _check_providers(self, providers: Sequence[str | tuple[str, Any]] | None) -> None:
        for each in providers or ():
            name = each if isinstance(each, str) else each[0]
            if name not in PROVIDERS:
                text = f"Specified provider '{name}' is not in available provider names: {PROVIDERS}"
                warnings.warn(text, UserWarning, stacklevel=3)

    def _stand_in(self, error: Exception, kwargs: Mapping[str, Any]) -> None:
        """Have ONNX Runtime itself take this session, where the app allows that; raises what is wrong."""
        wrong = translated(error) if isinstance(error, HonedError) else error
        if not self._options.allows_fallback():
            raise wrong from error
        found = genuine.session(self._given, self._options, kwargs)
        if found is None:
            raise wrong from error
        what = self._model_path or "a model of the app's"
        _log.warning("%s is run by ONNX Runtime in the app, and not by honed: %s", what, wrong)
        self._genuine = found


def _described(given: str | os.PathLike[str] | bytes) -> Described:
    if isinstance(given, bytes):
        return describe(given)
    path = Path(given)
    if not path.exists():
        raise said(NoSuchFile, f"Load model from {path} failed:Load model {path} failed. File doesn't exist")
    try:
        with path.open("rb") as file:
            # Unmapped with the last view of it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise said(Fail, f"Load model from {path} failed: {error}") from error
    return describe(mapped)


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
        told = "".join(f"\n index: {index} Got: {got} Expected: {size}" for index, got, size in wrong)
        raise said(
            InvalidArgument,
            f"Got invalid dimensions for input: {wanted.name} for the following indices{told}\n Please fix "
            "either the inputs/outputs or the model.",
        )


def _inferred(name: str, known: Mapping[str, Mapping[str, Any]]) -> NodeArg:
    from honed.runtime.dtypes import from_datatype

    if name not in known:
        keys, _ = maps.travelling(name)
        key_type = from_datatype(known[keys]["datatype"]).name
        return NodeArg(name, next(kind for kind, each in maps.KEYS.items() if each == key_type), [])
    found = known[name]
    kind = type_of(np.empty(0, from_datatype(found["datatype"]).numpy))
    return NodeArg(name, kind, [None if size < 0 else size for size in found["shape"]])


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
    """In a forked child: a thread of the parent's may have held the lock, and does not live here."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _pool() -> ThreadPoolExecutor:
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = ThreadPoolExecutor(4, "honed-ort")
        return _pools[os.getpid()]
