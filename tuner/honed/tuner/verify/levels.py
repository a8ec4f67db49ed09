"""Finds the highest level to which ONNX Runtime may optimise a model with equal answers.

Optimisations have faults of their own: ONNX Runtime 1.31 pads a MaxPool with minus infinity where the file
first pads with zeros. So the graph is run as the CPU engine runs it, on the probes of a compiled form, and is
compared with the reference within the same tolerance. Where the highest level differs, the next lower one is
tried. The faulty node is the first one in ONNX Runtime's graph whose value differs from the value of that
name in the model.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from honed.onnxfile.reading import MISLED, UNNAMED, clean, forget_names, nodes, read
from honed.protocol.errors import HonedError, InvalidArgument
from honed.protocol.values import OptimisationCheck
from honed.runtime.engines import HIGHEST, LEVELS, LOWEST
from honed.runtime.execution.verification import compare, differences

from . import confined, discontinuities, graphs, probes
from .confined import EvaluationLimits
from .evaluator import OPTIMISED, ReferenceFailure, at_level
from .probes import ReferenceProbes
from .tolerance import for_output

_PROBES = 3
_SIZES = (64, 256, 1, 16000)  # Sizes tried for dynamic dimensions, except for the first, which is 1
_MOST_TRIED = 3  # Numbers of rows tried, and the greatest number of elements of such inputs
_MOST_ELEMENTS = 1 << 20
_MOST_SHOWN = 4  # Operators listed for a fused node
_SEED = 0
Arrays = Mapping[str, np.ndarray]
Form = tuple[onnx.ModelProto, str]  # A model that answers in place of another, and its precision


def of_file(
    path: Path, shapes: Mapping[str, Sequence[int]], limits: EvaluationLimits, form: Form | None = None
) -> OptimisationCheck:
    """Return the highest level for a model file, as `highest` does; raises what reading the file raises."""
    model, _ = read(path)
    forget_names(model, UNNAMED)
    return highest(model, shapes, limits, form)


class _Unknown(Exception):
    """Raised when the check cannot be done; the text is what follows "because"."""


def highest(
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[int]],
    limits: EvaluationLimits,
    form: Form | None = None,
) -> OptimisationCheck:
    """Return the highest level at which ONNX Runtime answers as it does without optimisation.

    The answers are compared on generated inputs; where they cannot be, the level is the lowest. `model` is
    what the CPU engine gives to ONNX Runtime, with all of its data inside; `shapes` set dynamic sizes, others
    are made up. `limits` are for each evaluation. Answers are those of `form` if that is present.
    """
    begun = time.monotonic()
    try:
        level, error, why = _compare(model, shapes, limits, form or (model, _precision(model)))
        checked = True
    except _Unknown as unknown:
        level, error, why, checked = LOWEST, None, str(unknown), False
    seconds = round(time.monotonic() - begun, 2)
    finite = error if error is not None and math.isfinite(error) else None
    return OptimisationCheck(level=level, checked=checked, error=finite, why=why, seconds=seconds)


def _compare(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], limits: EvaluationLimits, form: Form
) -> tuple[str, float, str]:
    """Return the level, the largest error at the highest one, and the difference, "" where there is none."""
    bound, expected = _probes(model, shapes, limits, form[1])
    inputs = expected.inputs
    if (more := _batch_probe(model, bound, limits, form[1])) is not None:
        expected = replace(
            expected, inputs=(*inputs, *more.inputs), outputs=(*expected.outputs, *more.outputs)
        )
    text, error = "", 0.0
    with tempfile.TemporaryDirectory(prefix="honed-levels-") as folder:
        runs = _Runs(Path(folder), form[0], expected.inputs, limits)
        for level in LEVELS:
            if level == LOWEST:
                break
            found = runs.at(level)
            wrong, off = _objection(expected, found)
            if wrong and level == HIGHEST:
                if _objection(expected, runs.at(LOWEST))[0]:
                    if form[0] is not model:
                        raise _Unknown(wrong)
                    raise _Unknown("its answers on the same inputs differ, as of a model with random numbers")
                expected = _by_its_steps(bound, expected, len(inputs), limits)
                wrong, off = _objection(expected, found)
            if level == HIGHEST:
                text, error = wrong, off
            if not wrong:
                return level, error, text
            lowest_wrong = level
        ends = (expected.inputs[0], expected.inputs[-1])
        blamed = next(filter(None, (_blame(runs, lowest_wrong, given) for given in ends)), "")
    return level, error, f"{text}; {blamed}" if blamed else text


def _probes(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], limits: EvaluationLimits, precision: str
) -> tuple[onnx.ModelProto, ReferenceProbes]:
    """Return the model with static inputs, and its expected outputs for some.

    Raises _Unknown where no inputs are known that ONNX Runtime runs on without optimisation.
    """
    if not confined.fits(model):
        raise _Unknown("the model is larger than 2 GiB")
    reason = "its inputs are of unknown rank; add it with --shape"
    for bound in _static_models(model, shapes):
        try:
            found = probes.choose(bound, _PROBES, precision, seed=_SEED, limits=limits)
        except HonedError as error:
            reason = str(error)
            continue
        if isinstance(found, ReferenceFailure):
            reason = found.reason
            continue
        if not found.evaluator.startswith(at_level(LOWEST)):
            reason = f"without optimisation, on inputs that were made up, {found.notes[0]}"
            continue
        if found.unproven and max(found.covered) < probes.ENOUGH:
            reason = found.unproven
            continue
        return bound, found
    raise _Unknown(clean(reason, 300))


def _batch_probe(
    model: onnx.ModelProto, bound: onnx.ModelProto, limits: EvaluationLimits, precision: str
) -> ReferenceProbes | None:
    """Return one probe of more rows than 1, where the file leaves their number dynamic and accepts some.

    The number of rows equals another size if possible: that reveals work along the wrong axis, or lets it run
    at all.
    """
    wanted = {
        value.name: value.type.tensor_type.shape.dim
        for value in model.graph.input
        if value.type.tensor_type.shape.dim
    }
    shapes = {value.name: value.shape for value in graphs.inputs(bound) if value.name in wanted}
    batched = {name: shapes[name][1:] for name in shapes if not wanted[name][0].HasField("dim_value")}
    room = _MOST_ELEMENTS // max(1, sum(math.prod(rest) for rest in batched.values()))
    sizes = dict.fromkeys(size for rest in batched.values() for size in reversed(rest) if 1 < size <= room)
    for rows in (*list(sizes)[:_MOST_TRIED], 2) if batched else ():
        try:
            several = graphs.bind_shapes(model, shapes | {n: (rows, *rest) for n, rest in batched.items()})
            found = probes.choose(several, 1, precision, seed=_SEED, limits=limits)
        except HonedError:
            continue
        if isinstance(found, ReferenceProbes) and found.evaluator.startswith(at_level(LOWEST)):
            return found
    return None


def _static_models(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> Iterator[onnx.ModelProto]:
    """Yield the model with static inputs, once for each size that is tried."""
    wanted = graphs.input_names(model)
    values = {v.name: v.type.tensor_type for v in model.graph.input if v.name in wanted}
    known = {name: tuple(shape) for name, shape in shapes.items() if name in values}
    kinds = {name: kind for name, kind in values.items() if name not in known}
    if any(not kind.HasField("shape") for kind in kinds.values()):
        return
    if all(dim.HasField("dim_value") for kind in kinds.values() for dim in kind.shape.dim):
        yield graphs.bind_shapes(model, known) if known else model
        return
    for size in _SIZES:
        made = {
            name: tuple(
                dim.dim_value if dim.HasField("dim_value") else 1 if place == 0 else size
                for place, dim in enumerate(kind.shape.dim)
            )
            for name, kind in kinds.items()
        }
        yield graphs.bind_shapes(model, known | made)


def _precision(model: onnx.ModelProto) -> str:
    """Return the coarsest precision of the model's arithmetic, as `tolerance.for_output` takes it."""
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    types |= {each.i for node in nodes(model.graph.node) for each in node.attribute if node.op_type == "Cast"}
    if types & {TensorProto.FLOAT16, TensorProto.BFLOAT16}:
        return "fp16"
    return "fp64" if TensorProto.DOUBLE in types and TensorProto.FLOAT not in types else "fp32"


