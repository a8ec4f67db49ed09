"""What the programs can say: the texts in their sources, with the error class that carries each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from honed.daemon.worker.supervisor import WorkerDied
from honed.protocol import errors

ROOT = Path(__file__).parents[2]
_GAP = "\0"  # what an f-string fills in


@dataclass(frozen=True)
class Text:
    """A text of a source, and the code of the error that it is the sentence of, or "" for none."""

    whole: str  # with _GAP for what is filled in
    code: str

    def says(self, sentence: str) -> bool:
        """Whether `sentence`, with "…" for what is filled in, is a part of this text."""
        return sentence.strip().rstrip("…").replace("…", _GAP) in self.whole


@cache
def texts() -> tuple[Text, ...]:
    """Every text of all parts."""
    found: list[Text] = []
    for part in ("daemon", "extensions", "runtime", "tuner"):
        for file in sorted((ROOT / part).rglob("*.py")):
            found += _texts(ast.parse(file.read_text()), "")
    return tuple(found)


def _texts(node: ast.AST, code: str) -> Iterator[Text]:
    if isinstance(node, ast.Call):
        code = _code(node.func) or code
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield Text(node.value, code)
        return
    if isinstance(node, ast.JoinedStr):
        whole = "".join(v.value if isinstance(v, ast.Constant) else _GAP for v in node.values)  # type: ignore[misc]
        yield Text(whole, code)
    for child in ast.iter_child_nodes(node):
        yield from _texts(child, code)


def _code(called: ast.expr) -> str:
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    kinds = {"WorkerDied": WorkerDied, "MissingFiles": errors.MissingFiles}
    kind = kinds.get(name) or getattr(errors, name, None)
    return kind.code if isinstance(kind, type) and issubclass(kind, errors.HonedError) else ""
