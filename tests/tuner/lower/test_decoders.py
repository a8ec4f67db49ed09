"""A layer of a decoder with packed weights and a cache, as onnxruntime-genai's builder writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from honed.machine.devices import Device
from honed.tuner.compiler.verification import run_model
from honed.tuner.frontend import normalise
from honed.tuner.verify import graphs
from tests.tuner.graph.graphs import answers, weights

pytestmark = pytest.mark.tvm
HEADS, FEW, SIZE, INNER, VOCABULARY, ROWS = 4, 2, 16, 96, 40, 8
HIDDEN = HEADS * SIZE
LAYER = f"""(int64[1,S] ids, int64[1,T] mask, float[1,{FEW},P,{SIZE}] pk, float[1,{FEW},P,{SIZE}] pv)
    => (float[1,S,{VOCABULARY}] logits, float[1,{FEW},R,{SIZE}] nk, float[1,{FEW},R,{SIZE}] nv)
    <int64[1] one = {{1}}, int64 first = {{1}}, float epsilon = {{0.00001}}> {{
    sum = ReduceSum<keepdims = 0>(mask, one) less = Sub(sum, one) ends = Cast<to = 6>(less)
    shape = Shape(mask) length = Gather(shape, first) total = Cast<to = 6>(length)
    x = com.microsoft.GatherBlockQuantized<bits = 4, block_size = 16>(table, ids, table_scale)
    a = SimplifiedLayerNormalization<axis = -1, epsilon = 0.00001>(x, gamma)
    qkv = com.microsoft.MatMulNBits<K = {HIDDEN}, N = {(HEADS + 2 * FEW) * SIZE}, block_size = 32>(a, wa, sa)
    b, nk, nv = com.microsoft.GroupQueryAttention<num_heads = {HEADS}, kv_num_heads = {FEW}, do_rotary = 1>
        (qkv, , , pk, pv, ends, total, cos, sin)
    c = com.microsoft.MatMulNBits<K = {HIDDEN}, N = {HIDDEN}, block_size = 32, accuracy_level = 4>(b, wb, sb)
    d, unused, unused_too, e = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.00001>(x, c, gamma)
    f = com.microsoft.MatMulNBits<K = {HIDDEN}, N = {INNER}, bits = 8, block_size = 16>(d, wc, sc)
    g = com.microsoft.QuickGelu<alpha = 1.0>(f)
    h = com.microsoft.MatMulNBits<K = {INNER}, N = {HIDDEN}, block_size = 32>(g, wd, sd)
    i = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.00001>(e, h, gamma)
    logits = MatMul(i, head) }}"""


def packed(terms: int, columns: int, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and scales of which products stay of unit size."""
    rng, blocks = np.random.default_rng((terms, columns)), terms // block
    scales = (0.5 + rng.random((columns, blocks))) / (1 << (bits - 2)) / np.sqrt(terms)
    shape = (columns, blocks, block * bits // 8)
    return rng.integers(0, 256, shape).astype(np.uint8), scales.astype(np.float32)


def layer(new: int, past: int, total: int) -> onnx.ModelProto:
    """So many new rows behind those of the past, of so many in all."""
    sizes = {"S": new, "P": past, "T": total, "R": max(past, total)}
    text = LAYER
    for name, size in sizes.items():
        text = text.replace(f",{name}", f",{size}")
    head = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g '
    model = onnx.parser.parse_model(head + text.replace("unused_too", "").replace("unused", ""))
    angles = np.arange(2 * ROWS)[:, None] * 0.5 ** np.arange(SIZE // 2)
    constants = {"gamma": 1 + weights(HIDDEN) / 8, "head": weights(HIDDEN, VOCABULARY)}
    constants |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    table, scale = packed(HIDDEN, VOCABULARY, 4, 16)
    constants |= {"table": table.reshape(VOCABULARY, -1), "table_scale": 8 * scale}
    all_of = {"a": (HIDDEN, (HEADS + 2 * FEW) * SIZE, 4, 32), "b": (HIDDEN, HIDDEN, 4, 32)}
    for name, sizes_of in (all_of | {"c": (HIDDEN, INNER, 8, 16), "d": (INNER, HIDDEN, 4, 32)}).items():
        constants[f"w{name}"], constants[f"s{name}"] = packed(*sizes_of)
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in constants.items())
    return model


def check_steps(run: Callable[[onnx.ModelProto, dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> None:
    """Steps over a cache of fixed capacity are as ONNX Runtime's over one that grows."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, ROWS)
    grown = {name: np.zeros((1, FEW, 0, SIZE), np.float32) for name in ("pk", "pv")}
    filled = {name: np.zeros((1, FEW, ROWS, SIZE), np.float32) for name in grown}
    there = 0
    for new in (3, 1, 1):
        given = {"ids": ids[None, there : there + new], "mask": np.ones((1, there + new), np.int64)}
        logits, *rows = answers(graphs.exact(layer(new, there, there + new)), given | grown)
        grown = dict(zip(grown, rows, strict=True))
        there += new
        given["mask"] = (np.arange(ROWS) < there).astype(np.int64)[None]
        found = run(layer(new, ROWS, ROWS), given | filled)
        filled = {"pk": found["nk"], "pv": found["nv"]}
        np.testing.assert_allclose(found["logits"], logits, atol=1e-4, rtol=1e-4)
        for name, wanted in grown.items():
            np.testing.assert_allclose(filled[name][:, :, :there], wanted, atol=1e-5)
            assert not filled[name][:, :, there:].any()


def test_steps_of_the_normalised_graph() -> None:
    def run(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        done = normalise(model)
        return dict(zip([one.name for one in done.outputs], answers(done.model, given), strict=True))

    check_steps(run)


@pytest.mark.slow
@pytest.mark.opencl
def test_steps_on_a_device(device: Device) -> None:
    check_steps(lambda model, given: run_model(model, given, device))
