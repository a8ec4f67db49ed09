"""Decides for a model whether and where it is computed in fp16 (`--precision auto`), and says why."""

from __future__ import annotations

import math
import tempfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from numpy.lib import format as npy
from onnx import helper

from honed.machine.families import mali_model
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import InvalidArgument, ModelRefused
from honed.protocol.strict import SchemaError, from_plain
from honed.runtime.calling.files import calibration_files
from honed.runtime.compiled.model import CompiledModel, PrecisionChoice
from honed.tuner.frontend import Normalised
from honed.tuner.frontend.normalise import all_single, in_half, normalise
from honed.tuner.frontend.signature import StaticTensorSpec
from honed.tuner.frontend.walk import PART_OP
from honed.tuner.graph.fp16_casts import PRODUCTS, Array, Exemptions, operators
from honed.tuner.verify import confined
from honed.tuner.verify.graphs import bind_shapes
from honed.tuner.verify.inputs import Inputs

from .child import BOUND, PrecisionAnswer

LIMITS = confined.EvaluationLimits(seconds=60.0)
_SETS = 3  # Sets generated where the user gave none
# Least ratio of fp16's peak to float32's. Below it, casts and operators kept in float32 use up the gain.
LEAST_GAIN = 1.25
_LEAST_SHARE = 0.5  # Least share of the multiply-adds in fp16; below it, the gain is small


def decide(
    model: onnx.ModelProto,
    normalised: Normalised,
    profile: DeviceProfile | None,
    *,
    calibration: Path | None = None,
    like: CompiledModel | None = None,
) -> PrecisionChoice:
    """Return the precision to compute a model in, with the reason.

    `model` is the model as given, `normalised` keeps its own types. Without a `profile` the device is known
    to compute fp16 faster. `calibration` is a folder with the user's inputs. `like` is a compiled model of
    this model whose choice is used again, unless another version of honed made it and names operators
    differently. Raises InvalidArgument where the inputs do not fit.
    """
    if like is not None:
        earlier = like.source.choice or PrecisionChoice(half=False, why="as it was compiled before")
        if _fits(earlier, normalised):
            return earlier
    given = calibration_sets(calibration, normalised.inputs) if calibration is not None else None
    why = _why_own(normalised, profile)
    if why:
        return PrecisionChoice(half=False, why=why)
    if given is None:
        try:
            bound = bind_shapes(model, {spec.name: spec.shape for spec in normalised.inputs})
            given = Inputs(bound, preconditions=normalised.preconditions).draw(_SETS)
        except (InvalidArgument, ModelRefused) as error:
            return PrecisionChoice(half=False, why=f"no inputs to try fp16 on could be made up: {error}")
    found = _try_in_child(normalised.model, given)
    if isinstance(found, str):
        return PrecisionChoice(half=False, why=f"fp16 could not be tried: {found}")
    origin = "made-up" if calibration is None else "given"
    return _choice(found, f"on {found.sets} {origin} input{'s' if found.sets > 1 else ''}")


def apply(choice: PrecisionChoice, normalised: Normalised) -> Normalised:
    """Return the model in the chosen precision. Raises InvalidArgument where the choice does not fit it."""
    if not choice.half:
        return normalised
    if not _fits(choice, normalised):
        raise InvalidArgument("what is in fp16 was chosen for another model; choose for this one")
    return in_half(normalised, Exemptions(single=frozenset(choice.single), wide=frozenset(choice.wide)))


