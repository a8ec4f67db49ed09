"""Provides ONNX Runtime sessions of ONNX files: their interfaces and runs."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import resource
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from honed.daemon.store import state_pairs
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.machine.processors import ThreadPlacement, first_placement, processors
from honed.onnxfile.reading import MISLED, UNNAMED, clean, forget_names, protobuf_memory, read
from honed.process.limits import one_heap, out_of_memory, thread_stacks
from honed.protocol.errors import (
    InvalidArgument,
    MissingFiles,
    ModelRefused,
    ResourceExhausted,
)
from honed.runtime.dtypes import CARRIED, MAP_KEYS, NARROW, STRING, dtype, encode_maps, from_onnx, maps_names
from honed.runtime.engines import HIGHEST, LOWEST, message_of, session_options

from . import profiling
from .profiling import NodeRun

Array = NDArray[Any]
T = TypeVar("T")
_MADE_UP = 1  # Value of a dynamic size in synthetic inputs
_FEW = 1 << 26  # Maximum elements of synthetic inputs
# Types that NumPy does not have go into ONNX Runtime and out of it as bits.
_NARROW = frozenset(narrow.name for narrow in NARROW)
_BITS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}  # Bits of types smaller than a byte
_ARENA_FROM = 512 << 20  # Memory limit in bytes from which sessions use arenas
_PLAIN_TRIES = 3  # Failed runs retried without optimisation, each of which loads the model again
_STACK = 512 << 10  # Bytes of stack for each of ONNX Runtime's threads, as on macOS


def prepare(threads: int) -> ThreadPlacement:
    """Prepare this process for sessions, and return their threads and processors; `threads` 0: chosen.

    Small stacks and a single heap let many sessions fit into memory: each has a thread for each core but one,
    and memory freed by one serves the next. Threads inherit the affinity to the chosen processors.
    """
    thread_stacks(_STACK)
    one_heap()
    placed = first_placement(processors(Path("/"), os.sched_getaffinity(0)), threads)
    if placed.processors:
        os.sched_setaffinity(0, placed.processors)
    return placed


class ThreadRunOptions(threading.local):
    """Thread-local run options, by which another thread ends this thread's run in ONNX Runtime."""

    options: onnxruntime.RunOptions | None = None


running_now = ThreadRunOptions()


class BoundSession:
    """The inputs and outputs bound to a session for its next step; only changed values are bound again."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session = session
        self.outputs: dict[str, onnxruntime.OrtValue | None] = {}
        self._binding = session.io_binding()
        self._inputs: dict[str, Array | onnxruntime.OrtValue] = {}

    def bind(
        self,
        inputs: Mapping[str, Array | onnxruntime.OrtValue],
        outputs: Mapping[str, onnxruntime.OrtValue | None],
    ) -> None:
        """Bind inputs and outputs of the next run; an output of None is allocated by ONNX Runtime."""
        for name, value in inputs.items():
            if self._inputs.get(name) is value:
                continue
            if not isinstance(value, np.ndarray):
                self._binding.bind_ortvalue_input(name, value)
            elif _is_bound(value.dtype):
                self._binding.bind_cpu_input(name, value)
            else:
                self._binding.bind_ortvalue_input(name, ortvalue_of(value))
            self._inputs[name] = value
        for name, place in outputs.items():
            if place is None:
                self._binding.bind_output(name)
            elif self.outputs.get(name) is not place:
                self._binding.bind_ortvalue_output(name, place)
            self.outputs[name] = place

    def run(self) -> None:
        """Run the session; raise ONNX Runtime's errors."""
        self.session.run_with_iobinding(self._binding, running_now.options)

    def fetch_outputs(self, *, lasting: bool) -> dict[str, onnxruntime.OrtValue]:
        """Return the outputs of the latest run; `lasting` ones, which take longer, outlive the next run.

        An output bound to a value is returned as that value, so that its memory stays the same.
        """
        places = enumerate(self.outputs.items())
        if lasting:
            kept = self._binding.get_outputs()
            return {name: kept[at] if place is None else place for at, (name, place) in places}
        values = self._binding.get_outputs_as_ortvaluevector()
        return {
            name: onnxruntime.OrtValue(values[at]) if place is None else place for at, (name, place) in places
        }


