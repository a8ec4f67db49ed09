"""One ONNX file in ONNX Runtime: what it takes and gives, and its runs."""

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
from honed.onnxfile.reading import MISLED, UNNAMED, forget_names, protobuf_memory, read, shown
from honed.process.limits import one_heap, out_of_memory, thread_stacks
from honed.protocol.errors import (
    InvalidArgument,
    MissingFiles,
    ModelRefused,
    ResourceExhausted,
)
from honed.runtime.dtypes import CARRIED, NARROW, STRING, dtype, from_onnx
from honed.runtime.encodings import MAP_KEYS, encode_maps, maps_names
from honed.runtime.engines import HIGHEST, LOWEST, said, session_options

from . import profiling
from .profiling import NodeRun

Array = NDArray[Any]
T = TypeVar("T")
_MADE_UP = 1  # For a size that the file leaves open, where inputs are made up
_FEW = 1 << 26  # Elements of a made-up input at most
# Types that NumPy does not have go into ONNX Runtime and out of it as bits.
_NARROW = frozenset(narrow.name for narrow in NARROW)
_BITS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}  # Of those that are less than a byte
_ARENA_FROM = 512 << 20  # Bytes that the process may have: less, and its models do without arenas
_PLAIN_TRIES = 3  # Runs that failed and are tried without optimisation; each loads the model once more
_STACK = 512 << 10  # Bytes for each of ONNX Runtime's threads, which is what it has on macOS


def prepare(threads: int) -> ThreadPlacement:
    """Prepare this process for sessions, and return how many threads each has, `threads` if that is not 0.

    Have many sessions fit in the process's memory: each has a thread for each core but one, and what one has
    freed serves the next, whichever thread loads or runs it. And keep its threads, which inherit that, on the
    processors that suit them.
    """
    thread_stacks(_STACK)
    one_heap()
    placed = first_placement(processors(Path("/"), os.sched_getaffinity(0)), threads)
    if placed.processors:
        os.sched_setaffinity(0, placed.processors)
    return placed


class ThreadRunOptions(threading.local):
    """Options by which ONNX Runtime is told to end the runs of this thread."""

    options: onnxruntime.RunOptions | None = None


running_now = ThreadRunOptions()


