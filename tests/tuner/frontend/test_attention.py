"""Attention and positions of com.microsoft, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, shape_inference

from honed.onnxfile.contrib_schemas import with_stand_ins
from honed.runtime.errors import ModelRefused
from honed.tuner.frontend import normalise
from honed.tuner.verify import graphs

from .test_rules import floats, run

pytestmark = pytest.mark.tvm
small = st.integers(1, 4)
flags = st.booleans()
HEADS, SIZE = 3, 4
WIDTH = HEADS * SIZE


def model(
    op: str, data: Mapping[str, np.ndarray], names: Sequence[str], outputs: int, attrs: Mapping[str, Any]
) -> onnx.ModelProto:
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, domain="com.microsoft", **attrs)],
        "attention",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in data.items()
        ],
        [helper.make_tensor_value_info(r, TensorProto.FLOAT, None) for r in results],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def same(op: str, given: Mapping[str, np.ndarray | None], *, outputs: int = 1, **attrs: Any) -> None:
    """One operator on inputs in its own order (None: left out), as ONNX Runtime answers."""
    names = ["" if v is None else k for k, v in given.items()]
    while names and not names[-1]:
        names.pop()
    data = {k: v for k, v in given.items() if v is not None}
    made = model(op, data, names, outputs, attrs)
    expected, done = run(made, data), normalise(made)
    onnx.checker.check_model(done.model, full_check=True)
    for got, wanted in zip(run(done.model, data), expected, strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def mask(kind: str, batch: int, asking: int, total: int, *, causal: bool) -> np.ndarray | None:
    """Each form that a mask may have; no row is masked as a whole: scores of -10000 are rounded coarsely."""
    rng = np.random.default_rng((batch, asking, total))
    ends = rng.integers(1, total + 1, batch)
    shapes = {"column": (batch, 1), "places": (batch, total), "pairs": (batch, asking, total)}
    if kind in shapes:
        seen = rng.integers(0, 2, shapes[kind]).astype(np.int32)
        seen[..., 0] = 1
        return seen
    if kind == "ends":
        return ends.astype(np.int32)
    if kind == "both":
        starts = np.zeros(batch) if causal else ends - 1  # a causal row may see the first key alone
        return np.concatenate([ends, starts]).astype(np.int32)
    return None


masks = st.sampled_from(["none", "column", "places", "pairs", "ends", "both"])


@given(small, small, st.integers(0, 3), masks, flags, flags)
def test_attention(batch: int, length: int, past: int, kind: str, causal: bool, biased: bool) -> None:
    total = past + length
    same(
        "Attention",
        {
            "x": floats(batch, length, WIDTH),
            "w": floats(WIDTH, 3 * WIDTH, seed=1),
            "b": floats(3 * WIDTH, seed=2),
            "m": mask(kind, batch, length, total, causal=causal),
            "p": floats(2, batch, HEADS, past, SIZE, seed=3) if past else None,
            "e": floats(1, HEADS, length, total, seed=4) if biased and not past else None,
        },
        outputs=2 if past else 1,
        num_heads=HEADS,
        unidirectional=int(causal),
    )


def test_attention_of_hidden_sizes_scale_and_mask_value_of_its_own() -> None:
    x, ends = floats(2, 5, WIDTH), np.array([3, 5], np.int32)
    w, b = floats(WIDTH, 30, seed=1), floats(30, seed=2)
    attrs = {"num_heads": HEADS, "scale": 0.3, "mask_filter_value": -2.0}
    same("Attention", {"x": x, "w": w, "b": b, "m": ends}, qkv_hidden_sizes=[9, 9, 12], **attrs)


@given(small, small, st.sampled_from([np.int8, np.uint8]), flags, masks, flags)
def test_attention_of_integers(
    batch: int, length: int, kind: type[np.generic], columns: bool, masked: str, causal: bool
) -> None:
    rng, limits = np.random.default_rng(batch), np.iinfo(kind)
    same(
        "QAttention",
        {
            "x": rng.integers(0, 256, (batch, length, WIDTH)).astype(np.uint8),
            "w": rng.integers(limits.min, limits.max + 1, (WIDTH, 3 * WIDTH)).astype(kind),
            "b": floats(3 * WIDTH),
            "s": np.array(0.02, np.float32),
            "t": np.abs(floats(3 * WIDTH)) * 0.01 if columns else np.array(0.01, np.float32),
            "m": mask(masked, batch, length, length, causal=causal),
            "z": np.array(120, np.uint8),
            "y": np.array(0 if kind is np.int8 else 130, kind),
        },
        num_heads=HEADS,
        unidirectional=int(causal),
    )


@given(small, small, small, st.integers(0, 3), st.sampled_from(["none", "places", "ends"]), flags, flags)
def test_attention_over_what_is_given_apart(
    batch: int, asking: int, new: int, past: int, kind: str, causal: bool, biased: bool
) -> None:
    total = past + new
    same(
        "MultiHeadAttention",
        {
            "q": floats(batch, asking, WIDTH),
            "k": floats(batch, new, WIDTH, seed=1),
            "v": floats(batch, new, WIDTH, seed=2),
            "b": floats(3 * WIDTH, seed=3) if biased else None,
            "m": mask(kind, batch, asking, total, causal=causal),
            "e": None if biased else floats(batch, 1, asking, total, seed=4),
            "pk": floats(batch, HEADS, past, SIZE, seed=5) if past else None,
            "pv": floats(batch, HEADS, past, SIZE, seed=6) if past else None,
        },
        outputs=3 if past else 1,
        num_heads=HEADS,
        unidirectional=int(causal),
    )


def test_attention_over_keys_and_values_laid_out_already() -> None:
    side = {"k": floats(2, HEADS, 7, SIZE, seed=1), "v": floats(2, HEADS, 7, SIZE, seed=2)}
    same("MultiHeadAttention", {"q": floats(2, 5, WIDTH), **side}, num_heads=HEADS)


@pytest.mark.parametrize(
    ("apart", "past", "wide"), [(False, 0, SIZE + 2), (False, 6, SIZE), (True, 0, SIZE)]
)  # ONNX Runtime refuses others
@pytest.mark.parametrize("outputs", [1, 3])
def test_shapes_of_attention_are_inferred_whatever_the_rank_of_keys(
    apart: bool, past: int, wide: int, outputs: int
) -> None:
    """The lengths, which no column depends on, may be unknown."""
    new = 7
    sides = {name: (new, HEADS * size) for name, size in (("k", SIZE), ("v", wide))}
    if apart:
        sides = {name: (HEADS, new, columns // HEADS) for name, (_, columns) in sides.items()}
    data = {"q": floats(2, 5, WIDTH)} | {name: floats(2, *shape) for name, shape in sides.items()}
    names = [*data]
    if past:
        data |= {f"past_{n}": floats(2, HEADS, past, size) for n, size in (("k", SIZE), ("v", wide))}
        names += ["", "", "", "past_k", "past_v"]
    made = model("MultiHeadAttention", data, names, outputs, {"num_heads": HEADS})
    shapes = [array.shape for array in run(made, data)]
    inferred = graphs.infer(made)
    assert [inferred[f"y{n}"].shape for n in range(outputs)] == shapes
    for value in made.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value in (new, past):
                dim.dim_param = "length"
    opened = shape_inference.infer_shapes(with_stand_ins(made), data_prop=True).graph.output
    assert [dim.dim_value for dim in opened[0].type.tensor_type.shape.dim] == list(shapes[0])


@given(small, small, flags, flags, st.sampled_from(["rows", "first"]), flags)
def test_rotary_embedding(
    batch: int, length: int, interleaved: bool, apart: bool, kind: str, partly: bool
) -> None:
    pairs = 1 if partly else SIZE // 2
    x = floats(batch, HEADS, length, SIZE) if apart else floats(batch, length, WIDTH)
    rows = np.random.default_rng(0).integers(0, 9, (batch, length))
    part = {"num_heads": HEADS, "rotary_embedding_dim": 2 * pairs} if partly else {}
    same(
        "RotaryEmbedding",
        {
            "x": x,
            "p": rows if kind == "rows" else np.array([3]),
            "c": floats(9, pairs, seed=1),
            "s": floats(9, pairs, seed=2),
        },
        interleaved=int(interleaved),
        **part,
    )


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "text"),
    [
        ("Attention", [(1, 3, 12), (12, 36), (36,)], {"past_present_share_buffer": 1}, "shared buffer"),
        ("Attention", [(1, 3, 12), (12, 36), (36,)], {"do_rotary": 1}, "turns positions"),
        ("Attention", [(1, 3, 12), (12, 36), (36,)], {"qkv_hidden_sizes": [12, 12, 13]}, "do not make up"),
        ("Attention", [(1, 3, 10), (10, 30), (30,)], {}, "do not divide"),
        ("MultiHeadAttention", [(1, 3, 3, 3, 4)], {}, "in one tensor"),
        ("RotaryEmbedding", [(1, 3, 12), (1, 3), (9, 2), (9, 2)], {"is_packed_batching": 1}, "packed"),
    ],
)
def test_what_is_refused(
    op: str, shapes: Sequence[tuple[int, ...]], attrs: dict[str, Any], text: str
) -> None:
    data = {f"x{i}": floats(*shape) for i, shape in enumerate(shapes)}
    heads = {} if op == "RotaryEmbedding" else {"num_heads": HEADS}
    with pytest.raises(ModelRefused, match=text):
        normalise(model(op, data, [*data], 1, heads | attrs))


@pytest.mark.parametrize(("new", "there"), [(1, 4), (3, 4), (3, 0)])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_over_a_past_of_fixed_length(new: int, there: int, causal: int) -> None:
    past = {f"past_{n}": floats(2, HEADS, 9, SIZE, seed=i) for i, n in enumerate("kv")}
    sides = {"k": floats(2, new, WIDTH, seed=1), "v": floats(2, new, WIDTH, seed=2)}
    given = {"q": floats(2, new, WIDTH), **sides, "b": None, "m": None, "e": None, **past}
    count = {"n": np.array([there], np.int32)}
    same("MultiHeadAttention", given | count, outputs=3, num_heads=HEADS, unidirectional=causal)


def test_a_past_of_fixed_length_with_a_mask_is_refused() -> None:
    sides = {name: floats(1, 1, WIDTH) for name in "qkv"}
    past = {f"past_{n}": floats(1, HEADS, 9, SIZE) for n in "kv"}
    data = {**sides, "m": np.ones((1, 9), np.int32), **past, "n": np.array([4], np.int32)}
    names = ["q", "k", "v", "", "m", "", "past_k", "past_v", "n"]
    with pytest.raises(ModelRefused, match="a mask beside a past of fixed length"):
        normalise(model("MultiHeadAttention", data, names, 3, {"num_heads": HEADS}))