def onnx_form(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return a model of float32 and static shapes in fp16, as ONNX Runtime runs it, and its precision.

    Inputs and outputs stay as they are. Raises ModelRefused with the reason where there is no such form.
    """
    normalised = normalise(model)
    choice = decide(model, normalised, None)
    if not choice.half:
        raise ModelRefused(choice.why)
    # Products of halves give halves in ONNX.
    keep = Exemptions(single=frozenset((*choice.single, *choice.wide)))
    products = {n.output[0] for n in normalised.model.graph.node if n.op_type in PRODUCTS}
    if products <= keep.single:
        raise ModelRefused("its sums of products stay in float32")
    half = in_half(normalised, keep)
    graph = half.model.graph
    if [info.name for info in graph.output] != [spec.name for spec in half.outputs]:
        raise ModelRefused("an output of the model is called as an input")
    for given, ends, specs in ((True, graph.input, half.inputs), (False, graph.output, half.outputs)):
        for info, spec in zip(ends, specs, strict=True):
            kind, wanted = info.type.tensor_type.elem_type, spec.type_proto()
            if kind == wanted.tensor_type.elem_type:
                continue
            inner = f"{info.name}/inner"
            for node in graph.node:
                node.input[:] = [inner if name == info.name else name for name in node.input]
                node.output[:] = [inner if name == info.name else name for name in node.output]
            if given:
                graph.node.insert(0, helper.make_node("Cast", [info.name], [inner], to=kind))
            else:
                cast = helper.make_node("Cast", [inner], [info.name], to=wanted.tensor_type.elem_type)
                graph.node.append(cast)
            info.type.CopyFrom(wanted)
    _join_clips(graph)
    return half.model, half.precision


def _join_clips(graph: onnx.GraphProto) -> None:
    """Turn each Max and Min that normalising made of a Clip back into one, in place: ORT fuses Clips."""
    constants = {tensor.name for tensor in graph.initializer if not tensor.dims}
    makers = {node.output[0]: node for node in graph.node}
    reads = Counter([name for node in graph.node for name in node.input] + [o.name for o in graph.output])
    for node in list(graph.node):
        low = makers.get(node.input[0]) if node.op_type == "Min" and len(node.input) == 2 else None
        if low is None or low.op_type != "Max" or len(low.input) != 2 or reads[low.output[0]] != 1:
            continue
        if {node.input[1], low.input[1]} <= constants:
            node.op_type = "Clip"
            node.input[:] = [*low.input, node.input[1]]
            graph.node.remove(low)


def _fits(choice: PrecisionChoice, normalised: Normalised) -> bool:
    """Return whether the model has all operators that the choice names."""
    if not choice.half:
        return True
    known = {n.output[0] for n in operators(normalised.model.graph)}
    return all_single(normalised.model.graph) and known >= {*choice.single, *choice.wide}


def _why_own(normalised: Normalised, profile: DeviceProfile | None) -> str:
    """Return why fp16 need not be tried."""
    if not all_single(normalised.model.graph):
        return "the model's own types, which are not all float32"
    if any(node.op_type == PART_OP for node in normalised.model.graph.node):
        return "the model's own types, because the CPU engine runs parts in between"
    if not confined.fits(normalised.model):
        return "the model is too large to try fp16 on it"
    return why_not_half(profile) if profile is not None else ""


def why_not_half(profile: DeviceProfile) -> str:
    """Return why fp16 does not pay on a device, "" where it does.

    The device's measured peaks decide; where there are none, the figures of its Mali model.
    """
    if not profile.limits.fp16:
        return "the device has no fp16 arithmetic"
    gain = _gain(profile)
    if gain is None:
        return "the device's peaks were not measured, so that it is not known whether it computes fp16 faster"
    if gain < LEAST_GAIN:
        return f"the device computes fp16 {gain:.2f} times as fast as fp32; it pays from {LEAST_GAIN:g} on"
    return ""


def _gain(profile: DeviceProfile) -> float | None:
    peaks, model = profile.peaks, mali_model(profile.identity.name)
    if peaks is not None:
        return peaks.fp16_gflops / peaks.fp32_gflops if peaks.fp16_gflops else None
    return model.fma_fp16 / model.fma_fp32 if model is not None else None


def _try_in_child(model: onnx.ModelProto, sets: Sequence[Mapping[str, np.ndarray]]) -> PrecisionAnswer | str:
    """Return the decision of a child process, or why it made none."""
    with tempfile.TemporaryDirectory(prefix="honed-mixed-") as name:
        folder = Path(name)
        confined.write(folder, model, [info.name for info in model.graph.input], sets)
        more = ("--sets", str(len(sets)))
        deadline = time.monotonic() + LIMITS.seconds
        found: dict[str, Any] = confined.run(
            "honed.tuner.mixed_precision.child", folder, more, LIMITS, deadline
        )
    if "failure" in found:
        return str(found["failure"])
    try:
        return from_plain(PrecisionAnswer, found, where="answer")
    except SchemaError as error:
        return str(error)


def _choice(answer: PrecisionAnswer, on: str) -> PrecisionChoice:
    if answer.plain is None:
        return PrecisionChoice(
            half=False, why="trying fp16 would take too long; --precision fp16 takes it untried"
        )
    if answer.single is None or answer.error is None:
        error = f"errs by {answer.plain:.2g} of its range"
        error = "overflows or changes" if math.isinf(answer.plain) else error
        why = f"in fp16 output {answer.output!r} {error} {on}, {BOUND:.2g} is allowed"
        return PrecisionChoice(half=False, why=why)
    if answer.halves < _LEAST_SHARE:
        return PrecisionChoice(
            half=False,
            why=f"for an error within {BOUND:.2g} of an output's range {on} "
            f"{1 - answer.halves:.0%} of the work would stay in float32",
        )
    kept = f"{len(answer.single)} of {answer.operators} operators kept in float32"
    added = f"{len(answer.wide)} of {answer.products} products added up in float32"
    error = f"largest error {answer.error:.2g} of an output's range {on}, {BOUND:.2g} is allowed"
    return PrecisionChoice(half=True, why=f"{error}; {kept}, {added}", single=answer.single, wide=answer.wide)


# Errors of zipfile and NumPy for files that are damaged, encrypted, of another type or compression.
_DAMAGED = (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)


def calibration_sets(folder: Path, inputs: Sequence[StaticTensorSpec]) -> list[dict[str, Array]]:
    """Return the sets of inputs in a folder, in the order of their files' names.

    Raises InvalidArgument where there is none, or one does not fit the inputs of the model.
    """
    return [_load_set(path, inputs) for path in calibration_files(folder)]


def _load_set(path: Path, inputs: Sequence[StaticTensorSpec]) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_names(path, {name.removesuffix(".npy") for name in archive.namelist()}, inputs)
            for spec in inputs:
                with archive.open(f"{spec.name}.npy") as member:
                    _check_header(path, member, spec)
        with np.load(path, allow_pickle=False) as arrays:
            found = {spec.name: np.asarray(arrays[spec.name]) for spec in inputs}
    except _DAMAGED as error:
        raise InvalidArgument(
            f"calibration file {path.name} is no .npz file, or damaged; write it with numpy.savez"
        ) from error
    for name, value in found.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise InvalidArgument(
                f"in calibration file {path.name} {name!r} holds NaN or infinity; give finite values"
            )
    return found


def _check_names(path: Path, names: set[str], inputs: Sequence[StaticTensorSpec]) -> None:
    wanted = ", ".join(repr(spec.name) for spec in inputs)
    for spec in inputs:
        if spec.name not in names:
            raise InvalidArgument(
                f"calibration file {path.name} has no {spec.name!r}; give one array for each input: {wanted}"
            )
    for name in sorted(names - {spec.name for spec in inputs}):
        raise InvalidArgument(
            f"calibration file {path.name} has {name[:80]!r}, no input of the model; it takes {wanted}"
        )


def _check_header(path: Path, member: IO[bytes], spec: StaticTensorSpec) -> None:
    """Check type and shape before memory is allocated for them."""
    first = npy.read_magic(member) == (1, 0)
    shape, _, dtype = (npy.read_array_header_1_0 if first else npy.read_array_header_2_0)(member)
    if dtype != spec.numpy or shape != spec.shape:
        raise InvalidArgument(
            f"in calibration file {path.name} {spec.name!r} is {dtype}{list(shape)} and the model takes "
            f"{spec.dtype}{list(spec.shape)}; convert it"
        )