class BoundSession:
    """What a session runs on, step after step: only what is another value than before is bound again."""

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
        """Have the next run take these values, and write to those given for outputs."""
        for name, value in inputs.items():
            if self._inputs.get(name) is value:
                continue
            if not isinstance(value, np.ndarray):
                self._binding.bind_ortvalue_input(name, value)
            elif _is_bound(value.dtype):
                self._binding.bind_cpu_input(name, value)
            else:
                self._binding.bind_ortvalue_input(name, given_value(value))
            self._inputs[name] = value
        for name, place in outputs.items():
            if place is None:
                self._binding.bind_output(name)
            elif self.outputs.get(name) is not place:
                self._binding.bind_ortvalue_output(name, place)
            self.outputs[name] = place

    def run(self) -> None:
        """Run the session; raises what ONNX Runtime does."""
        self.session.run_with_iobinding(self._binding, running_now.options)

    def found(self, *, lasting: bool) -> dict[str, onnxruntime.OrtValue]:
        """Return the outputs of the latest run, valid until the next unless `lasting`, which takes longer.

        A place keeps its memory, which another value of it does not.
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
    """A model that is loaded, on so many threads (0: as many as ONNX Runtime finds good).

    ONNX Runtime optimises it to `level`, one of `honed.runtime.engines.LEVELS`, and not at all once it does
    not load or run so and does without; `lowered` is then what ONNX Runtime said. A model that does not load
    without optimisation is optimised.
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

        Raises ModelRefused or MissingFiles where this engine cannot run the file, or MemoryError. A model
        that is `alone` has all of its data inside: nothing beside its file is read.
        """
        self._threads, self._level, self.lowered, self._tries = threads, level, "", _PLAIN_TRIES
        model, given = _given(path, alone=alone)
        self._path, self._alone = path, alone
        try:
            self._session = _loaded(given, self._options())
        except ModelRefused as refused:
            self._level = HIGHEST if level == LOWEST else LOWEST
            try:
                self._session = _loaded(given, self._options())
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

        Raises InvalidArgument where the model cannot be run on these inputs, MemoryError where memory runs
        out.
        """
        self._asked = {name: array.shape for name, array in inputs.items()}
        if self._narrow:
            found = self._ran(lambda: _run_narrow(self._session, self._outputs, inputs))
        else:
            found = self._ran(lambda: self._session.run(self._outputs, dict(inputs), running_now.options))
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
        """Run on inputs and on values that ONNX Runtime holds; what is returned has the outputs as such.

        An output is written to the value given for it. The next step may take what is returned as `before`.
        Raises as `run`.
        """
        given = {**inputs, **state}

        def run() -> BoundSession:
            bound = before
            # `_ran` may have replaced the session.
            if bound is None or bound.session is not self._session or bound.outputs.keys() != outputs.keys():
                bound = BoundSession(self._session)
            bound.bind(given, outputs)
            bound.run()
            return bound

        return self._ran(run)

    def _ran(self, run: Callable[[], T]) -> T:
        """Return what a run of the session gives; raise InvalidArgument or MemoryError."""
        try:
            return run()
        except Exception as error:
            if out_of_memory(error):
                raise MemoryError(f"ONNX Runtime says {said(error)}") from error
            if MISLED in str(error) and self._by_names:
                self._forget_names()
                return self._ran(run)
            if (found := self._ran_plainly(run, said(error))) is not None:
                return found
            raise InvalidArgument(f"the model cannot be run on these inputs: {said(error)}") from error

    def _ran_plainly(self, run: Callable[[], T], why: str) -> T | None:
        """Return what a run gives without optimisation, which is left off from now on.

        Returns None, and changes nothing, where it fails so as well. What fails is tried a few times only:
        inputs that no level takes must not cost a load each.
        """
        ended = running_now.options is not None and running_now.options.terminate  # As nobody waits for it
        if self._level == LOWEST or not self._tries or ended:
            return None
        self._tries -= 1
        before = self._session, self._level
        try:
            self._level = LOWEST
            self._session = _loaded(self._reread(), self._options())
            found = run()
        except Exception:  # noqa: BLE001  it failed before, which is what is reported
            self._session, self._level = before
            return None
        self.lowered = why
        return found

    def _reread(self) -> bytes | str:
        return _given(self._path, alone=self._alone, by_names=self._by_names)[1]

    def _options(self) -> onnxruntime.SessionOptions:
        return _options(self._threads, self._level)

    def _forget_names(self) -> None:
        """Files are met that call dimensions by one name whose sizes differ; they run all the same."""
        self._by_names = False
        self._session = _loaded(self._reread(), self._options())

    def try_out(self) -> None:
        """Run once on zeros, whatever the model says to them: what ends a process shall do so here."""
        made = {t.name: _zeros(t) for t in self.interface.inputs}
        if sum(array.size for array in made.values()) <= _FEW:
            try:
                self.run(made)
            except InvalidArgument:
                return

    def profiled(self, path: Path) -> tuple[float, list[NodeRun]]:
        """How long a run of the file on zeros of the latest shapes takes, in microseconds, and its nodes.

        The second run of a session of its own, since one that serves cannot be told to profile. Raises
        ResourceExhausted where there is no memory for that.
        """
        with tempfile.TemporaryDirectory(prefix="honed-profile-") as folder:
            options = self._options()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "run")
            try:
                session = onnxruntime.InferenceSession(
                    _given(path, alone=False, by_names=self._by_names)[1],
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
                raise InvalidArgument(f"the model cannot be run on zeros: {said(error)}") from error
            return profiling.read(Path(session.end_profiling()).read_text())


def _given(path: Path, *, alone: bool, by_names: bool = True) -> tuple[onnx.ModelProto, bytes | str]:
    """Return the model, and what ONNX Runtime loads for it; raise ModelRefused or MissingFiles.

    Unless `by_names`, dimensions of one name may differ.
    """
    try:
        model, external = read(path, external_bytes=0) if alone else read(path)
    except MissingFiles as missing:  # A subclass does not travel
        raise MissingFiles(str(missing), missing.reasons, missing.files) from missing
    changed = forget_names(model, UNNAMED) if by_names else forget_names(model)
    # Data beside the file was read above; ONNX Runtime would follow whatever path the file names.
    inside = external or alone or changed
    if not inside:
        return model, str(path)
    with protobuf_memory(path.stat().st_size + external):
        return model, model.SerializeToString()


def _in_place(model: onnx.ModelProto) -> frozenset[str]:
    """Return the inputs of a model that are caches which ONNX Runtime can append to where they are.

    GroupQueryAttention does where both are the same memory, and is told elsewhere how many rows are used.
    """
    readers = Counter(name for node in model.graph.node for name in node.input)
    given, taken = ({info.name for info in infos} for infos in (model.graph.input, model.graph.output))
    pairs = (
        pair
        for node in model.graph.node
        if node.op_type == "GroupQueryAttention" and node.domain == "com.microsoft"
        for pair in zip(node.input[3:5], node.output[1:3], strict=False)
    )
    return frozenset(
        before
        for before, after in pairs
        if before in given and after in taken and readers[before] == 1 and not readers[after]
    )


def _loaded(given: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    try:
        return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if out_of_memory(error):
            raise MemoryError(f"ONNX Runtime says {said(error)}") from error
        raise ModelRefused(f"ONNX Runtime cannot run the model: {said(error)}") from error


def _options(threads: int, level: str) -> onnxruntime.SessionOptions:
    # An arena keeps what a model took at its largest, for good, and grows by doubling.
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
    interface = Interface(inputs=inputs, outputs=outputs, opset=opset, producer=shown(producer, 80))
    written = next((prop.value for prop in model.metadata_props if prop.key == state_pairs.METADATA), "")
    try:
        named = state_pairs.from_text(written)
        state_pairs.checked(interface, named)
    except InvalidArgument as error:
        raise ModelRefused(f"the file's metadata {state_pairs.METADATA} is wrong: {error}") from error
    return dataclasses.replace(
        interface, state=tuple(named.items()), in_place=tuple(sorted(_in_place(model)))
    )


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
                f"{what} {shown(node.name, 80)!r} is {shown(node.type, 80)}; "
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
    """Return the name of a dimension, "" where it has none."""
    return size if isinstance(size, str) and size != UNNAMED else ""


def _zeros(tensor: TensorSpec, asked: tuple[int, ...] | None = None) -> Array:
    sizes = asked if asked is not None else [_MADE_UP if size < 0 else size for size in tensor.shape or ()]
    if tensor.dtype == STRING.name:
        return np.full(sizes, "", object)
    return np.broadcast_to(np.zeros((), dtype(tensor.dtype).numpy), sizes)


def _is_narrow(type_name: str) -> bool:
    """Whether ONNX Runtime calls one of these types so, as in "tensor(int4)"."""
    found = from_onnx(type_name)
    return found is not None and found.name in _NARROW


def _run_narrow(
    session: onnxruntime.InferenceSession, outputs: Sequence[str], inputs: Mapping[str, Array]
) -> list[Array]:
    """Return the outputs of a model with inputs or outputs of such types. Raises what ONNX Runtime raises."""
    given = {name: given_value(array) for name, array in inputs.items()}
    return [taken_value(value) for value in session.run_with_ort_values(outputs, given, running_now.options)]


@functools.cache  # NumPy makes a type's name anew each time
def _is_bound(kind: np.dtype[Any]) -> bool:
    """Return whether ONNX Runtime binds an array of a type where it is."""
    return kind.kind in "biuf" and kind.name not in _NARROW


def given_value(array: Array) -> onnxruntime.OrtValue:
    """Return an array as ONNX Runtime takes it, which is in the array's memory where that is contiguous."""
    name = array.dtype.name
    if name not in _NARROW:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))
    bits = np.asarray(array, order="C").view(f"u{array.dtype.itemsize}")
    if name in _BITS:
        bits = np.resize(packed(bits.reshape(-1), _BITS[name]), array.shape)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, dtype(name).number)