def _objection(expected: ReferenceProbes, actual: Sequence[Arrays] | str) -> tuple[str, float]:
    """Return the largest difference in words, and the largest error.

    The text is "" where no output is off by more than its tolerance.
    """
    if isinstance(actual, str):
        return f"ONNX Runtime does not run it so: {actual}", float("inf")
    worst, text = 0.0, ""
    for wanted, made in zip(expected.outputs, actual, strict=True):
        try:
            off = differences(wanted, made, expected.tolerance, expected.selections)
        except InvalidArgument as error:
            return str(error), float("inf")
        for difference in off:
            if not difference.right and (not text or difference.error > worst):
                text = str(difference)
            worst = max(worst, difference.error)
    return text, worst


def _by_its_steps(
    bound: onnx.ModelProto, expected: ReferenceProbes, count: int, limits: EvaluationLimits
) -> ReferenceProbes:
    """Return the probes, compared as a model with steps is: near-equal scores may change places.

    The first `count` inputs are of the shapes of `bound`.
    """
    inputs, outputs, usual = expected.inputs[:count], expected.outputs[:count], expected.tolerance
    return replace(
        expected,
        tolerance=discontinuities.allowance(bound, inputs, usual, limits),
        selections=discontinuities.selections(bound, inputs, outputs, usual, limits),
    )


