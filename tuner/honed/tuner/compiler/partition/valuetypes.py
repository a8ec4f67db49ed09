"""Finds types and shapes of values that ONNX's inference lacks, as those of other domains' operators.

ONNX Runtime infers them, in a child process with the limits of the reference, because the model is untrusted:
`python -m honed.tuner.compiler.partition.valuetypes FOLDER ...`. It reads `model.onnx`, `names.json` and one
set of inputs from FOLDER and answers by name with a NumPy dtype, and sizes, -1 where they depend on the data.

ONNX Runtime does not distinguish a scalar from a tensor of unknown rank, so the child also runs the model and
returns the shapes of values, not the values: ranks that are unknown otherwise, and sizes that show where an
inference is wrong. The rank of a value without elements remains unknown: the output that a Loop gathers over
no steps has one dimension, whatever its rank otherwise.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from honed.protocol.errors import InvalidArgument, ModelRefused
from honed.runtime.engines import LOWEST, session_options
from honed.tuner.frontend.signature import CARRIED
from honed.tuner.frontend.survey import Learnt
from honed.tuner.verify import confined
from honed.tuner.verify.inputs import Inputs

LIMITS = confined.EvaluationLimits(seconds=60.0)
_RUNS = 3  # Runs at most
_log = logging.getLogger(__name__)
_NAMES = {"float": "float32", "double": "float64"}


def ask(model: onnx.ModelProto, names: Iterable[str]) -> dict[str, Learnt]:
    """Return ONNX Runtime's types and shapes of values of a model with static inputs.

    Returns nothing where ONNX Runtime cannot load the model.
    """
    if not confined.fits(model):
        return {}
    with tempfile.TemporaryDirectory(prefix="honed-types-") as name:
        folder = Path(name)
        given = _inputs(model)
        confined.write(folder, model, sorted(given[0]) if given else (), given)
        (folder / "names.json").write_text(json.dumps(sorted(names)))
        found = confined.run(
            "honed.tuner.compiler.partition.valuetypes",
            folder,
            ("--sets", str(len(given))),
            LIMITS,
            time.monotonic() + LIMITS.seconds,
        )
    if failure := found.get("failure"):
        _log.debug("ONNX Runtime tells no types of the model's values: %s", failure)
    return {
        name: Learnt(dtype, *(None if shape is None else tuple(shape) for shape in shapes))
        for name, (dtype, *shapes) in found.get("types", {}).items()
        if dtype in CARRIED
    }


def _inputs(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """Return sets of inputs, or none where none can be generated."""
    try:
        return Inputs(model).draw(_RUNS)
    except (ModelRefused, InvalidArgument) as refused:
        _log.debug("the model is not run for the ranks of its values: %s", refused)
        return []


def main(argv: list[str] | None = None) -> int:
    """Answer with the types of the values; the exit status is 0 wherever it answered."""
    args = confined.parser("honed.tuner.compiler.partition.valuetypes").parse_args(argv)
    return confined.answer(lambda: {"types": _types(args.folder, args.sets)})


def _types(folder: Path, sets: int) -> dict[str, tuple[str, list[int] | None, list[int] | None]]:
    """Return for each value its dtype, its shape as ONNX Runtime infers it, and as a run has it."""
    model = onnx.load(folder / confined.MODEL)
    names = json.loads((folder / "names.json").read_text())
    there = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    infos = [node for node in _session(model).get_outputs() if node.type.startswith("tensor(")]
    known = {node.name: node for node in infos if node.name in names}
    observed = _run(folder, model, list(known), sets)
    kinds = {name: node.type.removeprefix("tensor(").removesuffix(")") for name, node in known.items()}
    return {
        name: (_NAMES.get(kinds[name], kinds[name]), _sizes(node.shape), observed.get(name))
        for name, node in known.items()
    }


def _run(folder: Path, model: onnx.ModelProto, names: Sequence[str], sets: int) -> dict[str, list[int]]:
    """Run the model and return the shapes of values that have elements; nothing where the run fails.

    The shape is that of the first set of inputs for which a value has any.
    """
    inputs = sorted(value.name for value in model.graph.input)
    del model.graph.output[:]
    for n, name in enumerate(names):
        shape = f"{name}, shape {n}"
        model.graph.node.append(onnx.helper.make_node("Shape", [name], [shape]))
        model.graph.output.append(onnx.ValueInfoProto(name=shape))
    observed: dict[str, list[int]] = {}
    for given in confined.sets_in(folder, inputs, sets):
        if len(observed) == len(names):
            break
        try:
            found = zip(names, _session(model).run(None, given), strict=True)
        except Exception as error:  # noqa: BLE001  types that are known without a run remain valid
            _log.debug("the model does not run: %s", error)
            break
        observed = {name: shape.tolist() for name, shape in found if shape.all()} | observed
    return observed


def _session(model: onnx.ModelProto) -> Any:
    """Return a session of ONNX Runtime that does not optimise the graph."""
    import onnxruntime

    options = session_options(onnxruntime, 0, LOWEST, spinning=True)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _sizes(shape: Sequence[int | str | None]) -> list[int] | None:
    """Return a shape as ONNX Runtime infers it; None for [], which may be a scalar's or an unknown one."""
    return [size if isinstance(size, int) else -1 for size in shape] or None


if __name__ == "__main__":
    raise SystemExit(main())
