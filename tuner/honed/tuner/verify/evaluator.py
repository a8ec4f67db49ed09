"""Evaluates the original model with an evaluator that shares no code with TVM or the frontend.

It is ONNX Runtime where that is installed and can run the model, else ONNX's reference evaluator; each runs
in a child process, with limits of time and memory, because the model is untrusted. Errors are return values.

The child is `python -m honed.tuner.verify.evaluator FOLDER EVALUATOR ...`. It reads `model.onnx` and
`input.SET.NUMBER.npy` from FOLDER, writes `output.SET.NUMBER.npy` there and then answers
`{"evaluator": "name version", "seconds": SECONDS}`, those of the shortest run, or
`{"failure": "one sentence", "kind": KIND}` where KIND is "failed" (try another evaluator), "inputs" (it runs
the model, but not on these inputs) or "memory". ONNX Runtime runs the graph unchanged, or optimised to the
level in the evaluator's name (`at_level`); with `--write` it writes its graph of the model to `OPTIMISED`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from honed.process.limits import keep_freed, out_of_memory
from honed.protocol.errors import ModelRefused
from honed.runtime.dtypes import DTYPES
from honed.runtime.engines import LEVELS, LOWEST, session_options

from . import confined
from .confined import DEFAULT_LIMITS, EvaluationFailed, EvaluationLimits, LoadedEvaluator

if TYPE_CHECKING:  # A child that runs ONNX Runtime does not need it, and starts in half the time without it
    import onnx

EVALUATORS = ("onnxruntime", "reference")  # Evaluators in the order of trial
OPTIMISED = "optimised.onnx"


def at_level(level: str) -> str:
    """Return the name of the evaluator that is ONNX Runtime at one of `LEVELS`."""
    return EVALUATORS[0] if level == LOWEST else f"{EVALUATORS[0]}, {level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The results of the reference: for every set of inputs, the outputs by name, in the model's order."""

    outputs: tuple[dict[str, np.ndarray], ...]
    evaluator: str  # Name and version, "onnxruntime 1.20.0"
    note: str | None  # Reason why the first evaluator was not used, one sentence
    seconds: float  # Time of the shortest run


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFailure:
    """The failure of all evaluators within their limits; `reason` is one sentence.

    `inputs`: the last evaluator tried runs the model, but not on these inputs.
    """

    reason: str
    inputs: bool = False

    def refusal(self) -> ModelRefused:
        """Return the refusal of a model that this failure leaves without a proof."""
        why = f"the model's answers cannot be verified, so it is not served: {self.reason}"
        return ModelRefused(why, (self.reason,))


def evaluate(
    model: onnx.ModelProto,
    inputs: Sequence[Mapping[str, np.ndarray]],
    limits: EvaluationLimits = DEFAULT_LIMITS,
    evaluators: Sequence[str] = EVALUATORS,
    *,
    more: Sequence[Mapping[str, np.ndarray]] = (),
    first: int = 0,
) -> Reference | ReferenceFailure:
    """Run the model, with static shapes and all its tensors inside, on every set of inputs.

    `more` are sets of inputs after the others, of whose outputs only the `first` are returned. `evaluators`
    are tried in order ("onnxruntime", "reference"); one that runs out of time or memory ends the evaluation,
    after other failures the next is tried. Raises InvalidArgument where honed does not support the inputs or
    shapes of the model.
    """
    from . import graphs

    names = [v.name for v in graphs.inputs(model)]
    if not confined.fits(model):
        return ReferenceFailure(reason="the model is larger than 2 GiB, more than the reference can be given")
    deadline = time.monotonic() + limits.seconds
    reasons: list[str] = []
    with tempfile.TemporaryDirectory(prefix="honed-reference-") as folder:
        place = Path(folder)
        confined.write(place, graphs.exact(model), names, [*inputs, *more])
        for evaluator in evaluators:
            sets = str(len(inputs) + len(more))
            arguments = (evaluator, "--sets", sets, "--few", str(len(more)), "--first", str(first))
            result = confined.run("honed.tuner.verify.evaluator", place, arguments, limits, deadline)
            if "evaluator" in result:
                outputs = graphs.outputs(model)
                return Reference(
                    outputs=_read(place, [outputs] * len(inputs) + [outputs[:first]] * len(more)),
                    evaluator=result["evaluator"],
                    note="; ".join(reasons) or None,
                    seconds=result["seconds"],
                )
            reasons.append(f"{evaluator} could not evaluate the model: {result['failure']}")
            if result["kind"] not in ("failed", "inputs"):
                break
    return ReferenceFailure(reason="; ".join(reasons), inputs=result["kind"] == "inputs")