class Session:
    """A loaded model that runs on `threads` threads (0: ONNX Runtime's default).

    ONNX Runtime optimises it to `level`, one of `honed.runtime.engines.LEVELS`. If the model loads or runs
    only without optimisation, it is not optimised, and `lowered` is the error of the optimised session. A
    model that does not load without optimisation is optimised.
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        *,
        level: str = HIGHEST,
        alone: bool = False,
    ) -> None:
        """Load the model at `path`.

        Raises ModelRefused or MissingFiles if this engine cannot run the file, or MemoryError. With `alone`
        no external data is read: the file must contain all of it.
        """
        self._threads, self._level, self.lowered, self._tries = threads, level, "", _PLAIN_TRIES
        model, given = _read_model(path, alone=alone)
        self._path, self._alone = path, alone
        try:
            self._session = _create_session(given, self._options())
        except ModelRefused as refused:
            self._level = HIGHEST if level == LOWEST else LOWEST
            try:
                self._session = _create_session(given, self._options())
            except ModelRefused:
                raise refused from None
            self.lowered = str(refused) if self._level == LOWEST else ""
        self._by_names = True  # Dimensions of one name share memory
        self.interface = _interface(model, self._session)
        given_back = self._session.get_outputs()
        self._outputs = [each.name for each in given_back]
        self._maps = {each.name: MAP_KEYS[each.type] for each in given_back if each.type in MAP_KEYS}
        ends = (*self._session.get_inputs(), *given_back)
        self._narrow = any(_is_narrow(end.type) for end in ends)
        # Inputs that may be the same memory as their output, with room for more rows than are used.
        self.in_place = _in_place(model)
        self._asked: dict[str, tuple[int, ...]] = {}  # Shapes of the latest run

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model and return its outputs by name.

        Raises InvalidArgument if the model cannot run on these inputs, MemoryError if memory runs out.
        """
        self._asked = {name: array.shape for name, array in inputs.items()}
        if self._narrow:
            found = self._run_with_retry(lambda: _run_narrow(self._session, self._outputs, inputs))
        else:
            found = self._run_with_retry(
                lambda: self._session.run(self._outputs, dict(inputs), running_now.options)
            )
        tensors: dict[str, Array] = {}
        value: Any
        for name, value in zip(self._outputs, found, strict=True):
            if name in self._maps:
                tensors |= zip(maps_names(name), encode_maps(value, self._maps[name]), strict=True)
            elif isinstance(value, np.ndarray):
                tensors[name] = np.asarray(value, order="C")
            else:
                raise InvalidArgument(f"output {name!r} is no tensor for these inputs; take the others")
        return tensors

    def step(
        self,
        inputs: Mapping[str, Array],
        state: Mapping[str, onnxruntime.OrtValue],
        outputs: Mapping[str, onnxruntime.OrtValue | None],
        before: BoundSession | None = None,
    ) -> BoundSession:
        """Run on `inputs` and `state`; return the binding, which holds the outputs as ONNX Runtime values.

        An output is written to the value in `outputs`, if that is not None. The next step may reuse the
        binding as `before`. Raises as `run`.
        """
        given = {**inputs, **state}

        def run() -> BoundSession:
            bound = before
            # `_run_with_retry` may have replaced the session.
            if bound is None or bound.session is not self._session or bound.outputs.keys() != outputs.keys():
                bound = BoundSession(self._session)
            bound.bind(given, outputs)
            bound.run()
            return bound

        return self._run_with_retry(run)

    def _run_with_retry(self, run: Callable[[], T]) -> T:
        """Return the result of `run`, retried if that may help; raise InvalidArgument or MemoryError."""
        try:
            return run()
        except Exception as error:
            if out_of_memory(error):
                raise MemoryError(f"ONNX Runtime says {message_of(error)}") from error
            if MISLED in str(error) and self._by_names:  # Some files give one name to different sizes
                self._by_names = False
                self._session = self._load_again()
                return self._run_with_retry(run)
            if (found := self._rerun_unoptimised(run, message_of(error))) is not None:
                return found
            raise InvalidArgument(f"the model cannot be run on these inputs: {message_of(error)}") from error

    def _rerun_unoptimised(self, run: Callable[[], T], why: str) -> T | None:
        """Return the result of `run` without optimisation, which stays off from now on.

        Returns None, and changes nothing, if that fails, too. There are `_PLAIN_TRIES` tries, so that inputs
        that fail at every level do not cost a load each.
        """
        ended = running_now.options is not None and running_now.options.terminate  # The client gave up
        if self._level == LOWEST or not self._tries or ended:
            return None
        self._tries -= 1
        before = self._session, self._level
        try:
            self._level = LOWEST
            self._session = self._load_again()
            found = run()
        except Exception:  # noqa: BLE001  the first error is reported
            self._session, self._level = before
            return None
        self.lowered = why
        return found

    def _load_again(self) -> onnxruntime.InferenceSession:
        given = _read_model(self._path, alone=self._alone, by_names=self._by_names)[1]
        return _create_session(given, self._options())

    def _options(self) -> onnxruntime.SessionOptions:
        return _options(self._threads, self._level)

    def try_out(self) -> None:
        """Run once on zeros, and ignore errors: a model that crashes the process should do so here."""
        made = {t.name: _zeros(t) for t in self.interface.inputs}
        if sum(array.size for array in made.values()) <= _FEW:
            try:
                self.run(made)
            except InvalidArgument:
                return

    def profile_run(self, path: Path) -> tuple[float, list[NodeRun]]:
        """Return the microseconds of a run of `path` on zeros of the latest shapes, and its nodes.

        It is the second run of a new session, because profiling must be enabled before loading. Raises
        ResourceExhausted if there is no memory for that.
        """
        with tempfile.TemporaryDirectory(prefix="honed-profile-") as folder:
            options = self._options()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "run")
            try:
                session = onnxruntime.InferenceSession(
                    _read_model(path, alone=False, by_names=self._by_names)[1],
                    options,
                    providers=["CPUExecutionProvider"],
                )
                made = {t.name: _zeros(t, self._asked.get(t.name)) for t in self.interface.inputs}
                for _ in range(2):
                    session.run(None, made, running_now.options)
            except Exception as error:
                if out_of_memory(error):
                    raise ResourceExhausted(
                        "there is no memory for a second session, which a profile takes; raise "
                        "memory_mib of [cpu] in the configuration"
                    ) from error
                raise InvalidArgument(f"the model cannot be run on zeros: {message_of(error)}") from error
            return profiling.read(Path(session.end_profiling()).read_text())