@dataclass(slots=True)
class _Runs:
    """Runs of one model on the same inputs, each in a child process, with its files in `folder`."""

    folder: Path
    model: onnx.ModelProto
    inputs: Sequence[Arrays]
    limits: EvaluationLimits

    def __post_init__(self) -> None:
        confined.write(self.folder, self.model, graphs.input_names(self.model), self.inputs)

    def at(self, level: str, *more: str) -> Sequence[Arrays] | str:
        """Return the outputs for each set of inputs, or why there are none.

        Raises _Unknown where time or memory do not suffice.
        """
        arguments = (at_level(level), "--sets", str(len(self.inputs)), *more)
        deadline = time.monotonic() + self.limits.seconds
        result = confined.run("honed.tuner.verify.evaluator", self.folder, arguments, self.limits, deadline)
        if "failure" not in result:
            names = graphs.outputs(self.model)
            return [
                {name: np.load(self.folder / f"output.{i}.{j}.npy") for j, name in enumerate(names)}
                for i in range(len(self.inputs))
            ]
        if MISLED in result["failure"] and forget_names(self.model):
            self.__post_init__()
            return self.at(level, *more)
        if result["kind"] not in ("failed", "inputs"):  # The unoptimised model accepts these inputs
            raise _Unknown(result["failure"])
        return str(result["failure"])


def _blame(runs: _Runs, level: str, inputs: Arrays) -> str:
    """Return a sentence on the first node that differs in ONNX Runtime's graph at `level`; "" if none."""
    try:
        runs.at(level, "--write")
        made = onnx.load(runs.folder / OPTIMISED)
        known = {*_values(runs.model.graph), *graphs.outputs(runs.model)}
        shared = [name for name in _values(made.graph) if name in known]
        plain, optimised = (
            _all_of(model, shared, inputs, runs.folder / place, runs.limits)
            for model, place in ((runs.model, "plain"), (made, "made"))
        )
    except (OSError, HonedError, _Unknown, ValueError):
        return ""
    for name in shared:
        if name in plain and name in optimised and _differs(plain[name], optimised[name]):
            return _sentence(runs.model.graph, made.graph, name, level)
    return ""


def _all_of(
    model: onnx.ModelProto, names: Sequence[str], inputs: Arrays, folder: Path, limits: EvaluationLimits
) -> Arrays:
    """Return the values of these names, computed without further optimisation.

    Returns none where the model cannot expose them.
    """
    folder.mkdir()
    shows = graphs.copy_model(model)
    there = set(graphs.outputs(model))
    shows.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    found = _Runs(folder, shows, [inputs], limits).at(LOWEST)
    return {} if isinstance(found, str) else found[0]


def _differs(plain: np.ndarray, actual: np.ndarray) -> bool:
    if not graphs.is_carried(plain.dtype.name):
        return False
    try:
        return not compare(plain, actual, for_output(plain.dtype.name, "fp32", depth=64)).right
    except InvalidArgument:
        return False  # The value is laid out differently


def _values(graph: onnx.GraphProto) -> list[str]:
    return [name for node in graph.node for name in node.output if name]


def _sentence(plain: onnx.GraphProto, optimised: onnx.GraphProto, value: str, level: str) -> str:
    """Return a sentence on which node makes a value, and which nodes of the file it stands for."""
    node = next(each for each in optimised.node if value in each.output)
    kept = set(_values(optimised))
    by = {name: each for each in plain.node for name in each.output}
    stands: list[onnx.NodeProto] = []
    waiting = [value]
    while waiting:
        source = by.get(waiting.pop())
        if source is None or source in stands:
            continue
        stands.append(source)
        waiting += [name for name in source.input if name not in kept]
    names = [f"{each.op_type} {clean(graphs.label(each), 60)!r}" for each in reversed(stands)]
    text = ", ".join(names[-_MOST_SHOWN:])
    what = f"{node.op_type} {clean(graphs.label(node), 60)!r}"
    return f"optimised to level {level}, ONNX Runtime runs {what} for {text}"
