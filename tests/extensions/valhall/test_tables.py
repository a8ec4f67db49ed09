"""No tile of the tables spills on the class of drivers that it is served to, by the compilers there are."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest

from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.target import target_for
from honed.tuner.tune.extract import extract
from honed.valhall.bench import bench_profile
from honed.valhall.compiler import ROOTS, OfflineCompiler
from honed.valhall.dump import kernels
from tests.tuner.graph.graphs import parsed
from tests.tuner.lower.test_decoders import packed

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="the offline compilers need root"),
]

PRODUCTS = [(192, 256, 256), (192, 512, 512), (192, 192, 64), (49, 960, 160), (128, 196, 512)]
POINTS = [
    (64, 13, 256),
    (384, 13, 48),
    (512, 13, 1000),
    (128, 55, 16),
    (32, 27, 128),
    (112, 4, 1280),
    (56, 4, 336),
    (336, 4, 112),
    (16, 56, 64),
    (24, 28, 40),
    (32, 28, 80),
]  # channels, side, channels
GATED = [
    (32, 26, 32),
    (64, 26, 64),
    (32, 52, 64),
    (48, 52, 80),
    (64, 28, 40),
]  # the same, times their sigmoids, which take registers for each of the sums
WINDOWS = [(32, 56, 1), (16, 104, 2)]  # channels, side, stride
FEW_BITS = [(64, 576, 576), (64, 576, 1536), (64, 1536, 576), (1, 1536, 576)]  # rows, terms, columns
SUMMED = [(48, 13, 192), (64, 56, 64), (128, 14, 128), (512, 7, 512)]  # channels, side, channels


def _gated() -> list[str]:
    return [_point(*each, "s = Sigmoid(c) y = Mul(c, s)") for each in GATED]


def _point(given: int, side: int, made: int, then: str) -> str:
    return (
        f"(float[1,{given},{side},{side}] x, float[{made},{given},1,1] w)"
        f" => (float[1,{made},{side},{side}] y) {{ c = Conv(x, w) {then} }}"
    )


def _models() -> list[str]:
    found = [
        f"(float[{m},{k}] x, float[{k},{n}] w) => (float[{m},{n}] y) {{ y = MatMul(x, w) }}"
        for m, n, k in PRODUCTS
    ]
    found += [_point(*each, "y = Relu(c)") for each in POINTS] + _gated()
    found += [
        f"(float[1,{channels},{side},{side}] x, float[{channels},1,3,3] w)"
        f" => (float[1,{channels},{side // stride},{side // stride}] y)"
        f" {{ y = Conv <group={channels}, pads=[1,1,1,1], strides=[{stride},{stride}]> (x, w) }}"
        for channels, side, stride in WINDOWS
    ]
    found += [
        f"(float[1,{given},{side},{side}] x, float[{made},{given},3,3] w)"
        f" => (float[1,{made},{side},{side}] y) {{ y = Conv <pads=[1,1,1,1]> (x, w) }}"
        for given, side, made in SUMMED
    ]
    return found


@pytest.mark.parametrize(
    "mesa",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not (root / "root/server").exists(), reason=f"{root} was not built"),
        )
        for name, root in ROOTS.items()
    ],
)
def test_no_table_serves_a_tile_that_spills(mesa: str, tmp_path: Path) -> None:
    profile, sources = bench_profile("mali-g610", mesa), []
    halves = [_with_weights(parsed(text)) for text in _models()] + _few_bits()
    models = [(model, "fp16") for model in halves]
    models += [(_with_weights(parsed(text)), "fp32") for text in _gated()]
    for n, (model, precision) in enumerate(models):
        onnx.save(model, tmp_path / f"{n}.onnx")
        for one in extract(tmp_path / f"{n}.onnx", {}, precision, profile).tasks:
            origin, lowered, _ = untuned_kernels(one.func, "main", target_for(profile), profile)
            if origin == "tables:mali":
                sources.append((f"model {n}: {one.task.name}", lowered.source))
    assert len(sources) >= len(models) - 2, "nearly all are served by a table"
    with OfflineCompiler(ROOTS[mesa], jobs=1) as compiler:
        begun = [(name, compiler.build(source)) for name, source in sources]
        spilling = [
            name for name, dump in begun if any(one.spills for one in kernels(dump.result()).values())
        ]
    assert spilling == []


def _few_bits() -> list[onnx.ModelProto]:
    """Products with weights of 4 bits, to which something is added."""
    found = []
    for rows, terms, columns in FEW_BITS:
        words, scales = packed(terms, columns, 4, 32)
        product = f"com.microsoft.MatMulNBits <K = {terms}, N = {columns}, bits = 4, block_size = 32>"
        text = f"(float[{rows},{terms}] x, float[{rows},{columns}] z) => (float[{rows},{columns}] y)"
        found.append(parsed(f"{text} {{ m = {product} (x, w, s) y = Add(m, z) }}", w=words, s=scales))
    return found


def _with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Make a constant of what is called w: its layout may be another."""
    (given,) = [value for value in model.graph.input if value.name == "w"]
    shape = [axis.dim_value for axis in given.type.tensor_type.shape.dim]
    count = 1
    for extent in shape:
        count *= extent
    values = [0.01 * (n % 7) for n in range(count)]
    model.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, shape, values))
    model.graph.input.remove(given)
    return model