_MAPPED = 1 << 20  # Bytes; larger values are mapped, which takes no memory until they are read


def _read(folder: Path, sets: Sequence[Sequence[str]]) -> tuple[dict[str, np.ndarray], ...]:
    """Return the outputs of these names for each set."""

    def value(path: Path) -> np.ndarray:
        mapped = path.stat().st_size > _MAPPED
        return np.asarray(np.load(path, mmap_mode="r" if mapped else None))

    return tuple(
        {name: value(folder / f"output.{i}.{j}.npy") for j, name in enumerate(names)}
        for i, names in enumerate(sets)
    )


def main(argv: list[str] | None = None) -> int:
    """Evaluate as the command line says; the exit status is 0 wherever it answered."""
    parser = confined.parser("honed.tuner.verify.evaluator")
    parser.add_argument("evaluator", choices=(*EVALUATORS, *map(at_level, LEVELS)))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--few", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args(argv)
    written = args.folder / OPTIMISED if args.write else None
    keep_freed(32 << 20)  # Without an arena ONNX Runtime frees the values of each node
    return confined.answer(lambda: _evaluate(args, written))


def _evaluate(args: argparse.Namespace, written: Path | None) -> dict[str, object]:
    folder: Path = args.folder
    path = folder / confined.MODEL
    level = next((level for level in LEVELS if at_level(level) == args.evaluator), None)
    if level is None:
        from . import operators

        running = operators.reference(path)
    else:
        running = _onnxruntime(path, args.threads, level, written)
    shortest = float("inf")
    for i, feeds in enumerate(confined.sets_in(folder, running.inputs, args.sets)):
        began = time.perf_counter()
        values = running.run(feeds)
        shortest = min(shortest, time.perf_counter() - began)
        made = list(zip(running.outputs.items(), values, strict=True))
        wanted = made if i < args.sets - args.few else made[: args.first]
        for j, ((name, declared), value) in enumerate(wanted):
            np.save(folder / f"output.{i}.{j}.npy", _as_declared(name, value, declared), allow_pickle=False)
    return {"evaluator": running.evaluator, "seconds": shortest}


def _onnxruntime(path: Path, threads: int, level: str, written: Path | None) -> LoadedEvaluator:
    """Return ONNX Runtime on the CPU, at a level of optimisation; `written` gets the graph that it runs."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise EvaluationFailed("onnxruntime is not installed") from error
    onnxruntime.set_default_logger_severity(4)
    if not hasattr(onnxruntime.GraphOptimizationLevel, LEVELS[level]):
        raise EvaluationFailed(f"this version of onnxruntime has no level {level!r}")
    options = session_options(onnxruntime, threads, level, spinning=False, arena=False)
    if written is not None:
        options.optimized_model_filepath = str(written)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(feeds: dict[str, np.ndarray]) -> list[object]:
        try:
            return list(session.run(None, feeds))
        except Exception as error:
            if out_of_memory(error):
                raise
            raise confined.InputsRefused(confined.one_line(error)) from error

    given, made = ([v.name for v in values] for values in (session.get_inputs(), session.get_outputs()))
    return LoadedEvaluator(f"onnxruntime {onnxruntime.__version__}", given, dict.fromkeys(made), run)


def _as_declared(name: str, value: object, declared: str | None) -> np.ndarray:
    """Return the value as an array of the declared type; only rounding of floats is allowed on the way."""
    if isinstance(value, (list, tuple, dict)) or value is None:
        raise EvaluationFailed(f"output {name!r} is not a tensor")
    array = np.asarray(value)
    if declared is None:
        if any(array.dtype.name == known.name for known in DTYPES):
            return array
        raise EvaluationFailed(f"output {name!r} is of type {array.dtype}, which honed does not carry")
    if array.dtype != declared and not (array.dtype.kind == "f" == np.dtype(declared).kind):
        raise EvaluationFailed(f"output {name!r} came as {array.dtype} where the model says {declared}")
    return array.astype(declared, copy=False)


if __name__ == "__main__":
    raise SystemExit(main())