def taken_value(value: Any) -> Array:
    """Return a copy of what ONNX Runtime holds."""
    kept = from_onnx(value.data_type())
    if kept is None or kept.name not in _NARROW:
        found: Array = value.numpy()
        return found
    shape: list[int] = value.shape()
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    bits = np.frombuffer(raw, f"u{kept.itemsize}")
    if kept.name in _BITS:
        bits = unpacked(bits, _BITS[kept.name], int(np.prod(shape)), signed=kept.name.startswith("int"))
    elements: Array = bits.view(kept.numpy).reshape(shape)
    return elements


def packed(elements: Array, bits: int) -> Array:
    """Bytes with so many elements each, the first in the lowest bits (ONNX, TensorProto.int32_data)."""
    per = 8 // bits
    padded = np.zeros(-(-elements.size // per) * per, np.uint8)
    padded[: elements.size] = elements & ((1 << bits) - 1)
    shifts = np.arange(per, dtype=np.uint8) * np.uint8(bits)
    whole: Array = np.bitwise_or.reduce(padded.reshape(-1, per) << shifts, axis=1)
    return whole.astype(np.uint8)


def unpacked(whole: Array, bits: int, size: int, *, signed: bool) -> Array:
    """So many elements of what `packed` gives, a byte each; signed ones are extended."""
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    elements: Array = ((whole[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:size].astype(np.uint8)
    if signed:
        sign = np.uint8(1 << (bits - 1))
        elements = (elements ^ sign) - sign
    return elements
