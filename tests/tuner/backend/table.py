"""Writes docs/operators.md from the rules and the list of node tests that are right.

python -m tests.tuner.backend.table
"""

from __future__ import annotations

import collections
import inspect
from pathlib import Path

import onnx

from honed.onnxfile.contrib_schemas import RUNTIMES_OWN
from honed.tuner.frontend.builder import schema
from honed.tuner.frontend.call import RULES
from honed.tuner.frontend.flow import MAX_TRIPS
from honed.tuner.frontend.load import MAX_OPSET
from honed.tuner.frontend.rules import FAMILIES
from honed.tuner.frontend.values import UNSUPPORTED
from honed.tuner.prove.probes import OPERATORS as SPECIALS

from . import cases
from .run import RIGHT_LIST

TARGET = Path(__file__).parents[3] / "docs" / "operators.md"
_HEAD = f"""# Operators

What becomes of each operator of ONNX (opsets 1 to {MAX_OPSET}) when a model is compiled. This file is
written by `python -m tests.tuner.backend.table`.

Every operator is rewritten, while compiling, into a small core set with static shapes; shapes, axes, pads and
other parameters must be constants or follow from shapes. Operators without a rule of their own are expanded
where ONNX defines them as a function. What cannot be compiled is refused at once, with every operator and
node concerned.

Node tests: how many of ONNX's own tests of the operator give the right answers through the whole pipeline on
PoCL; the others are refused with a reason (element types that honed does not carry, sequences and optionals
as inputs or outputs, results whose number depends on values).

ONNX Runtime's own operators (com.microsoft, and LayerNormalization at any opset) are as its optimisers and
quantisers write them, and round as its kernels do. A node with an attribute that is not supported is refused
for that one reason, and runs in the CPU engine where there is one.

Indices computed at run time never read or write outside a tensor: reads are clamped into range, updates out
of range are dropped.

## NaN and infinities

NaN and infinities give what they give in ONNX Runtime without optimisation, but in the operators below.
ONNX Runtime itself has no rule for most of these: its ReduceMax gives NaN where NaN comes first, its MaxPool
in windows of some shapes, and makes -3.4e38 of -inf in others. Sign of NaN is NaN, in fp16 0. A softmax over
a row with NaN is NaN. Where none of these operators is in a model, it is also compared with ONNX Runtime on
inputs that hold NaN and infinities, and what differs is among the notes of `hone show`. A request with
`finite` refuses inputs that hold NaN or infinities, whatever the model.

What carrying NaN on would take was measured on PoCL on an EPYC, in float32, with both kernels run in turns:
MaxPool of 3 x 3 at every second place of 64 x 112 x 112 2.0 times as long, ReduceMax of all of it 3.0 times
(medians of 300 pairs), ArgMax over 1000 1.3 times (the fastest of 400 runs, 0.98 and 1.26 us).

| operator | NaN and infinities |
|---|---|
{"".join(f"| {op} | {text} |" + chr(10) for op, text in sorted(SPECIALS.items()))}
## All operators

| operator | what it becomes | node tests right |
|---|---|---|
"""
_FLOW = {
    "If": "the branch taken, where the condition is a constant; both where it is not and they fit together",
    "Loop": f"unrolled, where it runs a known number of times, at most {MAX_TRIPS}",
    "Scan": f"unrolled, up to {MAX_TRIPS} steps",
}


def _counts() -> dict[str, tuple[int, int]]:
    """For each operator, the right ones and all of the node tests of it alone."""
    right = set(RIGHT_LIST.read_text().split())
    all_of: collections.Counter[str] = collections.Counter()
    right_of: collections.Counter[str] = collections.Counter()
    for name, case in cases.all_cases().items():
        names = cases.operators(case)
        if len(names) == 1:
            all_of[names[0]] += 1
            right_of[names[0]] += name in right
    return {op: (right_of[op], all_of[op]) for op in all_of}


def describe(op: str, domain: str = "") -> str:
    """One phrase on what becomes of an operator."""
    rule = RULES.get((domain, op))
    if op in _FLOW and not domain:
        return _FLOW[op]
    if rule is not None:
        text = (inspect.getdoc(rule) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
        return text.replace("|", "\\|")
    definition = schema(op, MAX_OPSET, domain)
    if definition is not None and (definition.has_function or definition.has_context_dependent_function):
        return "expanded into the function ONNX defines"
    return f"refused: {UNSUPPORTED}"


def text() -> str:
    """The whole file."""
    counts = _counts()
    names = sorted(
        {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
        | {"Scatter", "Upsample"}
        | set(RUNTIMES_OWN)
    )
    rows = [(op, describe(op), counts.get(op)) for op in names]
    rows += [
        (f"com.microsoft.{op}", describe(op, d), None) for d, op in sorted(RULES) if d == "com.microsoft"
    ]
    lines = [f"| {op} | {what} | {f'{n[0]} of {n[1]}' if n else ''} |" for op, what, n in rows]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
    print(f"wrote {TARGET} from {len(FAMILIES)} families of rules")
