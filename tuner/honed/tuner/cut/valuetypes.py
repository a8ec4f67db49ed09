"""Types and shapes of values that ONNX's inference does not know, as of operators that others define.

ONNX Runtime is asked, in a child process that is bounded as the reference is, because the model is untrusted:
`python -m honed.tuner.cut.valuetypes FOLDER ...`. It reads `model.onnx` and `names.json` from FOLDER and
writes what it knows as `result.json`, by name: a NumPy dtype, and sizes, -1 where they depend on the data.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import onnx

from honed.tuner.frontend.signature import TensorSpec
from honed.tuner.prove import confined

LIMITS = confined.EvaluationLimits(seconds=60.0)
_log = logging.getLogger(__name__)
_NAMES = {"float": "float32", "double": "float64"}


def ask(model: onnx.ModelProto, names: Iterable[str]) -> dict[str, TensorSpec]:
    """What ONNX Runtime knows of values of a model with static inputs; nothing where it cannot load it."""
    if model.ByteSize() > confined.MAX_MODEL:
        return {}
    with tempfile.TemporaryDirectory(prefix="honed-types-") as name:
        folder = Path(name)
        confined.write(folder, model, (), ())
        (folder / "names.json").write_text(json.dumps(sorted(names)))
        found = confined.run(
            "honed.tuner.cut.valuetypes", folder, (), LIMITS, time.monotonic() + LIMITS.seconds
        )
    if failure := found.get("failure"):
        _log.debug("ONNX Runtime tells no types of the model's values: %s", failure)
    return {
        name: TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
        for name, (dtype, shape) in found.get("types", {}).items()
    }


def main(argv: list[str] | None = None) -> int:
    """Tell of the values; the exit status is 0 wherever a result was written."""
    folder = confined.parser("honed.tuner.cut.valuetypes").parse_args(argv).folder
    return confined.answer(folder, lambda: {"types": _types(folder)})


def _types(folder: Path) -> dict[str, tuple[str, list[int]]]:
    import onnxruntime

    model = onnx.load(folder / confined.MODEL)
    names = json.loads((folder / "names.json").read_text())
    there = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return {
        node.name: (_dtype(str(node.type)), [size if isinstance(size, int) else -1 for size in node.shape])
        for node in session.get_outputs()
        if node.name in names and node.type.startswith("tensor(")
    }


def _dtype(kind: str) -> str:
    kind = kind.removeprefix("tensor(").removesuffix(")")
    return _NAMES.get(kind, kind)


if __name__ == "__main__":
    raise SystemExit(main())
