"""Benchmarks are run by hand, so what they import from the rest is checked here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHES = sorted(
    path
    for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py"))
    if path.parent.name == "nvidia" or ROOT / "benchmarks" in path.parents
)

_WITH_PYTORCH = ("sidebyside", "cudagraph", "nvidia.generating")  # which is only where the GPU is

pytestmark = pytest.mark.tvm


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_benchmark_imports_from_this_project_is_there(path: Path) -> None:
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        if name.split(".")[0] not in ("honed", "tests", "benchmarks") or name.endswith(_WITH_PYTORCH):
            continue
        module = importlib.import_module(name)
        for alias in node.names:
            found = hasattr(module, alias.name) or importlib.util.find_spec(f"{name}.{alias.name}")
            assert found, f"{name} has no {alias.name}"
