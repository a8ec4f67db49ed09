"""Runs node tests one after another in a process of its own: names in on stdin, results out as JSON lines."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from honed.cpu.session import Session
from honed.machine import devices
from honed.runtime.errors import HonedError, ModelRefused
from honed.tuner import frontend
from honed.tuner.compiler.verification import run_model

from . import cases

# Stages in the order a case passes them; a case's `stage` is the last it entered.
STAGES = ("load", "import", "compile", "compare")


def run_case(case: cases.Case, device: Any) -> dict[str, Any]:
    """The outcome of one case: right, wrong, refused (with a reason) or error."""
    stage = "load"
    checked = onnx.ModelProto()
    try:
        model = case.model()
        for folder in case.sets() or [case.folder]:
            given = case.data("input", folder, list(model.graph.input))
            wanted = case.data("output", folder, list(model.graph.output))
            inputs = {
                i.name: v for i, v in zip(model.graph.input, given, strict=True) if isinstance(v, np.ndarray)
            }
            frozen, left = cases.freeze(model, inputs)
            stage = "load"
            checked = _through_file(frozen)
            stage = "import"  # until it failed and `_entered` finds that it came further
            outputs = run_model(checked, left, device)
            stage = "compare"
            for info, expected in zip(model.graph.output, wanted, strict=True):
                if expected is None:
                    return {"outcome": "wrong", "stage": stage, "text": f"{info.name} has no expected tensor"}
                text = cases.difference(np.asarray(expected), outputs[info.name])
                if text is not None:
                    return {"outcome": "wrong", "stage": stage, "text": f"{info.name}: {text}"}
    except ModelRefused as refusal:
        reasons = list(refusal.reasons) or [str(refusal)]
        stage = _entered(stage, checked, device)
        return {"outcome": "refused", "stage": stage, "text": reasons[0], "reasons": reasons}
    except HonedError as error:
        stage = _entered(stage, checked, device)
        return {"outcome": "refused", "stage": stage, "text": str(error), "reasons": [str(error)]}
    except Exception as error:  # noqa: BLE001 - whatever escapes the product is what this test looks for
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where.name}:{where.lineno})"
        return {"outcome": "error", "stage": _entered(stage, checked, device), "text": text}
    return {"outcome": "right", "stage": stage, "text": ""}


def run_on_cpu(case: cases.Case) -> dict[str, Any]:
    """The outcome of one case in the CPU engine, with the model as ONNX ships it: right, wrong or refused."""
    model = case.model()
    try:
        session = Session(case.folder / "model.onnx", 1)
        for folder in case.sets() or [case.folder]:
            given = case.data("input", folder, list(model.graph.input))
            wanted = case.data("output", folder, list(model.graph.output))
            outputs = session.run({i.name: v for i, v in zip(model.graph.input, given, strict=True)})
            for info, expected in zip(model.graph.output, wanted, strict=True):
                text = cases.difference(np.asarray(expected), outputs[info.name])
                if text is not None:
                    return {"outcome": "wrong", "text": f"{info.name}: {text}"}
    except HonedError as error:
        return {"outcome": "refused", "text": str(error)}
    return {"outcome": "right", "text": ""}


def _entered(stage: str, model: onnx.ModelProto, device: Any) -> str:
    """The stage in which a case failed: importing is told from compiling by doing it once more."""
    if stage != "import":
        return stage
    try:
        frontend.import_relax(frontend.normalise(model, profile=device.profile))
    except Exception:  # noqa: BLE001 - it has been told what it is
        return "import"
    return "compile"


def _through_file(model: onnx.ModelProto) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return frontend.load(path)


def main() -> int:
    """Serve case names until stdin ends."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the results
    device = devices.select(None)
    known = cases.all_cases()
    print(json.dumps({"ready": device.profile.identity.name}), file=results)
    for line in sys.stdin:
        name = line.strip()
        result = run_case(known[name], device)
        if result["outcome"] == "refused":
            result["cpu"] = run_on_cpu(known[name])
        print(json.dumps({"name": name, **result}), file=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