def _read_model(path: Path, *, alone: bool, by_names: bool = True) -> tuple[onnx.ModelProto, bytes | str]:
    """Return the model, and the path or bytes that ONNX Runtime loads; raise ModelRefused or MissingFiles.

    Unless `by_names`, names of dimensions are removed, so that dimensions of one name may differ.
    """
    try:
        model, external = read(path, external_bytes=0) if alone else read(path)
    except MissingFiles as missing:  # RPC does not transfer subclasses
        raise MissingFiles(str(missing), missing.reasons, missing.files) from missing
    changed = forget_names(model, UNNAMED) if by_names else forget_names(model)
    # Data beside the file was read above; ONNX Runtime would follow whatever path the file names.
    inside = external or alone or changed
    if not inside:
        return model, str(path)
    with protobuf_memory(path.stat().st_size + external):
        return model, model.SerializeToString()


def _in_place(model: onnx.ModelProto) -> frozenset[str]:
    """Return the inputs of a model that are caches to which ONNX Runtime can append in place.

    GroupQueryAttention does so if its past and present share memory; another input has the rows in use. There
    are none if the model takes the number of rows from the size of a cache.
    """
    readers = Counter(name for node in model.graph.node for name in node.input)
    given, taken = ({info.name for info in infos} for infos in (model.graph.input, model.graph.output))
    sized = {node.input[0] for node in model.graph.node if node.op_type in ("Shape", "Size")}
    found = set[str]()
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention" or node.domain != "com.microsoft":
            continue
        before, after = node.input[3:5], node.output[1:3]
        if not sized.isdisjoint(before):
            return frozenset()
        alone = all(readers[name] == 1 for name in before) and not any(readers[name] for name in after)
        if alone and given.issuperset(before) and taken.issuperset(after):
            found.update(before)
    return frozenset(found)


