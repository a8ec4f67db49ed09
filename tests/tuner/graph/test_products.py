"""Passes over products with constant weights: fewer of them, sliced without copies, the same answers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from benchmarks import bert
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from honed.machine.profile import DeviceProfile
from honed.tuner import frontend, lightglue
from honed.tuner.compiler.fusion import FusionPolicy, attention_seconds
from honed.tuner.graph import PASSES, Pass
from honed.tuner.graph.folding import fold_chains, fold_factors
from honed.tuner.graph.products import combine_parallel_matmuls, permute_columns, slice_first, split_parts
from honed.tuner.lower.functions.fusing import Joins, never
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.module import read_program
from tests.tuner.search.search_functions import imagined

from .graphs import after, operators, parsed, weights

FACTORS = (Pass("factors", fold_factors),)
CHAINS = (Pass("chains", fold_chains),)
PARTS = (Pass("parts", split_parts), Pass("siblings", combine_parallel_matmuls))
SIBLINGS = (Pass("siblings", combine_parallel_matmuls),)
COLUMNS = (Pass("slices", slice_first), Pass("columns", permute_columns))


def _matrices(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: weights(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}


def _text(body: str, inputs: str = "float[1,5,8] x", output: str = "float[1,5,8] y") -> str:
    return f"({inputs}) => ({output}) {{ {body} }}"


@settings(max_examples=20)
@given(st.tuples(st.booleans(), st.booleans(), st.booleans()), st.integers(8, 16), st.sampled_from([8, 12]))
def test_a_product_of_a_product_is_one(biased: tuple[bool, bool, bool], inner: int, columns: int) -> None:
    """With biases or without, but for an inner one that no outer one can take."""
    lines, value = [], "x"
    for n, bias in enumerate(biased):
        lines.append(f"m{n} = MatMul({value}, w{n})")
        lines += [f"s{n} = Add(b{n}, m{n})"] if bias else []
        value = f"s{n}" if bias else f"m{n}"
    constants = _matrices(
        w0=(8, inner), b0=(inner,), w1=(inner, 8), b1=(8,), w2=(8, columns), b2=(1, 1, columns)
    )
    read = {name: v for name, v in constants.items() if name[0] == "w" or biased[int(name[1])]}
    text = _text(f"{' '.join(lines)} y = Relu({value})", output=f"float[1,5,{columns}] y")
    done = operators(after(parsed(text, **read), CHAINS))
    assert done["MatMul"] == (2 if any(biased[:2]) and not biased[2] else 1)


def test_a_product_is_folded_through_a_concatenation() -> None:
    """As the output projection of an attention into the network behind it."""
    text = _text(
        "a = MatMul(x, w) b = Add(a, c) d = Concat<axis=-1>(x, b) "
        "e = MatMul(d, w2) f = Add(e, c2) y = Relu(f)"
    )
    constants = _matrices(w=(8, 8), c=(8,), w2=(16, 8), c2=(8,))
    assert operators(after(parsed(text, **constants), CHAINS)) == {
        "Concat": 1, "MatMul": 1, "Add": 1, "Relu": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "inner"),
    [
        ("a = MatMul(x, w) y = MatMul(a, v)", 2),  # a bottleneck: 8 * 2 + 2 * 8 multiplications, not 8 * 8
        ("a = MatMul(x, w) z = Relu(a) b = MatMul(a, v) y = Add(b, z)", 8),  # read twice
        ("a = MatMul(x, w) r = Relu(a) y = MatMul(r, v)", 8),  # not linear
    ],
)
def test_what_is_no_chain_or_costs_more_is_left_alone(body: str, inner: int) -> None:
    model = parsed(_text(body), **_matrices(w=(8, inner), v=(inner, 8)))
    assert operators(after(model, CHAINS))["MatMul"] == 2


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["Add", "Sub", "Mul", "Div"]), min_size=2, max_size=5), st.booleans())
def test_factors_and_offsets_go_into_weights_and_bias(steps: list[str], convolution: bool) -> None:
    lines = ["v0 = Conv(x, w)" if convolution else "v0 = MatMul(x, w)"]
    lines += [f"v{n + 1} = {op}(v{n}, c{n})" for n, op in enumerate(steps)]
    shapes = ((1,), (1, 6, 1), (6, 1)) if convolution else ((1,), (6,), (1, 1, 6))
    constants = {
        f"c{n}": np.abs(weights(*shapes[n % 3], seed=n)) + np.float32(0.5) for n in range(len(steps))
    }
    constants["w"] = weights(6, 5, 1) if convolution else weights(8, 6)
    text = _text(
        f"{' '.join(lines)} y = Relu(v{len(steps)})", output=f"float[1,{'6,8' if convolution else '5,6'}] y"
    )
    done = operators(after(parsed(text, **constants), FACTORS))
    offset = any(op in ("Add", "Sub") for op in steps)
    assert done == {"Conv" if convolution else "MatMul": 1, "Relu": 1} | ({"Add": 1} if offset else {})


@pytest.mark.parametrize(
    ("body", "factor"),
    [
        ("a = MatMul(x, w) y = Mul(a, c)", weights(5, 1)),  # differs by row
        ("a = MatMul(x, w) b = Mul(a, c) y = Add(a, b)", weights(8)),  # read as it was
        ("a = MatMul(x, w) y = Mul(a, c)", np.float32([1e-30])),  # weights would vanish
        ("a = MatMul(x, w) y = Div(c, a)", np.float32([2])),  # not linear
    ],
)
def test_what_is_no_factor_of_weights_is_left_alone(body: str, factor: np.ndarray) -> None:
    model = parsed(_text(body), w=weights(8, 8), c=factor)
    assert operators(after(model, FACTORS)) == operators(after(model, ()))


_SCALED = "s = Tanh(x) a = Mul(s, c) t = Sin(x) b = Mul(d, t) e = Transpose<perm=[0,2,1]>(t) f = Mul(e, d) "


@pytest.mark.parametrize(
    ("body", "factor", "fewer"),
    [
        ("y = MatMul(a, f)", 0.25, 1),
        ("y = MatMul(a, f)", 3.0, 0),  # the first might become too large
        ("y = MatMul(a, f)", 1e-3, 0),  # or vanish
        ("y = MatMul(s, f)", 0.25, 0),  # the first has no factor
        ("z = MatMul(a, f) g = ReduceSum(f) y = Add(z, g)", 0.25, 0),  # others read it
    ],
)
def test_one_of_two_values_that_are_multiplied_is_scaled(body: str, factor: float, fewer: int) -> None:
    text = _text(_SCALED + body, output="float[1,5,5] y")
    model = parsed(text, c=np.float32(0.5), d=np.float32([factor]))
    assert operators(after(model, FACTORS)) == operators(after(model, ())) - Counter(Mul=fewer)


HEADS = "{o}r = Reshape({v}, heads) {o} = Transpose<perm=[0,2,1,3]>({o}r)"


def _attention(*, biased: bool) -> onnx.ModelProto:
    lines = []
    for name in "qkv":
        value = f"{name}m"
        lines.append(f"{value} = MatMul(x, w{name})")
        if biased:
            lines.append(f"{name}b = Add({value}, b{name})")
            value = f"{name}b"
        lines.append(HEADS.format(o=f"{name}h", v=value))
    body = " ".join(lines) + " a = Mul(qh, kh) y = Sub(a, vh)"
    constants = _matrices(wq=(8, 8), wk=(8, 8), wv=(8, 8), bq=(8,), bk=(8,), bv=(8,))
    read = {name: v for name, v in constants.items() if biased or name[0] == "w"}
    return parsed(_text(body, output="float[1,2,5,4] y"), heads=np.array([1, 5, 2, 4]), **read)


@pytest.mark.parametrize("biased", [True, False])
def test_products_of_one_value_that_become_heads_are_one(biased: bool) -> None:
    done = operators(after(_attention(biased=biased), SIBLINGS))
    assert (done["MatMul"], done["Add"], done["Slice"]) == (1, int(biased), 3)


def test_products_whose_results_would_only_be_copied_are_left_alone() -> None:
    text = _text("a = MatMul(x, w) b = MatMul(x, v) c = Relu(a) d = Tanh(b) y = Add(c, d)")
    done = operators(after(parsed(text, **_matrices(w=(8, 8), v=(8, 8))), SIBLINGS))
    assert done == {"MatMul": 2, "Relu": 1, "Tanh": 1, "Add": 1}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_of_joined_values_is_split_where_one_has_a_sibling(biased: bool, first: bool) -> None:
    """As what an attention gave and was given, both read by a network: the queries are a sibling."""
    sums = ("s = Add(q, bq)", "n = Add(m, bm)") if biased else ("s = Identity(q)", "n = Identity(m)")
    text = _text(
        f"q = MatMul(x, wq) {sums[0]} t = Transpose<perm=[0,2,1]>(s) a = Tanh(t) "
        f"b = Transpose<perm=[0,2,1]>(a) c = Concat<axis=-1>({'x, b' if first else 'b, x'}) "
        f"m = MatMul(c, w) {sums[1]} y = Relu(n)"
    )
    constants = _matrices(wq=(8, 8), w=(16, 8), bq=(8,), bm=(8,))
    read = {name: v for name, v in constants.items() if biased or name[0] == "w"}
    done = operators(after(parsed(text, **read), PARTS))
    assert (done["MatMul"], done["Concat"], done["Slice"], done["Add"]) == (2, 0, 2, 1 + biased)


@pytest.mark.parametrize(
    "body",
    [
        "c = Concat<axis=-1>(x, r) m = MatMul(c, w2) y = Tanh(m)",  # no sibling
        "q = MatMul(x, w) s = Tanh(q) c = Concat<axis=-1>(s, r) m = MatMul(c, w2) y = Add(m, q)",  # nor here
        "q = MatMul(x, w) t = Transpose<perm=[0,2,1]>(q) s = Transpose<perm=[0,2,1]>(t) "
        "c = Concat<axis=-1>(x, r) m = MatMul(c, w2) d = ReduceMax<axes=[2]>(c) n = Add(m, d) y = Add(n, s)",
    ],
)
def test_other_products_of_joined_values_are_left_alone(body: str) -> None:
    model = parsed(_text(f"r = Relu(x) {body}"), **_matrices(w=(8, 8), w2=(16, 8)))
    assert operators(after(model, PARTS)) == operators(after(model, ()))


def test_two_products_that_are_added_to_each_other_stay_apart() -> None:
    text = _text("a = MatMul(x, w) b = MatMul(x, v) c = Add(a, b) y = Relu(c)")
    done = operators(after(parsed(text, **_matrices(w=(8, 8), v=(8, 8))), SIBLINGS))
    assert done == {"MatMul": 2, "Add": 1, "Relu": 1}


@pytest.mark.parametrize("last", [2, 3])  # of the axes that the columns are split into
def test_columns_are_permuted_for_the_slices_behind(last: int) -> None:
    split = [1, 5, 4, 2, 3] if last == 3 else [1, 5, 4, 3, 2]
    axis = split.index(3)
    lines = ["m = MatMul(x, w) s = Add(m, b) r = Reshape(s, split) t = Transpose<perm=[0,2,1,3,4]>(r)"]
    lines += [f"{name} = Gather<axis={axis}>(t, i{n})" for n, name in enumerate("qkv")]
    text = _text(" ".join(lines) + " a = Mul(q, k) y = Sub(a, v)", output="float[1,4,5,2] y")
    indices = {f"i{n}": np.array(n) for n in range(3)}
    model = parsed(text, split=np.array(split), **_matrices(w=(8, 24), b=(24,)), **indices)
    done = after(model, COLUMNS)
    assert [n.op_type for n in done.graph.node if n.op_type in ("Slice", "Transpose")].count("Transpose") == 3
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in done.graph.value_info}
    assert [shapes[n.output[0]] for n in done.graph.node if n.op_type == "Slice"] == [[1, 5, 8]] * 3


def test_a_transpose_that_others_read_too_stays() -> None:
    text = _text(
        "t = Transpose<perm=[0,2,1]>(x) a = Slice(t, i0, i4, i1) b = Slice(t, i4, i8, i1) c = Add(a, b) "
        "d = ReduceSum<keepdims=1>(t, i1) y = Mul(c, d)",
        output="float[1,4,5] y",
    )
    ends = {f"i{n}": np.array([n]) for n in (0, 1, 4, 8)}
    assert operators(after(parsed(text, **ends), COLUMNS))["Transpose"] == 1


def _launches(
    model: onnx.ModelProto, passes: tuple[Pass, ...], profile: DeviceProfile, joins: Joins = never
) -> int:
    normalised = frontend.normalise(model, passes=passes)
    return len(read_program(legalize(frontend.import_relax(normalised), profile, joins)[0]).calls)


@pytest.mark.slow
@pytest.mark.tvm
def test_lightglue_takes_fewer_launches_and_answers_as_before() -> None:
    model, profile = lightglue.build(16), imagined("gpu")
    after(model, PASSES, 1e-4)
    assert _launches(model, PASSES, profile) == 157  # of 519
    attentions = FusionPolicy(profile, sorts=[attention_seconds])
    assert _launches(model, PASSES, profile, attentions) == 121  # two less for each of 18
    without_nodes = {"moves", "norms", "pads", "lengths"}  # "factors": launches do less
    for left_out in PASSES:
        if left_out.name not in without_nodes | {"factors"}:
            assert _launches(model, tuple(p for p in PASSES if p is not left_out), profile) > 157


@pytest.mark.slow
@pytest.mark.tvm
def test_a_bert_takes_fewer_launches_and_answers_as_before() -> None:
    """Ten of a layer, and the embeddings."""
    model, profile = bert.build(layers=2, tokens=16), imagined("gpu")
    after(model, PASSES, 1e-4)
    assert _launches(model, PASSES, profile) == 25
    assert _launches(model, PASSES, profile, FusionPolicy(profile, sorts=[attention_seconds])) == 21
    for name, launches in (("norms", 30), ("siblings", 29)):
        assert _launches(model, tuple(p for p in PASSES if p.name != name), profile) == launches


def test_constants_that_a_type_does_not_hold_are_not_computed() -> None:
    """Each factor fits float32, their product does not."""
    text = _text("a = MatMul(x, w) y = MatMul(a, v)")
    huge = np.full((8, 8), 3e37, np.float32)
    model = parsed(text, w=huge, v=huge)
    folded = frontend.normalise(model, passes=CHAINS)
    assert operators(folded.model)["MatMul"] == 2
    assert all(np.isfinite(numpy_helper.to_array(t)).all() for t in folded.model.graph.initializer)
