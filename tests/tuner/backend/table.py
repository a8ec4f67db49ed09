"""Writes docs/operators.md from the rules and the list of node tests that are right.

python -m tests.tuner.backend.table
"""

from __future__ import annotations

import collections
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx

from honed.onnxfile.contrib_schemas import RUNTIMES_OWN
from honed.tuner.frontend.builder import schema
from honed.tuner.frontend.flow import MAX_TRIPS
from honed.tuner.frontend.load import MAX_OPSET
from honed.tuner.frontend.rules import FAMILIES, RULES
from honed.tuner.frontend.values import UNSUPPORTED
from honed.tuner.verify.probes import OPERATORS as SPECIALS

from . import cases
from .run import RIGHT_LIST

TARGET = Path(__file__).parents[3] / "docs" / "operators.md"
_WIDTH = 120  # characters of a line
_HEAD = f"""# Operators

For authors of models: which operators of ONNX (opsets 1 to {MAX_OPSET}) honed compiles, and within which
limits. `python -m tests.tuner.backend.table` generates this page.

`hone compile` names every operator and node that it cannot compile:

```console
$ hone compile which.onnx -o which.honed
hone: the model cannot be compiled: NonZero (ai.onnx, opset 17; node which): the shape of its output depends
on the values of its inputs; honed compiles static shapes only
```

With honed-cpu installed, `hone add` serves such a model all the same: ONNX Runtime runs the operators that
cannot be compiled, or the whole model ([engines](engines.md)). `hone show MODEL` lists the operators
responsible.

## What is not compiled

ONNX defines no function for the following operators, and honed has no rule:

{{refused}}
The number of results of {{dynamic}} depends on values, so that their shapes are not static.

## How operators are compiled

- Shapes, axes, pads and other parameters must be constants or follow from shapes.
- An operator without a rule of its own is expanded if ONNX defines it as a function.
- A node with an unsupported attribute cannot be compiled; the refusal names the attribute.
- ONNX Runtime's own operators (`com.microsoft`, and LayerNormalization at any opset) follow the conventions
  of ONNX Runtime's optimisers and quantisers, and round as its kernels do.
- Indices computed at run time never read or write outside a tensor: reads are clamped into range, and
  updates out of range are dropped. Requests whose inputs are out of range go to ONNX Runtime
  ([values](dev/verdicts.md#values)).
"""
_NAN = """
## NaN and infinities

With NaN or infinities as inputs, operators answer as ONNX Runtime does without optimisation, except those
below, most of which ONNX Runtime does not treat consistently. The compiler also compares a model that has
none of these operators except Conv on inputs that hold NaN and infinities; `hone show` lists the differences
among its notes. A request with `finite` refuses such inputs, for every model.

| operators | NaN and infinities |
|---|---|
"""
_TESTS = """
## Node tests

On PoCL honed passes all of ONNX's node tests of the operators that it compiles, except for these
(passed/all). It refuses the other tests with a reason: unsupported element types, sequences or optionals as
inputs or outputs, or results whose number depends on values. Tests of Attention that want scores as an output
contradict [how it masks them](dev/verdicts.md#values).

"""
_COMPILED = """
## Compiled operators

All other operators of ONNX are compiled, {count} of them, and of `com.microsoft`:

{microsoft}
Of other domains:

{others}
Some of these have limits:

| operators | compiled to |
|---|---|
"""
# Operators whose phrase says more than the definition of the operator: a limit, or a choice.
_LIMITED = """
BatchNormalization BitCast Cast CastLike CenterCropPad Clip Compress Constant ConstantOfShape Conv
ConvTranspose Det
Dropout DynamicQuantizeLSTM EyeLike GRU GatherBlockQuantized GroupQueryAttention If LSTM Loop LpNormalization
MatMulNBits MaxPool Pow QLinearAdd
QLinearAveragePool QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu QLinearSigmoid QLinearSoftmax
QLinearWhere RNN Range Reshape Scan Shape Size Slice TopK
"""
_FLOW = {
    "If": "The branch of a constant condition; else both and a selection, if types and shapes agree",
    "Loop": f"Unrolled, if the number of iterations is constant, at most {MAX_TRIPS}",
    "Scan": f"Unrolled, up to {MAX_TRIPS} steps",
}


def _counts() -> dict[str, tuple[int, int]]:
    """Return for each operator how many node tests of it alone honed passes, and how many there are."""
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
    """Return a phrase for what the compiler makes of an operator."""
    rule = RULES.get((domain, op))
    if op in _FLOW and not domain:
        return _FLOW[op]
    if rule is not None:
        text = (inspect.getdoc(rule) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
        return text.replace("|", "\\|")
    definition = schema(op, MAX_OPSET, domain)
    if definition is not None and (definition.has_function or definition.has_context_dependent_function):
        return "ONNX's own function"
    return f"Refused: {UNSUPPORTED}"


def _rows(phrases: Mapping[str, str]) -> str:
    """Return rows of a table, one for each phrase; operators that do not fit a line take another row."""
    operators: dict[str, list[str]] = {}
    for op, phrase in sorted(phrases.items()):
        operators.setdefault(phrase, []).append(op)
    rows = ""
    for phrase, names in operators.items():
        width = max(_WIDTH - len("|  |  |") - len(phrase), 40)
        for line in textwrap.wrap(", ".join(names), width, break_long_words=False):
            rows += f"| {line.rstrip(',')} | {phrase} |\n"
    return rows


def _list(items: Iterable[str]) -> str:
    return textwrap.fill(", ".join(items), _WIDTH, break_long_words=False) + ".\n"


def text() -> str:
    """Return the whole page."""
    names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""} | {"Scatter", "Upsample"}
    own = {op: describe(op) for op in sorted(names | set(RUNTIMES_OWN))}
    refused = {op for op, phrase in own.items() if phrase.startswith("Refused: ")}
    dynamic = sorted(op for op in refused if RULES.get(("", op)))
    compiled = {op: phrase for op, phrase in own.items() if op not in refused}
    microsoft = {op: describe(op, d) for d, op in RULES if d == "com.microsoft"}
    others = {f"{d}.{op}": describe(op, d) for d, op in RULES if d not in ("", "com.microsoft")}
    counts = _counts()
    failing = [
        f"{op} {right}/{all_of}"
        for op, (right, all_of) in sorted(counts.items())
        if op in compiled and right < all_of
    ]
    head = _HEAD.format(
        refused=_list(sorted(refused - set(dynamic))),
        dynamic=f"{', '.join(dynamic[:-1])} and {dynamic[-1]}",
    )
    limited = set(_LIMITED.split())
    assert limited <= compiled.keys() | microsoft.keys(), "an operator is named that is not compiled"
    lists = _COMPILED.format(
        count=len(compiled), microsoft=_list(sorted(microsoft)), others=_list(sorted(others))
    )
    limits = {op: phrase for op, phrase in (microsoft | compiled).items() if op in limited}
    return "".join([head, lists, _rows(limits), _NAN, _rows(SPECIALS), _TESTS, _list(failing)])


if __name__ == "__main__":
    TARGET.write_text(text())
    print(f"wrote {TARGET} from {len(FAMILIES)} families of rules")
