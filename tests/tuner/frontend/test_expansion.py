"""Models that stand for more than there is time for are refused before any of it is spent."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from honed.runtime.errors import ModelRefused
from honed.tuner.frontend.load import check_expansion, load

OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
LIMIT = 1000


def model(functions: list[onnx.FunctionProto], called: str, branch: bool = False) -> onnx.ModelProto:
    call = helper.make_node(called, ["x"], ["y"], domain="my")
    if branch:
        within = helper.make_graph([call], "within", [], [helper.make_tensor_value_info("y", 1, [2])])
        call = helper.make_node("If", ["c"], ["y"], then_branch=within, else_branch=within)
    graph = helper.make_graph(
        [call],
        "g",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )
    return helper.make_model(graph, functions=functions, opset_imports=OPSETS)


def tower(width: int, levels: int, leaf: str = "Relu") -> list[onnx.FunctionProto]:
    """Each function calls the one before so often."""
    made = [helper.make_function("my", "F0", ["a"], ["b"], [helper.make_node(leaf, ["a"], ["b"])], OPSETS)]
    for level in range(1, levels):
        names = ["a", *(f"m{i}" for i in range(width - 1)), "b"]
        body = [
            helper.make_node(f"F{level - 1}", [names[i]], [names[i + 1]], domain="my") for i in range(width)
        ]
        made.append(helper.make_function("my", f"F{level}", ["a"], ["b"], body, OPSETS))
    return made


@pytest.mark.parametrize(("width", "levels"), [(2, 30), (10, 9), (1000, 3)])
@pytest.mark.parametrize("branch", [False, True])
def test_a_billion_nodes_are_refused_without_visiting_them(width: int, levels: int, branch: bool) -> None:
    with pytest.raises(ModelRefused, match="grows beyond 1000 nodes"):
        check_expansion(model(tower(width, levels), f"F{levels - 1}", branch), LIMIT)


def test_what_is_called_often_enough_is_not() -> None:
    check_expansion(model(tower(2, 8), "F7"), LIMIT)
    check_expansion(model(tower(1, 500), "F499"), LIMIT)  # deeper than Python calls


def test_functions_that_contain_themselves_are_refused() -> None:
    def calls(name: str, other: str) -> onnx.FunctionProto:
        body = [helper.make_node(other, ["a"], ["b"], domain="my")]
        return helper.make_function("my", name, ["a"], ["b"], body, OPSETS)

    with pytest.raises(ModelRefused, match="within itself"):
        check_expansion(model([calls("F", "G"), calls("G", "F")], "F"), LIMIT)


@pytest.mark.parametrize("version", [-(2**62), -1, 2**31])
def test_versions_of_operators_that_cannot_be_are_refused(tmp_path: Path, version: int) -> None:
    made = model(tower(1, 1), "F0")
    made.opset_import[1].version = version
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ModelRefused, match="cannot be"):
        load(tmp_path / "m.onnx")