def _create_session(source: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if out_of_memory(error):
            raise MemoryError(f"ONNX Runtime says {message_of(error)}") from error
        raise ModelRefused(f"ONNX Runtime cannot run the model: {message_of(error)}") from error


def _options(threads: int, level: str) -> onnxruntime.SessionOptions:
    # An arena grows by doubling, and keeps the peak memory of a model for good.
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    arena = most == resource.RLIM_INFINITY or most >= _ARENA_FROM
    return session_options(onnxruntime, threads, level, spinning=True, arena=arena)


def _interface(model: onnx.ModelProto, session: onnxruntime.InferenceSession) -> Interface:
    declared = {info.name: info for info in (*model.graph.input, *model.graph.output)}
    opset = next((i.version for i in model.opset_import if i.domain in ("", "ai.onnx")), 0)
    problems: list[str] = []
    inputs = tuple(_tensors("input", session.get_inputs(), declared, problems))
    outputs = tuple(_tensors("output", session.get_outputs(), declared, problems))
    if problems:
        raise ModelRefused(f"what the model takes or gives cannot be carried: {problems[0]}", tuple(problems))
    producer = " ".join(part for part in (model.producer_name, model.producer_version) if part)
    interface = Interface(inputs=inputs, outputs=outputs, opset=opset, producer=clean(producer, 80))
    written = next((prop.value for prop in model.metadata_props if prop.key == state_pairs.METADATA), "")
    interface = state_pairs.add_declared_state(interface, written)
    return dataclasses.replace(interface, in_place=tuple(sorted(_in_place(model))))


def _tensors(
    what: str, nodes: Iterable[Any], declared: Mapping[str, onnx.ValueInfoProto], problems: list[str]
) -> Iterable[TensorSpec]:
    for node in nodes:
        if what == "output" and node.type in MAP_KEYS:
            keys, values = maps_names(node.name)
            yield TensorSpec(name=keys, dtype=MAP_KEYS[node.type], shape=(-1,), symbols=("",))
            yield TensorSpec(name=values, dtype="float32", shape=(-1, -1), symbols=("", ""))
            continue
        carried = from_onnx(node.type)
        if carried is None:
            problems.append(
                f"{what} {clean(node.name, 80)!r} is {clean(node.type, 80)}; "
                f"only tensors of {', '.join(each.name for each in CARRIED)} travel, "
                "and out of a model lists of maps from integers or strings to float"
            )
            continue
        info = declared.get(node.name)
        known = bool(node.shape) or (info is not None and info.type.tensor_type.HasField("shape"))
        sizes = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
        symbols = tuple(_symbol(size) for size in node.shape)
        yield TensorSpec(name=node.name, dtype=carried.name, shape=sizes if known else None, symbols=symbols)


def _symbol(size: object) -> str:
    """Return the name of a dimension, "" if it has none."""
    return size if isinstance(size, str) and size != UNNAMED else ""


def _zeros(tensor: TensorSpec, shape: tuple[int, ...] | None = None) -> Array:
    sizes = shape if shape is not None else [_MADE_UP if size < 0 else size for size in tensor.shape or ()]
    if tensor.dtype == STRING.name:
        return np.full(sizes, "", object)
    return np.broadcast_to(np.zeros((), dtype(tensor.dtype).numpy), sizes)


def _is_narrow(type_name: str) -> bool:
    """Return whether ONNX Runtime's name of a type, such as "tensor(int4)", is of one in `_NARROW`."""
    found = from_onnx(type_name)
    return found is not None and found.name in _NARROW


def _run_narrow(
    session: onnxruntime.InferenceSession, outputs: Sequence[str], inputs: Mapping[str, Array]
) -> list[Array]:
    """Return the outputs of a model with types in `_NARROW`; raise ONNX Runtime's errors."""
    given = {name: ortvalue_of(array) for name, array in inputs.items()}
    return [array_of(value) for value in session.run_with_ort_values(outputs, given, running_now.options)]


@functools.cache  # NumPy builds a type's name at each access
def _is_bound(kind: np.dtype[Any]) -> bool:
    """Return whether ONNX Runtime can bind an array of a type without a copy."""
    return kind.kind in "biuf" and kind.name not in _NARROW


def ortvalue_of(array: Array) -> onnxruntime.OrtValue:
    """Return an array as an ONNX Runtime value, which shares the array's memory if that is contiguous."""
    name = array.dtype.name
    if name not in _NARROW:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))
    bits = np.asarray(array, order="C").view(f"u{array.dtype.itemsize}")
    if name in _BITS:
        bits = np.resize(pack_bits(bits.reshape(-1), _BITS[name]), array.shape)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, dtype(name).number)


def array_of(value: Any) -> Array:
    """Return a copy of an ONNX Runtime value as an array."""
    kept = from_onnx(value.data_type())
    if kept is None or kept.name not in _NARROW:
        found: Array = value.numpy()
        return found
    shape: list[int] = value.shape()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    bits = np.frombuffer(raw, f"u{kept.itemsize}")
    if kept.name in _BITS:
        bits = unpack_bits(bits, _BITS[kept.name], int(np.prod(shape)), signed=kept.name.startswith("int"))
    elements: Array = bits.view(kept.numpy).reshape(shape)
    return elements


def pack_bits(elements: Array, bits: int) -> Array:
    """Return elements packed into bytes, the first in the lowest bits (ONNX, TensorProto.int32_data)."""
    rows = np.unpackbits(elements.astype(np.uint8)[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(rows, bitorder="little")


def unpack_bits(whole: Array, bits: int, size: int, *, signed: bool) -> Array:
    """Return the first `size` elements packed by `pack_bits`, a byte each; signed ones are sign-extended."""
    rows = np.unpackbits(whole, count=size * bits, bitorder="little").reshape(size, bits)
    elements = np.packbits(rows, axis=1, bitorder="little")[:, 0]
    sign = np.uint8(1 << (bits - 1)) if signed else np.uint8(0)
    return (elements ^ sign) - sign
