"""Where compiled forms rely on values of inputs: docs/dev/verdicts.md names each."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

from honed.runtime.errors import ModelRefused
from honed.tuner.frontend import normalise
from honed.tuner.verify import ranges
from honed.tuner.verify.inputs import Inputs
from honed.tuner.verify.probes import ReferenceProbes, choose

PAGE = Path(__file__).parents[3] / "docs" / "dev" / "verdicts.md"
# By operator: a model of it, the input that it relies on, and what is served.
PRECONDITIONS = {
    "Gather": ("(float[4,3] x, int64[5] i) => (float[5,3] y) { y = Gather(x, i) }", "i", -4, 3),
    "GatherElements": (
        "(float[4,3] x, int64[2,3] i) => (float[2,3] y) { y = GatherElements(x, i) }", "i", -4, 3,
    ),
    "GatherND": ("(float[4,4] x, int64[5,2] i) => (float[5] y) { y = GatherND(x, i) }", "i", -4, 3),
    "ScatterElements": (
        "(float[4,3] x, int64[2,3] i, float[2,3] u) => (float[4,3] y) { y = ScatterElements(x, i, u) }",
        "i", -4, 3,
    ),
    "ScatterND": (
        "(float[4,3] x, int64[2,1] i, float[2,3] u) => (float[4,3] y) { y = ScatterND(x, i, u) }", "i", -4, 3,
    ),
    "ReverseSequence": (
        "(float[4,3] x, int64[3] n) => (float[4,3] y)"
        "{ y = ReverseSequence<batch_axis = 1, time_axis = 0>(x, n) }",
        "n", 0, 4,
    ),
    "TensorScatter": (
        "(float[2,6,3] x, float[2,2,3] u, int64[2] n) => (float[2,6,3] y) { y = TensorScatter(x, u, n) }",
        "n", 0, 4,
    ),
    "MaxUnpool": (
        "(float[1,1,2,2] x, int64[1,1,2,2] i) => (float[1,1,4,4] y)"
        "{ y = MaxUnpool<kernel_shape = [2,2], strides = [2,2]>(x, i) }",
        "i", 0, 15,
    ),
    "RoiAlign": (
        "(float[2,1,4,4] x, float[3,4] r, int64[3] n) => (float[3,1,1,1] y)"
        "{ y = RoiAlign<sampling_ratio = 1>(x, r, n) }",
        "n", 0, 1,
    ),
    "Attention": (
        "(float[2,1,2,8] q, float[2,1,5,8] k, float[2,1,5,8] v, int64[2] n) => (float[2,1,2,8] y)"
        "{ y = Attention(q, k, v, , , , n) }",
        "n", 0, 5,
    ),
    "ArrayFeatureExtractor": (
        "(float[2,4] x, int64[3] i) => (float[2,3] y) { y = ai.onnx.ml.ArrayFeatureExtractor(x, i) }",
        "i", 0, 3,
    ),
    "EmbedLayerNormalization": (
        "(int32[1,3] i, float[4,8] w, float[3,8] p, float[8] g, float[8] b) => (float[1,3,8] y, int32[1] m)"
        "{ y, m = com.microsoft.EmbedLayerNormalization(i, , w, p, , g, b) }",
        "i", 0, 3,
    ),
    "RotaryEmbedding": (
        "(float[1,1,3,8] x, int64[1,3] i, float[6,4] c, float[6,4] s) => (float[1,1,3,8] y)"
        "{ y = com.microsoft.RotaryEmbedding(x, i, c, s) }",
        "i", 0, 5,
    ),
    "MultiHeadAttention": (
        "(float[1,1,8] q, float[1,1,8] k, float[1,1,8] v, float[1,1,5,8] pk, float[1,1,5,8] pv, int32[1] n)"
        "=> (float[1,1,8] y, float[1,1,5,8] nk, float[1,1,5,8] nv)"
        "{ y, nk, nv = com.microsoft.MultiHeadAttention<num_heads = 1>(q, k, v, , , , pk, pv, n) }",
        "n", 0, 4,
    ),
    "GroupQueryAttention": (
        "(float[2,1,8] q, float[2,1,8] k, float[2,1,8] v, float[2,1,5,8] pk, float[2,1,5,8] pv, int32[2] n,"
        " int32 t) => (float[2,1,8] y, float[2,1,5,8] nk, float[2,1,5,8] nv)"
        "{ y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 1, kv_num_heads = 1>"
        "(q, k, v, pk, pv, n, t) }",
        "n", 0, 4,
    ),
}  # fmt: skip
ALIKE = {"Scatter", "QEmbedLayerNormalization"}  # of the same rule
LENGTHS = {"ReverseSequence", "TensorScatter", "Attention", "MultiHeadAttention", "GroupQueryAttention"}


def model(op: str) -> onnx.ModelProto:
    versions = {"": {"MaxUnpool": 11, "RoiAlign": 16}.get(op, 24), "com.microsoft": 1, "ai.onnx.ml": 3}
    imports = ", ".join(f'"{domain}": {version}' for domain, version in versions.items())
    return parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> f {PRECONDITIONS[op][0]}")


def rows() -> list[tuple[set[str], str]]:
    """The operators of each row of the table, and how it is handled."""
    section = PAGE.read_text().partition("### Values\n")[2].partition("\n### ")[0]
    cells = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| ")][1:]
    return [
        (set(re.findall(r"\b[A-Z]\w+", names.partition(" of ")[0])), how.strip()) for names, _, how in cells
    ]


def test_the_table_names_every_operator_whose_inputs_have_ranges() -> None:
    named = set().union(*(operators for operators, _ in rows()))
    known = {op for row in ranges.RULES for op in row.operators.split()}
    assert known - named - ranges._SHAPING.keys() == set()


def test_the_table_names_every_precondition() -> None:
    named = set().union(*(operators for operators, how in rows() if how.startswith("precondition")))
    assert named == PRECONDITIONS.keys() | ALIKE


@pytest.mark.tvm
@pytest.mark.parametrize("op", PRECONDITIONS)
def test_what_is_served_is_drawn_and_all_else_is_onnx_runtimes(op: str) -> None:
    _, name, low, high = PRECONDITIONS[op]
    made = model(op)
    bounds = normalise(made).preconditions
    (bound,) = (each for each in bounds if each.input == name)
    assert (bound.low, bound.high) == (low, high)
    sets = Inputs(made, preconditions=bounds).draw(12)
    assert all(each.allows(one[each.input]) for one in sets for each in bounds)
    if op in LENGTHS:
        drawn = {int(value) for one in sets for value in one[name].flat}
        assert {low, low + 1, high} <= drawn
    if op == "ArrayFeatureExtractor":  # which ONNX Runtime has for other types
        return
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), options(), providers=["CPUExecutionProvider"]
    )
    for value in (low, high):
        session.run(None, sets[0] | {name: spread(sets[0][name], value)})
    for value in (low - 1, high + 1):
        with pytest.raises(Exception, match=r"out of|Out of|range|invalid ind|negative|exceeds|Invalid"):
            session.run(None, sets[0] | {name: spread(sets[0][name], value)})


@pytest.mark.tvm
def test_a_single_sequence_of_which_nothing_is_there_is_a_probe_beside_others() -> None:
    text = PRECONDITIONS["Attention"][0].replace("[2,1", "[1,1").replace("int64[2]", "int64[1]")
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["": 24]> f {text}')
    found = choose(made, 3, "fp32", preconditions=normalise(made).preconditions)
    assert isinstance(found, ReferenceProbes)
    lengths = [int(one["n"][0]) for one in found.inputs]
    assert {0, 5} <= set(lengths)
    assert not found.unproven
    assert not found.outputs[lengths.index(0)]["y"].any()


def options() -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 4
    return made


def spread(like: np.ndarray, value: int) -> np.ndarray:
    """Return the values with one of them set."""
    made = like.copy()
    made.reshape(-1)[0] = value
    return made


def test_a_precondition_is_followed_through_moves_and_sums() -> None:
    made = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (int32[1,4] a, int64[4] b, float[8,2] t) => (float[4,2] y,'
        " float[8,2] z) <int64[1] s = {4}, int64 two = {2}, int64[4] many = {0, 1, 2, 3}> {"
        " wide = Cast<to = 7>(a) flat = Reshape(wide, s) less = Sub(flat, two) y = Gather(t, less)"
        " more = Add(b, many) both = Concat<axis = 0>(more, flat) z = Gather(t, both) }"
    )
    found = {(each.input, each.low, each.high) for each in normalise(made).preconditions}
    assert found == {("a", -6, 9), ("a", -8, 7), ("b", -8, 4)}


def test_a_bound_of_some_elements_is_none_of_the_others() -> None:
    """A detector's list of boxes has numbers of samples in its first column, of boxes in the last."""
    some = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (int64[5,3] chosen, float[2,4] t) => (float[5,4] y)'
        " <int64 first = {0}> { samples = Gather<axis = 1>(chosen, first) y = Gather(t, samples) }"
    )
    assert normalise(some).preconditions == ()


def test_what_others_compute_is_clamped_and_a_length_of_a_cache_is_refused() -> None:
    computed = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (float[4] x, float[8,2] t) => (float[4,2] y)'
        " { i = Cast<to = 7>(x) j = Mul(i, i) y = Gather(t, j) }"
    )
    assert normalise(computed).preconditions == ()
    cache = model("GroupQueryAttention")
    node = cache.graph.node[0]
    cache.graph.node.insert(0, helper.make_node("Mul", ["t", "t"], ["squared"]))
    cache.graph.node[1].input[6] = "squared"
    assert node.op_type == "GroupQueryAttention"
    with pytest.raises(ModelRefused, match="is computed at run time"):
        normalise(cache)
    cache.graph.node[0].CopyFrom(helper.make_node("Gather", ["table", "t"], ["squared"]))
    cache.graph.initializer.append(numpy_helper.from_array(np.array([1, 3], np.int32), "table"))
    assert {each.input: each.high for each in normalise(cache).preconditions} == {"n": 4, "t": 1}
    cache.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([1, 6], np.int32), "table"))
    with pytest.raises(ModelRefused, match="is computed at run time"):
        normalise(cache)
