"""ONNX's Attention against NumPy and ONNX Runtime: masks, caches, lengths, rows that attend to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from honed.tuner.frontend import normalise

from .test_rules import run

pytestmark = pytest.mark.tvm
NAMES = ("q", "k", "v", "mask", "past_k", "past_v", "filled")
Feed = dict[str, np.ndarray]


def model(
    feed: Feed, outputs: Sequence[str], opset: int, constant: Sequence[str] = (), **attrs: Any
) -> onnx.ModelProto:
    names = [name if name in feed else "" for name in NAMES]
    while not names[-1]:
        names.pop()
    kinds = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in feed.items()}
    graph = helper.make_graph(
        [helper.make_node("Attention", names, outputs, **attrs)],
        "attention",
        [helper.make_tensor_value_info(n, kinds[n], v.shape) for n, v in feed.items() if n not in constant],
        [helper.make_tensor_value_info(name, kinds["q"], None) for name in outputs if name],
        [numpy_helper.from_array(v, n) for n, v in feed.items() if n in constant],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def expected(feed: Feed, causal: bool, cap: float, scale: float | None, heads: int, few: int) -> Feed:
    """Return outputs by name, in float64: scores are capped, then masked."""
    q, k, v = (apart(feed[n], h) for n, h in (("q", heads), ("k", few), ("v", few)))
    past = 0
    if "past_k" in feed:
        past = feed["past_k"].shape[2]
        k, v = (np.concatenate([feed[f"past_{n}"], x], 2) for n, x in (("k", k), ("v", v)))
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), group, 1) for x in (k, v))
    scores = q @ keys.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    capped = cap * np.tanh(scores / cap) if cap else scores
    asking, total = scores.shape[-2:]
    seen, bias = np.ones(scores.shape, bool), np.zeros(scores.shape)
    mask = feed.get("mask")
    if mask is not None:
        missing = [(0, 0)] * (mask.ndim - 1) + [(0, total - mask.shape[-1])]
        if mask.dtype == np.bool_:
            seen = seen & np.pad(mask, missing)
        else:
            bias = bias + np.pad(mask, missing, constant_values=-np.inf)
    row, place = np.arange(asking)[:, None], np.arange(total)
    filled = feed["filled"][:, None, None, None] if "filled" in feed else None
    if filled is not None:
        seen = seen & (place < filled)
    if causal:
        seen = seen & (place <= row + (past if filled is None else filled - asking))
    full = np.where(seen, capped + bias, -np.inf)
    top = full.max(-1, keepdims=True)
    shares = np.exp(full - np.where(np.isfinite(top), top, 0))
    sums = shares.sum(-1, keepdims=True)
    shares = np.divide(shares, sums, out=np.zeros_like(shares), where=sums > 0)
    y = shares @ values
    if feed["q"].ndim == 3:
        y = y.transpose(0, 2, 1, 3).reshape(y.shape[0], asking, -1)
    return {"y": y, "new_k": k, "new_v": v, "scores": [scores, capped, full, shares]}  # type: ignore[dict-item]


def apart(x: np.ndarray, heads: int) -> np.ndarray:
    if x.ndim == 4:
        return x
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def drawn(
    seed: int, batch: int, few: int, group: int, asking: int, new: int, past: int, mask: str, *, flat: bool
) -> Feed:
    """Return inputs; of the masks some rows hide all keys."""
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    heads, total = few * group, past + new
    feed = {"q": floats(batch, heads, asking, 8), "k": floats(batch, few, new, 8)}
    feed["v"] = floats(batch, few, new, 4)
    if flat:
        feed = {n: x.transpose(0, 2, 1, 3).reshape(batch, x.shape[2], -1).copy() for n, x in feed.items()}
    shapes = {
        "pairs": (asking, total),
        "heads": (heads, asking, total),
        "batch": (batch, 1, asking, total),
        "all": (batch, heads, asking, total),
        "short": (batch, heads, asking, max(1, total - 1)),
    }
    kind, _, of = mask.partition(" ")
    if of:
        seen = rng.random(shapes[of]) > 0.4
        seen[..., rng.integers(asking), :] = False
        feed["mask"] = seen if kind == "bool" else np.where(seen, floats(*shapes[of]), -np.inf)
        feed["mask"] = feed["mask"] if kind == "bool" else feed["mask"].astype(np.float32)
    if past:
        feed |= {"past_k": floats(batch, few, past, 8), "past_v": floats(batch, few, past, 4)}
    if mask.startswith("filled"):
        feed["filled"] = np.concatenate([[0], rng.integers(0, new + 1, batch)])[-batch:].astype(np.int64)
    return feed


MASKS = ["", *(f"{kind} {of}" for kind in ("bool", "float") for of in ("pairs", "heads", "batch", "all"))]
small = st.integers(1, 3)


@given(
    st.integers(0, 2**31), small, small, small, small, small, st.integers(0, 3), st.sampled_from(MASKS),
    st.booleans(), st.sampled_from([0.0, 0.8]), st.sampled_from([None, 0.3]), st.booleans(),
    st.sampled_from([(), ("mask",)]),
)  # fmt: skip
def test_attention(
    seed: int, batch: int, few: int, group: int, asking: int, new: int, past: int, mask: str, causal: bool,
    cap: float, scale: float | None, flat: bool, constant: tuple[str, ...],
) -> None:  # fmt: skip
    feed = drawn(seed, batch, few, group, asking, new, past, mask, flat=flat)
    attrs: dict[str, Any] = {"is_causal": int(causal), "softcap": cap}
    attrs |= {} if scale is None else {"scale": scale}
    attrs |= {"q_num_heads": few * group, "kv_num_heads": few} if flat else {}
    outputs = ["y", "new_k", "new_v"] if past else ["y"]
    made = model(feed, outputs, 23, constant, **attrs)
    known = {name: value for name, value in feed.items() if name not in constant}
    wanted = expected(feed, causal, cap, scale, few * group, few)
    close(run(normalise(made).model, known), [wanted[name] for name in outputs])
    if not (causal and past and asking == 1 < new):  # where one query sees all keys in ONNX Runtime
        close(run(made, known), [wanted[name] for name in outputs])


@given(st.integers(0, 2**31), small, small, small, small, st.integers(1, 6), st.booleans(), st.booleans())
def test_filled_lengths(
    seed: int, batch: int, few: int, group: int, asking: int, new: int, causal: bool, masked: bool
) -> None:
    """Lengths of 0, of 1 and of all; causal masks are aligned at the last key that is there."""
    feed = drawn(seed, batch, few, group, asking, new, 0, "bool all" if masked else "", flat=False)
    feed["filled"] = np.random.default_rng(seed).choice([0, 1, new], batch).astype(np.int64)
    made = model(feed, ["y"], 24, is_causal=int(causal))
    wanted = [expected(feed, causal, 0.0, None, few * group, few)["y"]]
    close(run(normalise(made).model, feed), wanted)
    close(run(made, feed), wanted)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("cap", [0.0, 0.8])
def test_scores(mode: int, cap: float) -> None:
    feed = drawn(1, 2, 2, 2, 3, 4, 0, "bool all", flat=False)
    made = model(feed, ["y", "", "", "scores"], 23, softcap=cap, qk_matmul_output_mode=mode)
    wanted = expected(feed, False, cap, None, 4, 2)
    scores = np.maximum(wanted["scores"][mode], np.finfo(np.float32).min)  # which stands for -inf
    for of in (normalise(made).model, made):
        close(run(of, feed), [wanted["y"], scores])


def test_a_mask_that_is_short_hides_what_is_behind_it() -> None:
    for mask in ("bool short", "float short"):
        feed = drawn(2, 2, 2, 2, 3, 4, 2, mask, flat=False)
        made = model(feed, ["y"], 23)
        close(run(normalise(made).model, feed), [expected(feed, False, 0.0, None, 4, 2)["y"]])


def test_the_softmax_may_be_more_precise_than_its_inputs() -> None:
    feed = drawn(3, 2, 2, 2, 3, 4, 0, "bool all", flat=False)
    half = {n: v.astype(np.float16) if v.dtype == np.float32 else v for n, v in feed.items()}
    made = normalise(model(half, ["y"], 23, softmax_precision=onnx.TensorProto.FLOAT)).model
    [found] = run(made, half)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected(feed, False, 0.0, None, 4, 2)["y"], atol=5e-3)


def test_only_masks_that_may_hide_rows_are_looked_at_again() -> None:
    """What hides no row as a whole takes no more nodes than a softmax."""

    def wheres(feed: Feed, *constant: str, **attrs: Any) -> int:
        nodes = normalise(model(feed, ["y"], 23, constant, **attrs)).model.graph.node
        return sum(node.op_type == "Where" for node in nodes)

    plain, masked = (drawn(4, 1, 1, 1, 3, 4, 0, mask, flat=False) for mask in ("", "bool all"))
    assert wheres(plain) == 0
    assert wheres(plain, is_causal=1) == 1
    assert wheres(masked) == 2
    open_mask = masked | {"mask": np.ones_like(masked["mask"])}
    assert wheres(open_mask, "mask") == 1


def close(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
