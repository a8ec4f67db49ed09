"""Rewriting rules, one file for each family of operators.

Every ONNX operator that is compiled has a rule here, or a function body in ONNX itself. A rule gets a call
with resolved inputs and emits nodes of the core set (`importing.CORE`) at TARGET_OPSET, which are the only
ones the importer knows. `@rule` registers it, in whatever file of this folder.

ONNX Runtime must run what a rule emits, because tests compare it with the original. It refuses, for instance,
a MaxPool whose padding is not smaller than its kernel, whatever the dilation.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TypeVar

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.values import Item, NodeCall

Result = Item | Sequence[Item]
Rule = Callable[[Builder, NodeCall], Result]
RULES: dict[tuple[str, str], Rule] = {}
_Rule = TypeVar("_Rule", bound=Rule)


def rule(*ops: str, domain: str = "") -> Callable[[_Rule], _Rule]:
    """Register a rewriting rule for operators.

    The rule returns the value of a single output, or a list with a value for each output, and raises
    NodeRefused where it cannot rewrite the node. `docs/operators.md` describes operators by the first
    paragraph of its docstring, if `tests/tuner/backend/table.py` lists them as limited.
    """

    def register(function: _Rule) -> _Rule:
        for op in ops:
            if (domain, op) in RULES:
                raise ValueError(f"operator {op} has two rules")
            RULES[domain, op] = function
        return function

    return register


FAMILIES = tuple(found.name for found in pkgutil.iter_modules(__path__))
for _name in FAMILIES:
    importlib.import_module(f"{__name__}.{_name}")
